#include "runtime/block_pool.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> Counts(const BlockPool& pool) {
  std::vector<int32_t> counts;
  for (int32_t block = 0; block < pool.num_blocks(); ++block) counts.push_back(pool.reference_count(block));
  return counts;
}

TEST(BlockPool, HandsOutBlocksInOrderWithOneReference) {
  BlockPool pool(5);
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> blocks, pool.Allocate(3));
  EXPECT_THAT(blocks, ElementsAre(0, 1, 2));
  EXPECT_THAT(Counts(pool), ElementsAre(1, 1, 1, 0, 0));
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_blocks(), 5);
}

TEST(BlockPool, AllocatesAllOrNone) {
  BlockPool pool(3);
  DSV4_ASSERT_OK(pool.Allocate(2));
  EXPECT_THAT(pool.Allocate(2), StatusIs(absl::StatusCode::kResourceExhausted, "asked for 2, 1 of 3 are free"));
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_THAT(Counts(pool), ElementsAre(1, 1, 0));
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> last, pool.Allocate(1));
  EXPECT_THAT(last, ElementsAre(2));
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> none, pool.Allocate(0));
  EXPECT_THAT(none, IsEmpty());
  EXPECT_THAT(pool.Allocate(INT64_MAX), StatusIs(absl::StatusCode::kResourceExhausted, "9223372036854775807"));
  EXPECT_THAT(pool.Allocate(-1), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
}

TEST(BlockPool, ReusesTheLastReleasedBlockFirst) {
  BlockPool pool(6);
  DSV4_ASSERT_OK(pool.Allocate(4));
  DSV4_ASSERT_OK(pool.Release({2, 0}));
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> blocks, pool.Allocate(3));
  EXPECT_THAT(blocks, ElementsAre(0, 2, 4));
}

TEST(BlockPool, SharedBlockIsFreedWithItsLastReference) {
  BlockPool pool(2);
  DSV4_ASSERT_OK(pool.Allocate(1));
  DSV4_ASSERT_OK(pool.Retain({0}));
  DSV4_ASSERT_OK(pool.Release({0}));
  EXPECT_EQ(pool.reference_count(0), 1);
  EXPECT_EQ(pool.num_free(), 1);
  DSV4_ASSERT_OK(pool.Release({0}));
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPool, OneCallMayNameABlockAsOftenAsItHasReferences) {
  BlockPool pool(1);
  DSV4_ASSERT_OK(pool.Allocate(1));
  DSV4_ASSERT_OK(pool.Retain({0, 0}));
  EXPECT_EQ(pool.reference_count(0), 3);
  EXPECT_THAT(pool.Release({0, 0, 0, 0}), StatusIs(absl::StatusCode::kInvalidArgument, "block 0: released more often"));
  EXPECT_EQ(pool.reference_count(0), 3);
  EXPECT_EQ(pool.num_free(), 0);
  DSV4_ASSERT_OK(pool.Release({0, 0, 0}));
  EXPECT_EQ(pool.num_free(), 1);
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> blocks, pool.Allocate(1));
  EXPECT_THAT(blocks, ElementsAre(0));
}

TEST(BlockPool, RefusedReleaseChangesNothing) {
  BlockPool pool(4);
  DSV4_ASSERT_OK(pool.Allocate(3));
  for (const std::vector<int32_t>& blocks : std::vector<std::vector<int32_t>>{
           {0, 1, 4}, {0, 1, -1}, {0, 1, 3}, {0, 1, 0}, {0, INT32_MAX}, {INT32_MIN}}) {
    EXPECT_THAT(pool.Release(blocks), StatusIs(absl::StatusCode::kInvalidArgument, "block "));
    EXPECT_THAT(Counts(pool), ElementsAre(1, 1, 1, 0));
    EXPECT_EQ(pool.num_free(), 1);
  }
  DSV4_ASSERT_OK_AND_ASSIGN(std::vector<int32_t> blocks, pool.Allocate(1));
  EXPECT_THAT(blocks, ElementsAre(3));
}

TEST(BlockPool, RefusedRetainChangesNothing) {
  BlockPool pool(4);
  DSV4_ASSERT_OK(pool.Allocate(2));
  for (const std::vector<int32_t>& blocks : std::vector<std::vector<int32_t>>{{0, 1, 2}, {0, 0, 4}, {1, -1}}) {
    EXPECT_THAT(pool.Retain(blocks), StatusIs(absl::StatusCode::kInvalidArgument, "block "));
    EXPECT_THAT(Counts(pool), ElementsAre(1, 1, 0, 0));
  }
}

TEST(BlockPool, PoolWithoutBlocksIsAlwaysExhausted) {
  BlockPool pool(0);
  EXPECT_THAT(pool.Allocate(1), StatusIs(absl::StatusCode::kResourceExhausted, "0 of 0"));
  EXPECT_EQ(BlockPool(-3).num_blocks(), 0);
}

TEST(BlockPool, AgreesWithAModelOverRandomCalls) {
  std::mt19937 engine(1);
  BlockPool pool(16);
  std::vector<int32_t> model(16, 0);
  for (int step = 0; step < 5000; ++step) {
    const int call = static_cast<int>(engine() % 3);
    if (call == 0) {
      const int64_t count = static_cast<int64_t>(engine() % 5);
      const auto blocks = pool.Allocate(count);
      const int64_t free = std::count(model.begin(), model.end(), 0);
      ASSERT_EQ(blocks.ok(), count <= free);
      if (!blocks.ok()) continue;
      for (int32_t block : *blocks) ASSERT_EQ(std::exchange(model[static_cast<size_t>(block)], 1), 0);
    } else {
      std::vector<int32_t> blocks(engine() % 4);
      for (int32_t& block : blocks) block = static_cast<int32_t>(engine() % 17);
      std::vector<int32_t> after = model;
      bool valid = true;
      for (int32_t block : blocks) {
        if (block > 15 || after[static_cast<size_t>(block)] == 0) {
          valid = false;
          break;
        }
        after[static_cast<size_t>(block)] += call == 1 ? 1 : -1;
      }
      ASSERT_EQ((call == 1 ? pool.Retain(blocks) : pool.Release(blocks)).ok(), valid);
      if (valid) model = after;
    }
    ASSERT_EQ(Counts(pool), model);
    ASSERT_EQ(pool.num_free(), std::count(model.begin(), model.end(), 0));
  }
}

}  // namespace
}  // namespace dsv4
