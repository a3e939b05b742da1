#include "ops/sparse_attention/split_plan.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace dsv4::sparse_attention {
namespace {

TEST(SplitPlan, FillsAGpuOnceWithBf16Queries) {
  const auto count = [](int64_t rows, int64_t heads, int64_t listed) {
    return SplitCount(DType::kBf16, rows, heads, listed);
  };
  EXPECT_EQ(count(1, 64, 640), 10);  // a tile each
  EXPECT_EQ(count(8, 64, 640), 10);
  EXPECT_EQ(count(32, 64, 640), 4);
  EXPECT_EQ(count(64, 64, 640), 2);
  EXPECT_EQ(count(66, 64, 640), 2);
  EXPECT_EQ(count(67, 64, 640), 1);
  EXPECT_EQ(count(1000, 64, 640), 1);
  EXPECT_EQ(count(1, 64, 128), 2);
  EXPECT_EQ(count(1, 64, 64), 1);
  EXPECT_EQ(count(1, 64, 0), 1);
  EXPECT_EQ(count(32, 128, 1152), 2);
  EXPECT_EQ(count(64, 128, 1152), 1);
  EXPECT_EQ(count(1, 64, 8320), 64);
  EXPECT_EQ(count(0, 64, 640), 10);
}

TEST(SplitPlan, DoesNotDependOnTheRowsInFp32) {
  for (const int64_t rows : {1, 2, 33, 64}) {
    EXPECT_EQ(SplitCount(DType::kF32, rows, 64, 128), 1);
    EXPECT_EQ(SplitCount(DType::kF32, rows, 64, 640), 5);
    EXPECT_EQ(SplitCount(DType::kF32, rows, 128, 1152), 9);
    EXPECT_EQ(SplitCount(DType::kF32, rows, 64, 8320), 32);
  }
  EXPECT_EQ(SplitCount(DType::kF32, 65, 64, 640), 1);
}

TEST(SplitPlan, BoundsTheScratchOfEveryStep) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t heads : {4, 64, 128}) {
      for (const int64_t listed : {64, 128, 640, 1152, 8320}) {
        int64_t most = 0;
        for (int64_t rows = 1; rows <= 300; ++rows) {
          const int64_t splits = SplitCount(dtype, rows, heads, listed);
          if (splits > 1) most = std::max(most, rows * splits);
          ASSERT_EQ(MostSplits(dtype, rows, heads, listed), most) << rows << " rows";
        }
      }
    }
  }
  EXPECT_LE(MostSplits(DType::kBf16, 300, 64, 8320), 132);
  EXPECT_EQ(MostSplits(DType::kBf16, 300, 64, 64), 0);
}

TEST(SplitPlan, SplitsAreWholeTiles) {
  EXPECT_EQ(SplitLength(640, 5), 128);
  EXPECT_EQ(SplitLength(640, 10), 64);
  EXPECT_EQ(SplitLength(129, 2), 128);
  EXPECT_EQ(SplitLength(129, 5), 64);
  EXPECT_EQ(SplitLength(0, 5), 64);
  EXPECT_EQ(SplitLength(641, 5), 192);
  EXPECT_EQ(SplitLength(8320, 32), 320);
  EXPECT_EQ(SplitLength(640, 1), 640);
  EXPECT_EQ(SplitLength(0, 1), 1);
}

TEST(SplitPlan, CoversEveryListWithinTheSplits) {
  for (const int32_t splits : {1, 2, 3, 5, 9, 31, 64}) {
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
