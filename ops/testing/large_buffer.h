// Memory far larger than a test touches, for addresses past what 32 bits count. All zeros.
//
//   const LargeBuffer memory(device(), stream(), int64_t{40} << 30);
//   if (memory.data() == nullptr) GTEST_SKIP() << "no room";
//   memory.Put(index, 3.0f);
//   ... an op over a view of memory.data() ...
//   EXPECT_EQ(memory.Get<float>(index), 3.0f);
//
// On the CPU it takes room only where it is written. Test only.
#ifndef DSV4_OPS_TESTING_LARGE_BUFFER_H_
#define DSV4_OPS_TESTING_LARGE_BUFFER_H_

#include <cstdint>

#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/testing.h"

namespace dsv4 {

class LargeBuffer {
 public:
  LargeBuffer(Device& device, Stream& stream, int64_t bytes);
  ~LargeBuffer();
  LargeBuffer(const LargeBuffer&) = delete;
  LargeBuffer& operator=(const LargeBuffer&) = delete;

  // Null: there is no room, or (under a sanitizer) none can be had.
  void* data() const { return data_; }

  // Element `index` of the buffer as an array of T.
  template <typename T>
  T Get(int64_t index) const {
    T value = {};
    DSV4_EXPECT_OK(stream_.CopyToHost(&value, static_cast<T*>(data_) + index, sizeof(value)));
    DSV4_EXPECT_OK(stream_.Synchronize());
    return value;
  }
  template <typename T>
  void Put(int64_t index, T value) const {
    DSV4_EXPECT_OK(stream_.CopyToDevice(static_cast<T*>(data_) + index, &value, sizeof(value)));
    DSV4_EXPECT_OK(stream_.Synchronize());
  }

 private:
  Device& device_;
  Stream& stream_;
  int64_t bytes_;
  void* data_ = nullptr;
};

}  // namespace dsv4

#endif  // DSV4_OPS_TESTING_LARGE_BUFFER_H_
