#include "ops/top_k/top_k.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class TopKTest : public OpTest {
 protected:
  // The chosen indices of one row of logits, all of them visible.
  std::vector<int64_t> Choose(const std::vector<float>& logits, int64_t k) {
    const int64_t width = static_cast<int64_t>(logits.size());
    const TestTensor scores(DType::kF32, {1, width}, logits);
    const TestTensor counts = TestTensor::OfInts(DType::kI32, {1}, {width});
    const TestTensor requests = TestTensor::OfInts(DType::kI32, {1}, {0});
    const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {0});
    const TestTensor indices(DType::kI32, {1, k});
    const TestTensor slots(DType::kI32, {1, k});
    DSV4_EXPECT_OK(top_k::Record(stream(), {.logits = scores.view(),
                                            .counts = counts.view(),
                                            .requests = requests.view(),
                                            .block_table = table.view(),
                                            .rows_per_block = width,
                                            .indices = indices.view(),
                                            .slots = slots.view()}));
    EXPECT_EQ(slots.ToInts(), indices.ToInts());  // one block, and it is block 0
    indices.CheckGuards();
    slots.CheckGuards();
    return indices.ToInts();
  }
};

// By repeatedly taking the largest that is left.
std::vector<int64_t> Expected(const std::vector<float>& logits, int64_t k) {
  std::vector<bool> taken(logits.size());
  std::vector<int64_t> chosen;
  while (static_cast<int64_t>(chosen.size()) < k) {
    int64_t best = -1;
    for (size_t j = 0; j < logits.size(); ++j) {
      if (taken[j] || std::isnan(logits[j])) continue;
      if (best < 0 || logits[j] > logits[static_cast<size_t>(best)]) best = static_cast<int64_t>(j);
    }
    if (best < 0) break;
    taken[static_cast<size_t>(best)] = true;
    chosen.push_back(best);
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.resize(static_cast<size_t>(k), -1);
  return chosen;
}

TEST_F(TopKTest, ListsTheLargestInAscendingOrder) {
  for (const int64_t n : {1, 2, 3, 31, 32, 33, 700}) {
    for (const int64_t k : {1, 2, 3, 16, 31, 32, 33, 512}) {
      const std::vector<float> logits = RandomFloats(n, static_cast<uint64_t>(n));
      EXPECT_EQ(Choose(logits, k), Expected(logits, k)) << n << " of which " << k;
    }
  }
}

TEST_F(TopKTest, PrefersTheLowerIndexAmongEquals) {
  EXPECT_THAT(Choose({1, 2, 2, 2, 1}, 2), ElementsAre(1, 2));
  EXPECT_THAT(Choose({0, 5, 0, 0, 5}, 4), ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(Choose({0.0f, -0.0f, 0.0f}, 2), ElementsAre(0, 1));
  EXPECT_THAT(Choose({-0.0f, 0.0f, 1.0f}, 2), ElementsAre(0, 2));
  // Many equal scores, as an indexer's rectified scores are; a few better ones among them.
  for (const int64_t k : {1, 7, 64, 99, 100, 101}) {
    std::vector<float> logits(100, 0.0f);
    logits[40] = logits[90] = 1.0f;
    logits[3] = -1.0f;
    EXPECT_EQ(Choose(logits, k), Expected(logits, k)) << k;
  }
}

TEST_F(TopKTest, ListsAllIfThereAreAtMostK) {
  EXPECT_THAT(Choose({3, 1, 2}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(Choose({3, 1, 2}, 5), ElementsAre(0, 1, 2, -1, -1));
  EXPECT_THAT(Choose({3, -kInf, kInf}, 4), ElementsAre(0, 1, 2, -1));
}

TEST_F(TopKTest, NeverChoosesANan) {
  EXPECT_THAT(Choose({kNan, 1, kNan, 3, 2}, 2), ElementsAre(3, 4));
  EXPECT_THAT(Choose({kNan, 1, -kNan, 3, 2}, 4), ElementsAre(1, 3, 4, -1));
  EXPECT_THAT(Choose({kNan, kNan, kNan}, 2), ElementsAre(-1, -1));
  EXPECT_THAT(Choose({kNan, -kInf, kInf, kNan}, 1), ElementsAre(2));
}

TEST_F(TopKTest, IgnoresColumnsPastTheCountAndSkipsPads) {
  // Row 3 is a pad: its request is no row of the table.
  const std::vector<int64_t> visible = {0, 3, 5, 0, 1};
  std::vector<float> values = RandomFloats(5 * 8, 3);
  for (size_t i = 0; i < 5; ++i) {
    for (size_t j = static_cast<size_t>(visible[i]); j < 8; ++j) values[i * 8 + j] = j % 2 == 0 ? kInf : kNan;
  }
  const TestTensor logits(DType::kF32, {5, 8}, values);
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {5}, visible);
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {5}, {0, 0, 0, 1 << 30, 0});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 2}, {0, 1});
  const TestTensor indices(DType::kI32, {5, 4});
  const TestTensor slots(DType::kI32, {5, 4});
  DSV4_ASSERT_OK(top_k::Record(stream(), {.logits = logits.view(),
                                          .counts = counts.view(),
                                          .requests = requests.view(),
                                          .block_table = table.view(),
                                          .rows_per_block = 4,
                                          .indices = indices.view(),
                                          .slots = slots.view()}));
  std::vector<int64_t> expected;
  for (size_t i = 0; i < 5; ++i) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * 8);
    const std::vector<int64_t> row = Expected({begin, begin + visible[i]}, 4);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  EXPECT_EQ(indices.ToInts(), expected);
  EXPECT_EQ(slots.ToInts(), expected);
  indices.CheckGuards();
  slots.CheckGuards();
}

TEST_F(TopKTest, TranslatesThroughTheRequestsTable) {
  // Blocks of 3 rows; a table of 2 blocks is a ring.
  const TestTensor logits(DType::kF32, {2, 10}, std::vector<float>(20, 1.0f));
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {2}, {10, 4});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {2}, {1, 0});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {2, 2}, {7, 5, 20, 9});
  const TestTensor indices(DType::kI32, {2, 10});
  const TestTensor slots(DType::kI32, {2, 10});
  DSV4_ASSERT_OK(top_k::Record(stream(), {.logits = logits.view(),
                                          .counts = counts.view(),
                                          .requests = requests.view(),
                                          .block_table = table.view(),
                                          .rows_per_block = 3,
                                          .indices = indices.view(),
                                          .slots = slots.view()}));
  EXPECT_THAT(ToInts(indices.view().Rows(0, 1)), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(ToInts(slots.view().Rows(0, 1)), ElementsAre(60, 61, 62, 27, 28, 29, 60, 61, 62, 27));
  EXPECT_THAT(ToInts(indices.view().Rows(1, 1)), ElementsAre(0, 1, 2, 3, -1, -1, -1, -1, -1, -1));
  EXPECT_THAT(ToInts(slots.view().Rows(1, 1)), ElementsAre(21, 22, 23, 15, -1, -1, -1, -1, -1, -1));
}

TEST_F(TopKTest, FollowsTheStridesOfItsViews) {
  const TestTensor logits(DType::kF32, {2, 9}, {0, 9, 1, 2, 3, 0, 0, 0, 0, 0, 0, 3, 2, 1, 9, 0, 0, 0});
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {2}, {3, 3});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {2}, {0, 1});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {2, 3}, {-9, 1, -9, -9, 2, -9});
  const TestTensor both(DType::kI32, {2, 5});
  DSV4_ASSERT_OK(top_k::Record(stream(), {.logits = logits.view().Columns(2, 3),
                                          .counts = counts.view(),
                                          .requests = requests.view(),
                                          .block_table = table.view().Columns(1, 1),
                                          .rows_per_block = 4,
                                          .indices = both.view().Columns(0, 2),
                                          .slots = both.view().Columns(2, 2)}));
  EXPECT_THAT(both.ToInts(), ElementsAre(1, 2, 5, 6, -1, 0, 1, 8, 9, -1));  // the last column is still poison
}

TEST_F(TopKTest, DeclaresWhatItTouches) {
  const TestTensor logits(DType::kF32, {1, 3}, {1, 2, 3});
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {1}, {0});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {1}, {0});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {0});
  const TestTensor indices(DType::kI32, {1, 2});
  const TestTensor slots(DType::kI32, {1, 2});
  const std::vector<OpRecord> records = Capture([&] {
    return top_k::Record(stream(), {.logits = logits.view(),
                                    .counts = counts.view(),
                                    .requests = requests.view(),
                                    .block_table = table.view(),
                                    .rows_per_block = 3,
                                    .indices = indices.view(),
                                    .slots = slots.view()});
  });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "top_k");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read logits f32 [1, 3]", "read counts i32 [1]", "read requests i32 [1]",
                          "read block_table i32 [1, 1]", "write indices i32 [1, 2]", "write slots i32 [1, 2]"));
  // The count is read when the record runs: a replay at another length.
  *counts.data<int32_t>() = 3;
  records[0].run();
  EXPECT_THAT(indices.ToInts(), ElementsAre(1, 2));
}

TEST_F(TopKTest, RefusesBadInputByName) {
  const TestTensor logits(DType::kF32, {2, 3}, RandomFloats(6, 1));
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {2}, {3, 3});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {2}, {0, 0});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {0});
  const TestTensor indices(DType::kI32, {2, 2});
  const TestTensor slots(DType::kI32, {2, 2});
  const top_k::Params good = {.logits = logits.view(),
                              .counts = counts.view(),
                              .requests = requests.view(),
                              .block_table = table.view(),
                              .rows_per_block = 3,
                              .indices = indices.view(),
                              .slots = slots.view()};
  const auto refused = [&](const char* message, const auto& change) {
    top_k::Params params = good;
    change(params);
    EXPECT_THAT(top_k::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("logits: expected f32 [any, any]", [](auto& p) { p.logits.dtype = DType::kI32; });
  refused("logits: expected f32 [any, any]", [](auto& p) { p.logits = TensorView(); });
  refused("counts: expected i32 [2]", [](auto& p) { p.counts = p.counts.FirstRows(1); });
  refused("requests: expected i32 [2]", [](auto& p) { p.requests.dtype = DType::kI64; });
  refused("block_table: expected i32 [any, any]", [](auto& p) { p.block_table = TensorView(); });
  refused("blocks of block_table: expected at least 1, got 0", [](auto& p) { p.block_table.extents[1] = 0; });
  refused("rows_per_block: expected at least 1, got 0", [](auto& p) { p.rows_per_block = 0; });
  refused("indices: expected i32 [2, any]", [](auto& p) { p.indices = p.indices.FirstRows(1); });
  refused("slots: expected i32 [2, 2]", [](auto& p) { p.slots = p.slots.Columns(0, 1); });
  refused("indices and slots: ", [](auto& p) { p.slots = p.indices; });
  EXPECT_THAT(indices.Bytes(), Each(0xFF));
  EXPECT_THAT(slots.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
