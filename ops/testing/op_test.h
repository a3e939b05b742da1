// What op tests share: a stream to record on, random weights in every stored type with their exact values, and
// conversions to the quantised formats that are computed apart from the runtime's.
//
//   TEST_F(LinearTest, Multiplies) {            // class LinearTest : public OpTest {};
//     TestWeight weight({.rows = 130, .cols = 200, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128});
//     DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}));
//     ... weight.At(row, col) ...
//
// Test only.
#ifndef DSV4_OPS_TESTING_OP_TEST_H_
#define DSV4_OPS_TESTING_OP_TEST_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/device.h"
#include "runtime/device_testing.h"
#include "runtime/stream.h"
#include "runtime/testing.h"
#include "runtime/weight_view.h"

namespace dsv4 {

class OpTest : public DeviceTest {
 protected:
  // What `record` hands to the stream's sink; nothing of it has run. CPU only.
  std::vector<OpRecord> Capture(const std::function<absl::Status()>& record);

  // A stream of the CPU, whose ops are the specification of what every device computes.
  Stream& cpu_stream();

 private:
  std::unique_ptr<Device> cpu_device_;
  std::unique_ptr<Stream> cpu_stream_;
};

// The declared accesses, such as "read x f32 [3, 8]", "before wait weight bf16 [8]" or "write out f32 [3, 8]".
std::vector<std::string> Declared(const OpRecord& record);

struct TestWeightOptions {
  int64_t stack = 0;  // > 0: that many matrices
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kF32;
  DType scale_dtype = DType::kE8m0;
  int64_t block_rows = 1;  // of e4m3 and e2m1x2
  int64_t block_cols = 1;
  uint64_t seed = 1;
  float standard_deviation = 1.0f;  // roughly, of the dequantised values
};

// Owns a random weight, and knows its values.
class TestWeight {
 public:
  explicit TestWeight(const TestWeightOptions& options);

  const QuantizedWeight& view() const { return view_; }
  // The exact value of element (row, col) of matrix `i`.
  double At(int64_t row, int64_t col, int64_t i = 0) const {
    return exact_[static_cast<size_t>((i * options_.rows + row) * options_.cols + col)];
  }

 private:
  TestWeightOptions options_;
  std::unique_ptr<TestTensor> values_;
  std::unique_ptr<TestTensor> scales_;
  QuantizedWeight view_;
  std::vector<double> exact_;
};

// A table [positions, channels] of cosines, then sines, of random angles.
TestTensor RandomRotations(int64_t positions, int64_t channels, uint64_t seed);

// Values of the formats' codes, and the nearest value of a format (ties to the even code; saturating), from the
// formats' definitions.
double E4m3Value(uint8_t code);
double E2m1Value(uint8_t code);
uint8_t NearestE4m3(double x);
uint8_t NearestE2m1(double x);
double NearestBf16(double x);

// The exponent of the smallest power of two s with max(largest, floor) / s <= top.
int ScaleExponent(double largest, double floor, double top);

// A row rounded to e4m3 with one power-of-two scale per `block` channels.
std::vector<double> QuantizedActivations(const std::vector<double>& row, int64_t block);

}  // namespace dsv4

#endif  // DSV4_OPS_TESTING_OP_TEST_H_
