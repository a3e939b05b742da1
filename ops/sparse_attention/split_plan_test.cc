#include "ops/sparse_attention/split_plan.h"

#include "gtest/gtest.h"

namespace dsv4::sparse_attention {
namespace {

TEST(SplitPlan, DividesListsOfPublishedLayers) {
  EXPECT_EQ(SplitCount(1, 128, 0), 1);
  EXPECT_EQ(SplitCount(1, 128, 512), 5);
  EXPECT_EQ(SplitCount(64, 128, 512), 5);
  EXPECT_EQ(SplitCount(65, 128, 512), 1);
  EXPECT_EQ(SplitCount(1, 128, 1024), 9);
  EXPECT_EQ(SplitCount(1, 128, 8192), 32);
  EXPECT_EQ(SplitCount(1, 0, 0), 1);
}

TEST(SplitPlan, SplitsAreWholeTilesOfAFixedLengthUntilTheyRunOut) {
  EXPECT_EQ(SplitLength(640, 5), 128);
  EXPECT_EQ(SplitLength(129, 5), 128);
  EXPECT_EQ(SplitLength(0, 5), 128);
  EXPECT_EQ(SplitLength(641, 5), 192);
  EXPECT_EQ(SplitLength(4096, 32), 128);
  EXPECT_EQ(SplitLength(4097, 32), 192);
  EXPECT_EQ(SplitLength(8320, 32), 320);
  EXPECT_EQ(SplitLength(640, 1), 640);
  EXPECT_EQ(SplitLength(0, 1), 1);
}

TEST(SplitPlan, CoversEveryListWithinTheSplits) {
  for (const int32_t splits : {1, 2, 3, 5, 9, 31, 32}) {
    for (int32_t listed = 0; listed < 9000; ++listed) {
      const int32_t length = SplitLength(listed, splits);
      ASSERT_GE(length, 1);
      ASSERT_LE((listed + length - 1) / length, splits) << listed;
      if (splits > 1) {
        ASSERT_EQ(length % kTileRows, 0);
      }
    }
  }
}

}  // namespace
}  // namespace dsv4::sparse_attention
