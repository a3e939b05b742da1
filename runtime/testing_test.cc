#include "runtime/testing.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsNan;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(TestTensor, StartsAsNaNsOrMinusOnes) {
  EXPECT_THAT(TestTensor(DType::kF32, {3, 5}).ToFloats(), Each(IsNan()));
  EXPECT_THAT(TestTensor(DType::kBf16, {3, 5}).ToFloats(), Each(IsNan()));
  EXPECT_THAT(TestTensor(DType::kE4m3, {3, 5}).ToFloats(), Each(IsNan()));
  EXPECT_THAT(TestTensor(DType::kE8m0, {3, 5}).ToFloats(), Each(IsNan()));
  EXPECT_THAT(TestTensor(DType::kI64, {3}).ToInts(), Each(-1));
  EXPECT_THAT(TestTensor(DType::kI32, {3}).ToInts(), Each(-1));
}

TEST(TestTensor, SeesWritesBeforeAndAfter) {
  for (int64_t elements : {0, 1, 64, 65}) {
    TestTensor x(DType::kF32, {elements});
    x.Poison(0);
    EXPECT_TRUE(x.GuardsIntact());
    for (int64_t byte : {int64_t{-1}, -TestTensor::kGuardBytes, 4 * elements, 4 * elements + TestTensor::kGuardBytes - 1}) {
      uint8_t* address = x.data<uint8_t>() + byte;
      const uint8_t before = *address;
      *address = 0;
      EXPECT_THAT(x.GuardsIntact().message(), HasSubstr("byte " + std::to_string(byte) + " was written"));
      *address = before;
    }
    EXPECT_TRUE(x.GuardsIntact());
  }
}

TEST(TestTensor, ConvertsToItsDTypeAndBack) {
  EXPECT_EQ(TestTensor(DType::kF32, {2}, {0.1f, -2.0f}).ToFloats(), (std::vector<float>{0.1f, -2.0f}));
  EXPECT_EQ(TestTensor(DType::kBf16, {2}, {1.00390625f, -2.0f}).ToFloats(), (std::vector<float>{1.0f, -2.0f}));
  EXPECT_EQ(TestTensor(DType::kE4m3, {2}, {1000.0f, -2.0f}).ToFloats(), (std::vector<float>{448.0f, -2.0f}));
  EXPECT_EQ(TestTensor::OfInts(DType::kI64, {2}, {-5, int64_t{1} << 40}).ToInts(),
            (std::vector<int64_t>{-5, int64_t{1} << 40}));
  EXPECT_EQ(TestTensor::OfInts(DType::kI32, {2}, {-5, 7}).ToInts(), (std::vector<int64_t>{-5, 7}));
}

TEST(RandomFloats, RepeatWithTheirSeedAndHaveTheirDeviation) {
  EXPECT_EQ(RandomFloats(100, 1), RandomFloats(100, 1));
  EXPECT_NE(RandomFloats(100, 1), RandomFloats(100, 2));
  double squares = 0;
  for (float x : RandomFloats(100000, 3, 2.0f)) squares += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_NEAR(std::sqrt(squares / 100000), 2.0, 0.02);
}

TEST(RelativeL2, IsTheNormOfTheDifferenceOverTheNorm) {
  EXPECT_DOUBLE_EQ(RelativeL2({3, 4}, {3, 4}), 0);
  EXPECT_DOUBLE_EQ(RelativeL2({3, 5}, {3, 4}), 0.2);
  EXPECT_DOUBLE_EQ(RelativeL2({0, 0}, {3, 4}), 1);
  EXPECT_DOUBLE_EQ(RelativeL2({}, {}), 0);
  EXPECT_DOUBLE_EQ(RelativeL2({0}, {0}), 0);
}

TEST(RelativeL2, IsInfiniteWhereNoNumberWouldDo) {
  EXPECT_EQ(RelativeL2({1}, {0}), kInfinity);
  EXPECT_EQ(RelativeL2({kNaN, 1}, {1, 1}), kInfinity);
  EXPECT_EQ(RelativeL2({1, 1}, {kNaN, 1}), kInfinity);
  EXPECT_EQ(RelativeL2({kInfinity, 1}, {1, 1}), kInfinity);
  EXPECT_EQ(RelativeL2({kInfinity, 1}, {-kInfinity, 1}), kInfinity);
  EXPECT_EQ(RelativeL2({kInfinity, kNaN, 1}, {kInfinity, kNaN, 1}), 0);
}

TEST(RelativeL2, DifferentSizesFail) {
  EXPECT_NONFATAL_FAILURE(EXPECT_EQ(RelativeL2({1}, {1, 2}), kInfinity), "cannot compare 1 values with 2");
}

TEST(Compare, FindsTheWorstRowAndItsWorstColumn) {
  const std::vector<float> expected = {100, 100, 100, 1, 1, 1, 10, 10, 10};
  const std::vector<float> actual = {101, 100, 100, 1, 1.1f, 1.5f, 10, 10, 10};
  const Difference difference = Compare(actual, expected, 3);
  EXPECT_EQ(difference.worst_row, 1);
  EXPECT_EQ(difference.worst_column, 2);
  EXPECT_EQ(difference.actual, 1.5f);
  EXPECT_EQ(difference.expected, 1.0f);
  EXPECT_NEAR(difference.worst_row_relative_l2, std::sqrt(0.26 / 3), 1e-6);
  std::ostringstream text;
  text << difference;
  EXPECT_THAT(text.str(), HasSubstr("worst row 1"));
  EXPECT_THAT(text.str(), HasSubstr("column 2: got 1.5, expected 1"));
}

TEST(IsClose, JudgesTheWorstRow) {
  const std::vector<float> expected = {1000, 1000, 1, 1};
  const std::vector<float> actual = {1000, 1000, 1, 1.1f};
  EXPECT_LT(RelativeL2(actual, expected), 1e-3);
  EXPECT_FALSE(IsClose(actual, expected, 2, 1e-2));
  EXPECT_TRUE(IsClose(actual, expected, 2, 0.1));
  EXPECT_FALSE(IsClose({kNaN, 1}, {1, 1}, 2, 1e30));
  EXPECT_FALSE(IsClose({1}, {1, 1}, 1, 1));
  EXPECT_THAT(IsClose(actual, expected, 2, 1e-2).message(), HasSubstr("worst row 1"));
}

TEST(BitwiseEqual, SeesEveryBitAndNamesThePlace) {
  TestTensor a(DType::kF32, {2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});
  TestTensor b(DType::kF32, {2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_TRUE(BitwiseEqual(a.view(), b.view()));
  b.data<float>()[0] = -0.0f;
  b.data<float>()[6] = 9;
  EXPECT_THAT(BitwiseEqual(a.view(), b.view()).message(), HasSubstr("2 of 8 elements"));
  EXPECT_TRUE(BitwiseEqual(a.view().Columns(1, 1), b.view().Columns(1, 1)));
  EXPECT_THAT(BitwiseEqual(a.view().Columns(1, 3), b.view().Columns(1, 3)).message(),
              HasSubstr("at [1, 1]: got 6, expected 9"));
  EXPECT_FALSE(BitwiseEqual(a.view(), b.view().FirstRows(1)));
  EXPECT_TRUE(BitwiseEqual(TestTensor(DType::kBf16, {3}).view(), TestTensor(DType::kBf16, {3}).view()));
}

TEST(StatusIs, MatchesCodeAndText) {
  const absl::Status status = absl::NotFoundError("no tensor x");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound, "tensor x"));
  EXPECT_THAT(status, testing::Not(StatusIs(absl::StatusCode::kNotFound, "tensor y")));
  EXPECT_THAT(status, testing::Not(StatusIs(absl::StatusCode::kInternal, "tensor x")));
  EXPECT_THAT(absl::StatusOr<int>(status), StatusIs(absl::StatusCode::kNotFound, ""));
  EXPECT_THAT(status, testing::Not(IsOk()));
  DSV4_EXPECT_OK(absl::StatusOr<int>(1));
}

}  // namespace
}  // namespace dsv4
