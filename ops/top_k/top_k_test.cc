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

// The same for many, by a sort that keeps equals in order.
std::vector<int64_t> ExpectedOfMany(const std::vector<float>& logits, int64_t k) {
  std::vector<int64_t> chosen;
  for (size_t j = 0; j < logits.size(); ++j) {
    if (!std::isnan(logits[j])) chosen.push_back(static_cast<int64_t>(j));
  }
  std::stable_sort(chosen.begin(), chosen.end(), [&](int64_t a, int64_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (static_cast<int64_t>(chosen.size()) > k) chosen.resize(static_cast<size_t>(k));
  std::sort(chosen.begin(), chosen.end());
  chosen.resize(static_cast<size_t>(k), -1);
  return chosen;
}

// Tells the first place where two lists differ, where they are too long to print.
testing::AssertionResult SameList(const std::vector<int64_t>& actual, const std::vector<int64_t>& expected) {
  if (actual.size() != expected.size()) return testing::AssertionFailure() << actual.size() << " entries";
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] != expected[i]) {
      return testing::AssertionFailure() << "place " << i << " of " << actual.size() << " holds " << actual[i]
                                         << " instead of " << expected[i];
    }
  }
  return testing::AssertionSuccess();
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

TEST_F(TopKTest, SelectsFromManyScores) {
  // Counts about those at which one more block, or all of a GPU's blocks for a row, take part; up to a million tokens.
  for (const int64_t n : {1023, 8191, 8192, 8193, 16385, 40000, 65537, 262144}) {
    std::vector<float> logits = RandomFloats(n, static_cast<uint64_t>(n));
    for (const int64_t k : {512, 2048}) {
      EXPECT_TRUE(SameList(Choose(logits, k), ExpectedOfMany(logits, k))) << n << " of which " << k;
    }
    // As an indexer's scores: many are 0, of either sign, and few differ.
    for (float& logit : logits) logit = logit < 1 ? std::copysign(0.0f, logit) : std::round(4 * logit);
    EXPECT_TRUE(SameList(Choose(logits, 512), ExpectedOfMany(logits, 512))) << n << " with equals";
    EXPECT_TRUE(SameList(Choose(logits, n / 2), ExpectedOfMany(logits, n / 2))) << n << " of which half";
  }
}

TEST_F(TopKTest, SelectsFromManyScoresOfUnusualKinds) {
  for (const int64_t n : {700, 20000}) {
    const auto expect_right = [&](const char* kind, const std::vector<float>& logits) {
      EXPECT_TRUE(SameList(Choose(logits, 512), ExpectedOfMany(logits, 512))) << n << " scores, " << kind;
    };
    const std::vector<float> random = RandomFloats(n, 7);
    std::vector<float> logits(static_cast<size_t>(n), -1.5f);
    expect_right("all equal", logits);
    logits.assign(logits.size(), -kInf);
    expect_right("all -infinity", logits);
    logits[static_cast<size_t>(n) - 1] = kNan;
    logits[static_cast<size_t>(n) - 2] = 0.0f;
    expect_right("all but two -infinity", logits);
    logits.assign(logits.size(), kNan);
    expect_right("all NaN", logits);
    for (size_t j = 0; j < logits.size(); j += 40) logits[j] = -random[j];
    expect_right("fewer numbers than K", logits);
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = j % 3 == 0 ? (j % 2 == 0 ? kNan : -kNan) : -std::abs(random[j]);
    expect_right("negative, and NaN of both signs", logits);
    // Neighbouring floats, so that only the last digit of a radix tells them apart; then subnormal ones.
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = 1.0f + 0x1p-23f * static_cast<float>(j * 7919 % 1021);
    expect_right("nearly equal", logits);
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = 0x1p-149f * static_cast<float>(j * 7919 % 1021);
    expect_right("subnormal", logits);
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = static_cast<float>(j) - static_cast<float>(n) / 2;
    expect_right("ascending", logits);
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = -logits[j];
    expect_right("descending", logits);
  }
}

TEST_F(TopKTest, SelectsForRowsOfVeryDifferentCounts) {
  constexpr int64_t kWidth = 70000, kChosen = 512, kRowsPerBlock = 64;
  const std::vector<int64_t> visible = {511, 70000, 0, 512, 513, 8193, 1, 33000};
  const auto rows = static_cast<int64_t>(visible.size());
  std::vector<float> values = RandomFloats(rows * kWidth, 5);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = visible[static_cast<size_t>(i)]; j < kWidth; ++j) {
      values[static_cast<size_t>(i * kWidth + j)] = j % 2 == 0 ? kInf : kNan;
    }
  }
  constexpr int64_t kBlocks = (kWidth + kRowsPerBlock - 1) / kRowsPerBlock;
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i < 2 * kBlocks; ++i) blocks.push_back(i * 7 % (2 * kBlocks));
  const TestTensor logits(DType::kF32, {rows, kWidth}, values);
  const TestTensor counts = TestTensor::OfInts(DType::kI32, {rows}, visible);
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {rows}, {0, 1, 1 << 30, 0, 1, 0, 1, 1});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {2, kBlocks}, blocks);
  const TestTensor indices(DType::kI32, {rows, kChosen});
  const TestTensor slots(DType::kI32, {rows, kChosen});
  for (int repeat = 0; repeat < 2; ++repeat) {
    DSV4_ASSERT_OK(top_k::Record(stream(), {.logits = logits.view(),
                                            .counts = counts.view(),
                                            .requests = requests.view(),
                                            .block_table = table.view(),
                                            .rows_per_block = kRowsPerBlock,
                                            .indices = indices.view(),
                                            .slots = slots.view()}));
    for (int64_t i = 0; i < rows; ++i) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * kWidth);
      const std::vector<int64_t> expected =
          ExpectedOfMany({begin, begin + visible[static_cast<size_t>(i)]}, kChosen);
      EXPECT_TRUE(SameList(ToInts(indices.view().Rows(i, 1)), expected)) << "row " << i;
      std::vector<int64_t> expected_slots;
      for (const int64_t j : expected) {
        const int64_t request = requests.data<int32_t>()[i];
        expected_slots.push_back(
            j < 0 ? -1
                  : blocks[static_cast<size_t>(request * kBlocks + j / kRowsPerBlock)] * kRowsPerBlock + j % kRowsPerBlock);
      }
      EXPECT_TRUE(SameList(ToInts(slots.view().Rows(i, 1)), expected_slots)) << "row " << i;
    }
  }
  indices.CheckGuards();
  slots.CheckGuards();
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
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
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
