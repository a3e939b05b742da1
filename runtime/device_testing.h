// Tests that run on either backend: the same bodies run on the CPU by default and on a GPU in //tests:gpu_tests.
//
//   class RmsNormTest : public DeviceTest {};
//   TEST_F(RmsNormTest, ...) {
//     TestTensor x(...), out(...);                    // memory that this test's device can access
//     DSV4_ASSERT_OK(Record(stream(), {...}));        // has run when it returns
//     EXPECT_TRUE(IsClose(out.ToFloats(), ...));
//   }
//
// Where the chosen device is missing the test is skipped. Test only.
#ifndef DSV4_RUNTIME_DEVICE_TESTING_H_
#define DSV4_RUNTIME_DEVICE_TESTING_H_

#include <memory>

#include "gtest/gtest.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dsv4 {

// Chooses the device of the tests that start from now on.
void SetTestDevice(DeviceKind kind);

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  Device& device() { return *device_; }
  Stream& stream() { return *stream_; }
  bool on_cpu() const { return device_->kind() == DeviceKind::kCpu; }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DEVICE_TESTING_H_
