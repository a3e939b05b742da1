#include "ops/rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kEps = 1e-6f;
// The sum of 4096 squares in a few fp32 chains of at most 1024 additions errs by a random walk of roundings of 2^-24 of
// the partial sum, sqrt(1024) * 2^-24 = 1.9e-6, of which the root takes half; and three more roundings.
constexpr double kF32Tolerance = 1.2e-6;

class RmsNormTest : public OpTest {};

std::vector<float> Expected(const std::vector<float>& x, const std::vector<float>& weight) {
  std::vector<float> expected;
  for (size_t begin = 0; begin < x.size(); begin += weight.size()) {
    double sum = 0;
    for (size_t k = 0; k < weight.size(); ++k) sum += static_cast<double>(x[begin + k]) * x[begin + k];
    const double root = std::sqrt(sum / static_cast<double>(weight.size()) + kEps);
    for (size_t k = 0; k < weight.size(); ++k) expected.push_back(static_cast<float>(weight[k] * x[begin + k] / root));
  }
  return expected;
}

TEST_F(RmsNormTest, DividesByTheRootMeanSquare) {
  for (const int64_t rows : {1, 2, 3, 31, 32, 33}) {
    for (const int64_t channels : {1, 2, 3, 31, 32, 33, 256, 4096}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        const TestTensor x(dtype, {rows, channels}, RandomFloats(rows * channels, 1, 3.0f));
        const TestTensor weight(dtype, {channels}, RandomFloats(channels, 2));
        TestTensor out(DType::kF32, {rows, channels});
        DSV4_ASSERT_OK(
            rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = out.view()}));
        EXPECT_TRUE(IsClose(out.ToFloats(), Expected(x.ToFloats(), weight.ToFloats()), channels, kF32Tolerance));
        out.CheckGuards();
      }
    }
  }
}

TEST_F(RmsNormTest, AddsEpsToTheMeanOfSmallRows) {
  const TestTensor x(DType::kF32, {2, 4}, {1e-3f, -1e-3f, 1e-3f, 1e-3f, 0, 0, 0, 0});
  const TestTensor weight(DType::kF32, {4}, {1, 1, 1, 2});
  TestTensor out(DType::kF32, {2, 4});
  DSV4_ASSERT_OK(
      rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = out.view()}));
  const float half = std::sqrt(0.5f);  // mean square and eps are both 1e-6
  EXPECT_TRUE(IsClose(out.ToFloats(), {half, -half, half, 2 * half, 0, 0, 0, 0}, 4, kF32Tolerance));
}

TEST_F(RmsNormTest, RoundsOnceToBf16AndWorksInPlace) {
  const TestTensor weight(DType::kBf16, {40}, RandomFloats(40, 3));
  TestTensor x(DType::kBf16, {3, 40}, RandomFloats(120, 4));
  TestTensor exact(DType::kF32, {3, 40});
  DSV4_ASSERT_OK(
      rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = exact.view()}));
  const TestTensor rounded(DType::kBf16, {3, 40}, exact.ToFloats());
  DSV4_ASSERT_OK(rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = x.view()}));
  EXPECT_TRUE(BitwiseEqual(x.view(), rounded.view()));
  x.CheckGuards();
}

TEST_F(RmsNormTest, GivesARowTheSameBitsInAnyCompany) {
  const TestTensor weight(DType::kF32, {37}, RandomFloats(37, 5));
  TestTensor x(DType::kF32, {33, 37}, RandomFloats(33 * 37, 6));
  TestTensor all(DType::kF32, {33, 37});
  DSV4_ASSERT_OK(
      rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = all.view()}));
  std::fill_n(x.data<float>() + 37, 37, std::numeric_limits<float>::quiet_NaN());
  for (const int64_t begin : {0, 2, 17, 32}) {
    const int64_t count = 33 - begin;
    TestTensor some(DType::kF32, {count, 37});
    DSV4_ASSERT_OK(rms_norm::Record(
        stream(), {.x = x.view().Rows(begin, count), .weight = weight.weight(), .eps = kEps, .out = some.view()}));
    EXPECT_TRUE(BitwiseEqual(some.view().FirstRows(1), all.view().Rows(begin, 1)));
    EXPECT_TRUE(BitwiseEqual(some.view().Rows(count - 1, 1), all.view().Rows(32, 1)));
  }
}

TEST_F(RmsNormTest, TakesViewsOfWiderTensors) {
  const TestTensor x(DType::kF32, {3, 20}, RandomFloats(60, 7));
  const TestTensor weight(DType::kF32, {5}, RandomFloats(5, 8));
  const TestTensor out(DType::kF32, {3, 9});
  DSV4_ASSERT_OK(rms_norm::Record(
      stream(),
      {.x = x.view().Columns(10, 5), .weight = weight.weight(), .eps = kEps, .out = out.view().Columns(2, 5)}));
  EXPECT_TRUE(IsClose(ToFloats(out.view().Columns(2, 5)),
                      Expected(ToFloats(x.view().Columns(10, 5)), weight.ToFloats()), 5, kF32Tolerance));
  EXPECT_THAT(ToFloats(out.view().Columns(0, 2)), Each(testing::IsNan()));
  EXPECT_THAT(ToFloats(out.view().Columns(7, 2)), Each(testing::IsNan()));
}

TEST_F(RmsNormTest, DeclaresWhatItTouches) {
  const TestTensor x(DType::kF32, {2, 3}, std::vector<float>(6, 1.0f));
  const TestTensor weight(DType::kBf16, {3}, {1, 1, 1});
  const TestTensor out(DType::kBf16, {2, 3});
  const std::vector<OpRecord> records = Capture([&] {
    return rms_norm::Record(stream(), {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = out.view()});
  });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "rms_norm");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read x f32 [2, 3]", "before wait weight bf16 [3]", "write out bf16 [2, 3]"));
  EXPECT_THAT(out.Bytes(), Each(0xFF));
}

TEST_F(RmsNormTest, RefusesBadInputByName) {
  const TestTensor x(DType::kF32, {2, 3}, std::vector<float>(6, 1.0f));
  const TestTensor weight(DType::kF32, {3}, {1, 1, 1});
  const TestTensor out(DType::kF32, {2, 3});
  const rms_norm::Params good = {.x = x.view(), .weight = weight.weight(), .eps = kEps, .out = out.view()};
  const auto refused = [&](const char* message, const auto& change) {
    rms_norm::Params params = good;
    change(params);
    EXPECT_THAT(rms_norm::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("x: expected f32 or bf16 [any, any], got no tensor", [](auto& p) { p.x = TensorView(); });
  refused("x: expected data", [](auto& p) { p.x.data = nullptr; });
  refused("x: expected f32 or bf16 [any, any]", [](auto& p) { p.x.dtype = DType::kE4m3; });
  refused("weight: expected f32 or bf16 [3]", [&](auto& p) { p.weight = weight.weight().Rows(0, 2); });
  refused("out: expected f32 or bf16 [2, 3]", [&](auto& p) { p.out = out.view().FirstRows(1); });
  refused("out and x: ", [&](auto& p) {
    p.out = p.x;
    p.out.dtype = DType::kBf16;
  });
  refused("out and weight: ", [&](auto& p) {
    p.x = p.x.FirstRows(1);
    p.out = weight.view().Reshape({1, 3});
  });
  refused("out and weight: ", [&](auto& p) { p.x = p.out = weight.view().Reshape({1, 3}); });
  EXPECT_THAT(out.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
