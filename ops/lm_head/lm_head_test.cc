#include "ops/lm_head/lm_head.h"

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

// As for `linear`: a random walk of roundings of 2^-24 over 384 additions, 1.2e-6.
constexpr double kTolerance = 2e-6;

class LmHeadTest : public OpTest {};

std::vector<float> Expected(const std::vector<float>& x, const TestWeight& weight) {
  const int64_t channels = weight.view().cols();
  std::vector<float> expected;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / channels; ++i) {
    for (int64_t o = 0; o < weight.view().rows(); ++o) {
      double sum = 0;
      for (int64_t k = 0; k < channels; ++k) sum += x[static_cast<size_t>(i * channels + k)] * weight.At(o, k);
      expected.push_back(static_cast<float>(sum));
    }
  }
  return expected;
}

TEST_F(LmHeadTest, GivesTheLogitsOfRowsThatWantThem) {
  for (const int64_t channels : {300, 384}) {  // on a GPU the second is one for tensor cores where both are bf16
    const TestWeight weight({.rows = 131, .cols = channels, .dtype = DType::kBf16});
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const int64_t rows : {1, 2, 3, 31, 32, 33}) {
        const TestTensor x(dtype, {rows, channels}, RandomFloats(rows * channels, 1));
        const std::vector<float> expected = Expected(x.ToFloats(), weight);
        std::vector<int64_t> wanted(static_cast<size_t>(rows));
        for (int64_t l = 0; l < rows; ++l) wanted[static_cast<size_t>(l)] = l % 3 == 1 ? -1 - l : 5 * l;
        const TestTensor row_ids = TestTensor::OfInts(DType::kI32, {rows}, wanted);
        // Rows that want nothing may hold anything.
        for (int64_t l = 1; l < rows; l += 3) {
          SetFloats(x.view().Rows(l, 1),
                    std::vector<float>(static_cast<size_t>(channels), std::numeric_limits<float>::quiet_NaN()));
        }
        TestTensor logits(DType::kF32, {rows, 131});
        DSV4_ASSERT_OK(lm_head::Record(
            stream(), {.x = x.view(), .rows = row_ids.view(), .weight = weight.view(), .logits = logits.view()}));
        for (int64_t l = 0; l < rows; ++l) {
          const std::vector<float> row = ToFloats(logits.view().Rows(l, 1));
          if (l % 3 == 1) {
            EXPECT_THAT(row, Each(testing::IsNan())) << l;
          } else {
            EXPECT_TRUE(IsClose(row, {expected.begin() + l * 131, expected.begin() + (l + 1) * 131}, 131, kTolerance));
          }
        }
        logits.CheckGuards();
      }
    }
  }
}

// No row of a block is wanted, or none at all.
TEST_F(LmHeadTest, WritesNothingForRowsThatWantNothing) {
  const TestWeight weight({.rows = 40, .cols = 128, .dtype = DType::kBf16});
  const TestTensor x(DType::kBf16, {100, 128}, RandomFloats(100 * 128, 3));
  std::vector<int64_t> wanted(100, -1);
  const auto written = [&] {
    const TestTensor row_ids = TestTensor::OfInts(DType::kI32, {100}, wanted);
    TestTensor logits(DType::kF32, {100, 40});
    DSV4_EXPECT_OK(lm_head::Record(
        stream(), {.x = x.view(), .rows = row_ids.view(), .weight = weight.view(), .logits = logits.view()}));
    std::vector<int64_t> rows;
    for (int64_t l = 0; l < 100; ++l) {
      if (!std::isnan(*logits.view().At<float>(l))) rows.push_back(l);
    }
    logits.CheckGuards();
    return rows;
  };
  EXPECT_THAT(written(), ElementsAre());
  for (const size_t l : {0, 69, 99}) wanted[l] = static_cast<int64_t>(l);
  EXPECT_THAT(written(), ElementsAre(0, 69, 99));
}

TEST_F(LmHeadTest, GivesARowTheSameBitsInAnyCompany) {
  for (const int64_t channels : {30, 256}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const TestWeight weight({.rows = 70, .cols = channels, .dtype = DType::kBf16});
      const TestTensor x(dtype, {33, channels}, RandomFloats(33 * channels, 2));
      const TestTensor all_rows = TestTensor::OfInts(DType::kI32, {33}, std::vector<int64_t>(33, 0));
      TestTensor all(DType::kF32, {33, 70});
      DSV4_ASSERT_OK(lm_head::Record(
          stream(), {.x = x.view(), .rows = all_rows.view(), .weight = weight.view(), .logits = all.view()}));
      for (const int64_t only : {0, 1, 16, 32}) {
        std::vector<int64_t> wanted(33, -1);
        wanted[static_cast<size_t>(only)] = 0;
        const TestTensor row_ids = TestTensor::OfInts(DType::kI32, {33}, wanted);
        TestTensor logits(DType::kF32, {33, 70});
        DSV4_ASSERT_OK(lm_head::Record(
            stream(), {.x = x.view(), .rows = row_ids.view(), .weight = weight.view(), .logits = logits.view()}));
        EXPECT_TRUE(BitwiseEqual(logits.view().Rows(only, 1), all.view().Rows(only, 1)));
      }
    }
  }
}

TEST_F(LmHeadTest, DeclaresWhatItTouches) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  const TestWeight weight({.rows = 4, .cols = 3, .dtype = DType::kBf16});
  const TestTensor x(DType::kBf16, {2, 3}, RandomFloats(6, 1));
  const TestTensor rows = TestTensor::OfInts(DType::kI32, {2}, {-1, -1});
  const TestTensor logits(DType::kF32, {2, 4});
  const std::vector<OpRecord> records = Capture([&] {
    return lm_head::Record(stream(),
                           {.x = x.view(), .rows = rows.view(), .weight = weight.view(), .logits = logits.view()});
  });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "lm_head");
  EXPECT_THAT(Declared(records[0]), ElementsAre("read x bf16 [2, 3]", "read rows i32 [2]",
                                                "before wait weight bf16 [4, 3]", "write logits f32 [2, 4]"));
  // Which rows want logits is read when the record runs.
  rows.data<int32_t>()[1] = 7;
  records[0].run();
  EXPECT_THAT(ToFloats(logits.view().Rows(0, 1)), Each(testing::IsNan()));
  EXPECT_THAT(ToFloats(logits.view().Rows(1, 1)), Each(testing::Not(testing::IsNan())));
}

TEST_F(LmHeadTest, RefusesBadInputByName) {
  const TestWeight weight({.rows = 4, .cols = 3});
  const TestWeight stack({.stack = 1, .rows = 4, .cols = 3});
  const TestTensor x(DType::kF32, {2, 3}, RandomFloats(6, 1));
  const TestTensor rows = TestTensor::OfInts(DType::kI32, {2}, {0, 1});
  const TestTensor logits(DType::kF32, {2, 4});
  const lm_head::Params good = {.x = x.view(), .rows = rows.view(), .weight = weight.view(), .logits = logits.view()};
  const auto refused = [&](const char* message, const auto& change) {
    lm_head::Params params = good;
    change(params);
    EXPECT_THAT(lm_head::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("x: expected f32 or bf16 [any, 3]", [](auto& p) { p.x = TensorView(); });
  refused("x: expected f32 or bf16 [any, 3]", [](auto& p) { p.x = p.x.Columns(0, 2); });
  refused("rows: expected i32 [2]", [](auto& p) { p.rows = TensorView(); });
  refused("rows: expected i32 [2]", [](auto& p) { p.rows = p.rows.FirstRows(1); });
  refused("weight: expected", [](auto& p) { p.weight = QuantizedWeight(); });
  refused("weight: expected one matrix", [&](auto& p) { p.weight = stack.view(); });
  refused("logits: expected f32 [2, 4]", [](auto& p) { p.logits.dtype = DType::kBf16; });
  refused("logits: expected f32 [2, 4]", [](auto& p) { p.logits = p.logits.FirstRows(1); });
  refused("logits and rows: ", [&](auto& p) {
    p.rows = logits.view().Index(0).FirstRows(2);
    p.rows.dtype = DType::kI32;
  });
  EXPECT_THAT(logits.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
