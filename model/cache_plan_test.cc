#include "model/cache_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/config.h"
#include "model/numeric_options.h"

namespace dsv4 {
namespace {

constexpr LayerKind kWindowOnly = {};
constexpr LayerKind kRatio4 = {.ratio = 4, .overlap = true, .indexer = true};
constexpr LayerKind kRatio128 = {.ratio = 128};

ModelConfig PublishedSizes() {
  ModelConfig config;
  config.head_dim = 512;
  config.qk_rope_head_dim = 64;
  config.index_head_dim = 128;
  config.sliding_window = 128;
  config.mtp_layers = {kWindowOnly};
  return config;
}

// Two window-only layers, then ratios 4 and 128 in turn.
ModelConfig FlashConfig() {
  ModelConfig config = PublishedSizes();
  config.layers = {kWindowOnly, kWindowOnly};
  for (int i = 0; i < 20; ++i) config.layers.insert(config.layers.end(), {kRatio4, kRatio128});
  config.layers.push_back(kRatio4);
  return config;
}

ModelConfig ProConfig() {
  ModelConfig config = PublishedSizes();
  config.layers = {kRatio128, kRatio128};
  for (int i = 0; i < 29; ++i) config.layers.insert(config.layers.end(), {kRatio4, kRatio128});
  config.layers.push_back(kRatio4);
  return config;
}

ModelConfig OnlyLayersOf(ModelConfig config, const LayerKind& kind) {
  std::erase_if(config.layers, [&](const LayerKind& layer) { return !(layer == kind); });
  return config;
}

constexpr NumericOptions kFp8Keys = {.precision = Precision::kPublished, .indexer_format = RowFormat::kFp8Key};
constexpr NumericOptions kMxfp4Keys = {.precision = Precision::kBf16, .indexer_format = RowFormat::kMxfp4Key};

// Specification, section 9.1.
TEST(CountCacheBytes, IsTheSpecificationsTable) {
  const ModelConfig flash = FlashConfig();
  const ModelConfig pro = ProConfig();
  ASSERT_EQ(flash.num_layers(), 43);
  ASSERT_EQ(pro.num_layers(), 61);

  EXPECT_EQ(CountCacheBytes(flash, kFp8Keys).growing_per_token, 21 * 179 + 20 * 4.5625);  // 3850
  EXPECT_EQ(CountCacheBytes(pro, kFp8Keys).growing_per_token, 30 * 179 + 31 * 4.5625);    // 5511
  EXPECT_EQ(CountCacheBytes(flash, kMxfp4Keys).growing_per_token, 3514.25);
  EXPECT_EQ(CountCacheBytes(pro, kMxfp4Keys).growing_per_token, 5031.4375);
  constexpr double kContext = 1048576;
  EXPECT_NEAR(kContext * CountCacheBytes(flash, kFp8Keys).growing_per_token, 4.04e9, 0.005e9);
  EXPECT_NEAR(kContext * CountCacheBytes(pro, kFp8Keys).growing_per_token, 5.78e9, 0.005e9);

  for (const NumericOptions& numeric : {kFp8Keys, kMxfp4Keys}) {
    EXPECT_EQ(CountCacheBytes(flash, numeric).window_per_request, 44 * 128 * 584);  // 3.29 MB
    EXPECT_EQ(CountCacheBytes(pro, numeric).window_per_request, 62 * 128 * 584);    // 4.63 MB
    const auto state = [&](const ModelConfig& config, const LayerKind& kind) {
      return CountCacheBytes(OnlyLayersOf(config, kind), numeric).state_per_request;
    };
    EXPECT_EQ(state(flash, kRatio4), 21 * 8 * (8192 + 2048));  // 1.72 MB
    EXPECT_EQ(state(pro, kRatio4), 30 * 8 * (8192 + 2048));    // 2.46 MB
    EXPECT_EQ(state(flash, kRatio128), 20 * 128 * 4096);       // 10.49 MB
    EXPECT_EQ(state(pro, kRatio128), 31 * 128 * 4096);         // 16.25 MB
    EXPECT_EQ(state(flash, kWindowOnly), 0);
    EXPECT_EQ(CountCacheBytes(flash, numeric).state_per_request, state(flash, kRatio4) + state(flash, kRatio128));
  }
}

TEST(CountCacheBytes, CountsFp32RowsAndOtherKinds) {
  ModelConfig config = PublishedSizes();
  config.mtp_layers.clear();
  config.layers = {{.ratio = 2}, {.ratio = 8, .overlap = true}, {.ratio = 4, .indexer = true}};
  const CacheBytes bytes = CountCacheBytes(config, {.precision = Precision::kFp32});
  EXPECT_EQ(bytes.window_per_request, 3 * 128 * 512 * 4);
  EXPECT_EQ(bytes.growing_per_token, 2048 / 2.0 + 2048 / 8.0 + (2048 + 512) / 4.0);
  // Rows of a window, or of two that overlap; a value and a score a column.
  EXPECT_EQ(bytes.state_per_request, 2 * 4096 + 16 * 8192 + 4 * (4096 + 1024));
}

TEST(PlanCaches, PublishedSizes) {
  const CachePlan plan = PlanCaches(FlashConfig(), {.max_requests = 3,
                                                    .max_context = 100000,
                                                    .max_rows_per_request = 32,
                                                    .cache_tokens = 150000});
  EXPECT_EQ(plan.window.ratio, 1);
  EXPECT_EQ(plan.window.rows_per_block, 64);
  EXPECT_TRUE(plan.window.ring);
  EXPECT_EQ(plan.window.table_blocks, 4);  // ceil(160 / 64) + 1
  EXPECT_EQ(plan.window.num_blocks, 12);

  ASSERT_EQ(plan.compressed.size(), 2u);
  const CompressedPlan& ratio4 = plan.compressed[0];
  EXPECT_EQ(ratio4.kind, kRatio4);
  EXPECT_EQ(ratio4.state.rows_per_block, 4);
  EXPECT_EQ(ratio4.state.table_blocks, 11);  // ceil((8 + 32) / 4) + 1
  EXPECT_TRUE(ratio4.state.ring);
  EXPECT_EQ(ratio4.entries.ratio, 4);
  EXPECT_EQ(ratio4.entries.rows_per_block, 64);
  EXPECT_FALSE(ratio4.entries.ring);
  EXPECT_EQ(ratio4.entries.table_blocks, 391);    // 100000 / 256, rounded up
  EXPECT_EQ(ratio4.entries.num_blocks, 586 + 3);  // 150000 / 256, rounded up, and one a request

  const CompressedPlan& ratio128 = plan.compressed[1];
  EXPECT_EQ(ratio128.kind, kRatio128);
  EXPECT_EQ(ratio128.state.rows_per_block, 8);
  EXPECT_EQ(ratio128.state.table_blocks, 21);  // (128 + 32) / 8 + 1
  EXPECT_EQ(ratio128.entries.rows_per_block, 2);
  EXPECT_EQ(ratio128.entries.table_blocks, 391);

  EXPECT_EQ(plan.CompressedIndex(kRatio4), 0);
  EXPECT_EQ(plan.CompressedIndex(kRatio128), 1);
  EXPECT_EQ(plan.CompressedIndex(kWindowOnly), -1);
  EXPECT_EQ(plan.CompressedIndex({.ratio = 4, .overlap = true}), -1);

  const std::vector<CacheGroupPlan> groups = plan.Groups();
  ASSERT_EQ(groups.size(), 5u);
  EXPECT_EQ(groups[0].table_blocks, plan.window.table_blocks);
  EXPECT_EQ(groups[1].rows_per_block, 4);
  EXPECT_EQ(groups[2].ratio, 4);
  EXPECT_EQ(groups[3].rows_per_block, 8);
  EXPECT_EQ(groups[4].ratio, 128);
}

TEST(PlanCaches, KindsOfOneRatioHaveGroupsOfTheirOwn) {
  ModelConfig config = PublishedSizes();
  config.layers = {{.ratio = 4}, kRatio4, {.ratio = 4, .overlap = true}, kRatio4, {.ratio = 4}, kWindowOnly};
  const CachePlan plan = PlanCaches(
      config, {.max_requests = 1, .max_context = 1024, .max_rows_per_request = 1, .cache_tokens = 1024});
  ASSERT_EQ(plan.compressed.size(), 3u);
  EXPECT_EQ(plan.compressed[0].state.table_blocks, 3);  // a window of 4 rows
  EXPECT_EQ(plan.compressed[1].state.table_blocks, 4);  // of 8
  EXPECT_EQ(plan.compressed[2].state.table_blocks, 4);
}

TEST(PlanCaches, EntryBlocksSpan256TokensWhereTheRatioDividesThem) {
  ModelConfig config = PublishedSizes();
  const std::map<int64_t, int64_t> rows_of_ratio = {{1, 256}, {2, 128}, {3, 85}, {8, 32}, {128, 2}, {200, 1}, {300, 1}};
  for (const auto& [ratio, rows] : rows_of_ratio) {
    config.layers = {{.ratio = ratio}};
    const CachePlan plan = PlanCaches(
        config, {.max_requests = 1, .max_context = 1000, .max_rows_per_request = 1, .cache_tokens = 1000});
    const CacheGroupPlan& entries = plan.compressed[0].entries;
    EXPECT_EQ(entries.rows_per_block, rows) << "ratio " << ratio;
    EXPECT_GE(entries.table_blocks * rows * ratio, 1000) << "ratio " << ratio;
  }
}

TEST(CacheGroupPlan, BlocksForCountsWholeEntries) {
  const CacheGroupPlan entries = {.ratio = 4, .rows_per_block = 64, .table_blocks = 10, .ring = false, .num_blocks = 10};
  const std::map<int64_t, int64_t> blocks_for = {{0, 0},   {1, 0},   {3, 0},   {4, 1},   {255, 1},
                                                 {256, 1}, {259, 1}, {260, 2}, {512, 2}, {516, 3}};
  for (const auto& [tokens, blocks] : blocks_for) EXPECT_EQ(entries.BlocksFor(tokens), blocks) << tokens;
  const CacheGroupPlan ring = {.ratio = 1, .rows_per_block = 64, .table_blocks = 4, .ring = true, .num_blocks = 8};
  for (int64_t tokens : {1, 64, 65, 100000}) EXPECT_EQ(ring.BlocksFor(tokens), 4);
}

// A step writes all its rows before any is read. So the rows that its first position looks back to, and all rows of the step,
// must have slots of their own, wherever the step begins.
TEST(PlanCaches, RingsKeepTheWindowWhileTheWidestStepIsWritten) {
  for (int64_t window : {1, 2, 8, 63, 64, 65, 128}) {
    for (int64_t width : {1, 2, 7, 64, 130}) {
      ModelConfig config = PublishedSizes();
      config.sliding_window = window;
      config.layers = {{.ratio = window}, {.ratio = window, .overlap = true}};
      const CachePlan plan = PlanCaches(
          config, {.max_requests = 1, .max_context = 100000, .max_rows_per_request = width, .cache_tokens = 100000});
      const struct {
        int64_t rows_looked_back_to;
        const CacheGroupPlan& ring;
      } rings[] = {{window, plan.window}, {window, plan.compressed[0].state}, {2 * window, plan.compressed[1].state}};
      for (const auto& [look_back, ring] : rings) {
        SCOPED_TRACE(testing::Message() << "window " << look_back << ", width " << width << ", blocks of "
                                        << ring.rows_per_block);
        const int64_t period = ring.table_blocks * ring.rows_per_block;
        for (int64_t begin = look_back; begin < look_back + period; ++begin) {
          std::set<int64_t> slots;
          for (int64_t p = begin - look_back + 1; p < begin + width; ++p) slots.insert(p % period);
          ASSERT_EQ(static_cast<int64_t>(slots.size()), look_back - 1 + width) << "a step that begins at " << begin;
        }
        EXPECT_LE(ring.table_blocks, (look_back + width) / ring.rows_per_block + 2) << "more than is needed";
      }
    }
  }
}

TEST(PlanCaches, RingsAreNoLongerThanTheContext) {
  const CachePlan plan = PlanCaches(
      FlashConfig(), {.max_requests = 5, .max_context = 65, .max_rows_per_request = 64, .cache_tokens = 65});
  EXPECT_EQ(plan.window.table_blocks, 2);
  EXPECT_EQ(plan.window.num_blocks, 10);
  EXPECT_EQ(plan.compressed[0].state.table_blocks, 17);
  EXPECT_EQ(plan.compressed[1].state.table_blocks, 9);
}

// Requests that together have no more tokens than the caches are made for always find their blocks.
TEST(PlanCaches, CacheTokensFitHoweverRequestsDivideThem) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t max_requests = 1 + static_cast<int64_t>(random() % 6);
    const int64_t max_context = 1 + static_cast<int64_t>(random() % 3000);
    const int64_t cache_tokens = 1 + static_cast<int64_t>(random() % (max_requests * max_context));
    ModelConfig config = FlashConfig();
    config.layers.push_back({.ratio = 3});
    config.layers.push_back({.ratio = 300});
    const CachePlan plan = PlanCaches(config, {.max_requests = max_requests,
                                               .max_context = max_context,
                                               .max_rows_per_request = 8,
                                               .cache_tokens = cache_tokens});
    std::vector<int64_t> tokens(max_requests, 0);
    int64_t rest = cache_tokens;
    for (int64_t& count : tokens) {
      count = std::min({rest, max_context, static_cast<int64_t>(random() % 3000)});
      rest -= count;
    }
    for (const CacheGroupPlan& group : plan.Groups()) {
      int64_t blocks = 0;
      for (int64_t count : tokens) {
        EXPECT_LE(group.BlocksFor(count), group.table_blocks);
        blocks += group.BlocksFor(count);
      }
      EXPECT_LE(blocks, group.num_blocks) << "ratio " << group.ratio << ", " << cache_tokens << " tokens";
    }
  }
}

TEST(PlanCaches, RoomPastWhatRequestsCanHoldIsNotPlanned) {
  const CacheSizes exact = {.max_requests = 2, .max_context = 600, .max_rows_per_request = 8, .cache_tokens = 1200};
  CacheSizes huge = exact;
  huge.cache_tokens = std::numeric_limits<int64_t>::max();
  const std::vector<CacheGroupPlan> expected = PlanCaches(FlashConfig(), exact).Groups();
  const std::vector<CacheGroupPlan> actual = PlanCaches(FlashConfig(), huge).Groups();
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t g = 0; g < actual.size(); ++g) EXPECT_EQ(actual[g].num_blocks, expected[g].num_blocks);
}

}  // namespace
}  // namespace dsv4
