#include "ops/embed/embed.h"

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

class EmbedTest : public OpTest {};

TEST_F(EmbedTest, CopiesTheTokensRowIntoEveryStream) {
  const TestTensor table(DType::kBf16, {5, 33}, RandomFloats(5 * 33, 1));
  const std::vector<float> rows = table.ToFloats();
  for (const int64_t copies : {1, 2, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const std::vector<int64_t> tokens = {4, 0, 3, 3};
      const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {4}, tokens);
      TestTensor out(dtype, {4, copies, 33});
      DSV4_ASSERT_OK(
          embed::Record(stream(), {.token_ids = token_ids.view(), .table = table.weight(), .out = out.view()}));
      std::vector<float> expected;
      for (const int64_t token : tokens) {
        for (int64_t c = 0; c < copies; ++c) {
          expected.insert(expected.end(), rows.begin() + token * 33, rows.begin() + (token + 1) * 33);
        }
      }
      EXPECT_EQ(out.ToFloats(), expected);
      out.CheckGuards();
    }
  }
}

TEST_F(EmbedTest, RoundsAnF32TableToBf16) {
  const TestTensor table(DType::kF32, {3, 8}, RandomFloats(24, 2));
  const TestTensor rounded(DType::kBf16, {3, 1, 8}, table.ToFloats());
  const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {3}, {0, 1, 2});
  TestTensor out(DType::kBf16, {3, 1, 8});
  DSV4_ASSERT_OK(embed::Record(stream(), {.token_ids = token_ids.view(), .table = table.weight(), .out = out.view()}));
  EXPECT_TRUE(BitwiseEqual(out.view(), rounded.view()));
}

TEST_F(EmbedTest, LeavesRowsWithoutATokenAsTheyAre) {
  const TestTensor table(DType::kF32, {2, 3}, {1, 2, 3, 4, 5, 6});
  const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {4}, {-1, 1, std::numeric_limits<int32_t>::min(), 0});
  TestTensor out(DType::kF32, {4, 2, 3});
  DSV4_ASSERT_OK(embed::Record(stream(), {.token_ids = token_ids.view(), .table = table.weight(), .out = out.view()}));
  EXPECT_THAT(ToFloats(out.view().Rows(0, 1)), Each(testing::IsNan()));
  EXPECT_THAT(ToFloats(out.view().Rows(1, 1)), ElementsAre(4, 5, 6, 4, 5, 6));
  EXPECT_THAT(ToFloats(out.view().Rows(2, 1)), Each(testing::IsNan()));
  EXPECT_THAT(ToFloats(out.view().Rows(3, 1)), ElementsAre(1, 2, 3, 1, 2, 3));
  out.CheckGuards();
}

TEST_F(EmbedTest, FollowsTheStridesOfItsViews) {
  TestTensor wide(DType::kF32, {2, 10}, RandomFloats(20, 3));
  const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {1}, {1});
  TestTensor out(DType::kF32, {1, 2, 7});
  TensorView inner = out.view();  // two streams of 4 channels, 7 apart
  inner.extents[2] = 4;
  DSV4_ASSERT_OK(embed::Record(
      stream(), {.token_ids = token_ids.view(), .table = WeightView(wide.view().Columns(5, 4)), .out = inner}));
  const std::vector<float> values = out.ToFloats();
  const std::vector<float> table = wide.ToFloats();
  for (size_t k = 0; k < 7; ++k) {
    for (size_t stream = 0; stream < 2; ++stream) {
      if (k < 4) {
        EXPECT_EQ(values[stream * 7 + k], table[15 + k]);
      } else {
        EXPECT_THAT(values[stream * 7 + k], testing::IsNan());
      }
    }
  }
}

TEST_F(EmbedTest, DeclaresWhatItTouches) {
  const TestTensor table(DType::kBf16, {2, 3}, {1, 2, 3, 4, 5, 6});
  const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {1}, {1});
  const TestTensor out(DType::kF32, {1, 4, 3});
  const std::vector<OpRecord> records = Capture([&] {
    return embed::Record(stream(), {.token_ids = token_ids.view(), .table = table.weight(), .out = out.view()});
  });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "embed");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read token_ids i32 [1]", "before wait table bf16 [2, 3]", "write out f32 [1, 4, 3]"));
  // The token is read when the record runs.
  *token_ids.data<int32_t>() = 0;
  records[0].run();
  EXPECT_THAT(out.ToFloats(), ElementsAre(1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3));
}

TEST_F(EmbedTest, RefusesBadInputByName) {
  const TestTensor table(DType::kF32, {4, 3}, std::vector<float>(12, 1.0f));
  const TestTensor token_ids = TestTensor::OfInts(DType::kI32, {2}, {0, 1});
  const TestTensor out(DType::kF32, {2, 2, 3});
  const embed::Params good = {.token_ids = token_ids.view(), .table = table.weight(), .out = out.view()};
  const auto refused = [&](const char* message, const auto& change) {
    embed::Params params = good;
    change(params);
    EXPECT_THAT(embed::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("token_ids: expected i32 [any]", [](auto& p) { p.token_ids = TensorView(); });
  refused("token_ids: expected i32 [any]", [](auto& p) { p.token_ids.dtype = DType::kI64; });
  refused("table: expected f32 or bf16", [](auto& p) { p.table = WeightView(); });
  refused("out: expected f32 or bf16 [2, any, 3]", [](auto& p) { p.out = p.out.FirstRows(1); });
  refused("out: expected f32 or bf16 [2, any, 3]", [](auto& p) { p.out.extents[2] = 2; });
  refused("out: expected every element", [](auto& p) { p.out.strides[1] = 0; });
  refused("out and table: ", [&](auto& p) { p.out = table.view().Reshape({2, 2, 3}); });
  EXPECT_THAT(out.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
