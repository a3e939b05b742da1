// What tests are made of: status assertions, poisoned tensors between guard bytes, and comparisons that print
// the worst place.
//
//   TestTensor x(DType::kBf16, {tokens, 256}), out(DType::kF32, {tokens, 256});
//   x.Set(RandomFloats(x.num_elements(), /*seed=*/1));
//   DSV4_ASSERT_OK(Record(stream, {.x = x.view(), .out = out.view()}));
//   EXPECT_TRUE(IsClose(out.ToFloats(), expected, /*row_size=*/256, 1e-6));
//   out.CheckGuards();
//   EXPECT_THAT(Record(stream, {.x = wrong}), StatusIs(absl::StatusCode::kInvalidArgument, "x: expected"));
//
// Test only. Memory is the host's; SetTestMemory makes it of a kind that a device can access too.
#ifndef DSV4_RUNTIME_TESTING_H_
#define DSV4_RUNTIME_TESTING_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/status.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

inline const absl::Status& GetStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

// A Status, or the status of a StatusOr, with this code and a message that contains `substring`.
MATCHER_P2(StatusIs, code, substring,
           "has the code " + absl::StatusCodeToString(code) + " and a message with \"" + std::string(substring) + "\"") {
  const absl::Status& status = GetStatus(arg);
  *result_listener << "which is " << status.ToString();
  return status.code() == code && std::string(status.message()).find(std::string(substring)) != std::string::npos;
}
MATCHER(IsOk, "is ok") {
  const absl::Status& status = GetStatus(arg);
  *result_listener << "which is " << status.ToString();
  return status.ok();
}

#define DSV4_EXPECT_OK(expression) EXPECT_THAT(expression, ::dsv4::IsOk())
#define DSV4_ASSERT_OK(expression) ASSERT_THAT(expression, ::dsv4::IsOk())
#define DSV4_ASSERT_OK_AND_ASSIGN(declaration, expression) \
  DSV4_ASSERT_OK_AND_ASSIGN_INNER(DSV4_STATUS_CONCAT(dsv4_statusor_, __LINE__), declaration, expression)
#define DSV4_ASSERT_OK_AND_ASSIGN_INNER(statusor, declaration, expression) \
  auto statusor = (expression);                                            \
  ASSERT_TRUE(statusor.ok()) << statusor.status();                         \
  declaration = *std::move(statusor)

// `count` normal values of mean 0, the same for the same seed.
std::vector<float> RandomFloats(int64_t count, uint64_t seed, float standard_deviation = 1.0f);

// The elements of a view of any strides, outermost index first, as floats (integers are converted too); and the way
// back, rounded to the view's dtype. Not for e2m1x2.
std::vector<float> ToFloats(const TensorView& view);
void SetFloats(const TensorView& view, const std::vector<float>& values);
// The same for i64, i32 and u8.
std::vector<int64_t> ToInts(const TensorView& view);
void SetInts(const TensorView& view, const std::vector<int64_t>& values);

// Where a TestTensor made from now on gets its memory, aligned to 256 bytes. Each tensor returns its own to where it came
// from. Null functions: the heap.
struct TestMemory {
  void* (*allocate)(int64_t bytes) = nullptr;
  void (*free)(void* memory) = nullptr;
};
void SetTestMemory(const TestMemory& memory);

// Owns a contiguous tensor, aligned to 256 bytes, between guard bytes. Every byte of it starts as 0xFF, which is NaN in
// every floating-point type and -1 in the signed integers.
class TestTensor {
 public:
  static constexpr int64_t kGuardBytes = 1024;

  TestTensor(DType dtype, std::initializer_list<int64_t> extents);
  // With values: of f32, bf16 or e4m3; of i64, i32 or u8.
  TestTensor(DType dtype, std::initializer_list<int64_t> extents, const std::vector<float>& values);
  static TestTensor OfInts(DType dtype, std::initializer_list<int64_t> extents, const std::vector<int64_t>& values);

  const TensorView& view() const { return view_; }
  WeightView weight() const { return WeightView(view_); }
  int64_t num_elements() const { return view_.num_elements(); }
  template <typename T>
  T* data() const {
    return view_.As<T>();
  }

  void Poison(uint8_t byte = 0xFF);
  void Set(const std::vector<float>& values) { SetFloats(view_, values); }
  std::vector<float> ToFloats() const { return dsv4::ToFloats(view_); }
  std::vector<int64_t> ToInts() const { return dsv4::ToInts(view_); }
  // A copy of the tensor's bytes, for comparisons before and after.
  std::vector<uint8_t> Bytes() const;

  // Failure names the first guard byte that was written, relative to the tensor.
  testing::AssertionResult GuardsIntact() const;
  void CheckGuards() const { EXPECT_TRUE(GuardsIntact()); }

 private:
  std::unique_ptr<uint8_t[], void (*)(void* memory)> memory_{nullptr, nullptr};
  TensorView view_;
};

// sqrt(sum((a - b)^2) / sum(b^2)), in double; infinity where that is no number. Equal values, infinities and pairs of
// NaN included, differ by 0.
double RelativeL2(const std::vector<float>& actual, const std::vector<float>& expected);

// Where two sets of rows differ most.
struct Difference {
  double relative_l2 = 0;         // of everything
  int64_t worst_row = 0;          // the row with the largest relative L2
  double worst_row_relative_l2 = 0;
  int64_t worst_column = 0;       // in that row, the largest absolute difference
  float actual = 0, expected = 0;  // there
};
std::ostream& operator<<(std::ostream& out, const Difference& difference);

Difference Compare(const std::vector<float>& actual, const std::vector<float>& expected, int64_t row_size);

// Success if no row's relative L2 exceeds `tolerance`; prints the worst row and the worst coordinate otherwise.
testing::AssertionResult IsClose(const std::vector<float>& actual, const std::vector<float>& expected,
                                 int64_t row_size, double tolerance);

// Success if both have the same dtype, extents and bytes; prints the first place that differs otherwise.
testing::AssertionResult BitwiseEqual(const TensorView& actual, const TensorView& expected);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_TESTING_H_
