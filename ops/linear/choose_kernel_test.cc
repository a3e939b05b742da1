#include "ops/linear/choose_kernel.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace dsv4 {
namespace {

ProductProblem Published(DType weight, int64_t rows, int64_t outputs, int64_t inputs, int64_t groups = 1) {
  ProductProblem problem = {.rows = rows,
                            .inputs = inputs,
                            .outputs = outputs,
                            .groups = groups,
                            .x_dtype = DType::kBf16,
                            .weight_dtype = weight,
                            .aligned_weight = true,
                            .library_allowed = true};
  if (weight == DType::kE4m3) problem.block_rows = problem.block_cols = 128;
  if (weight == DType::kE2m1x2) problem.block_cols = 32;
  problem.quantize_activations = weight != DType::kBf16 && groups == 1;
  return problem;
}

// The products of both published models: attention's, the compressors', the experts' and the head's.
std::vector<ProductProblem> PublishedProblems(int64_t rows) {
  std::vector<ProductProblem> problems;
  for (const auto& [weight, outputs, inputs, groups] : std::vector<std::tuple<DType, int64_t, int64_t, int64_t>>{
           {DType::kE4m3, 1024, 4096, 1},   {DType::kE4m3, 512, 4096, 1},    {DType::kE4m3, 32768, 1024, 1},
           {DType::kE4m3, 1024, 4096, 8},   {DType::kE4m3, 4096, 8192, 1},   {DType::kE4m3, 8192, 1024, 1},
           {DType::kE4m3, 1536, 7168, 1},   {DType::kE4m3, 65536, 1536, 1},  {DType::kE4m3, 1024, 4096, 16},
           {DType::kE4m3, 7168, 16384, 1},  {DType::kE4m3, 3072, 7168, 1},   {DType::kBf16, 2048, 4096, 1},
           {DType::kBf16, 1024, 4096, 1},   {DType::kBf16, 512, 4096, 1},    {DType::kBf16, 64, 4096, 1},
           {DType::kBf16, 384, 7168, 1},    {DType::kBf16, 129280, 7168, 1}, {DType::kE2m1x2, 2048, 4096, 1},
           {DType::kE2m1x2, 4096, 2048, 1}, {DType::kE2m1x2, 7168, 3072, 1}}) {
    problems.push_back(Published(weight, rows, outputs, inputs, groups));
  }
  return problems;
}

TEST(ChooseKernel, TakesTensorCoresForThePublishedProducts) {
  for (const int64_t rows : {1, 2, 8, 9, 32, 64}) {
    for (const ProductProblem& problem : PublishedProblems(rows)) {
      EXPECT_EQ(ChooseKernel(problem), ProductKernel::kTensorCore) << problem.outputs << " x " << problem.inputs;
    }
  }
}

TEST(ChooseKernel, LeavesManyRowsOfBf16ToTheLibrary) {
  ProductProblem problem = Published(DType::kBf16, 64, 2048, 4096);
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kTensorCore);
  problem.rows = 65;
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kCublasLt);
  problem.library_allowed = false;
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kTensorCore);
  problem.library_allowed = true;
  problem.by_expert = true;
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kTensorCore);
  EXPECT_EQ(ChooseKernel(Published(DType::kE4m3, 65, 2048, 4096)), ProductKernel::kTensorCore);
  EXPECT_EQ(ChooseKernel(Published(DType::kBf16, 65, 1024, 4096, 8)), ProductKernel::kTensorCore);
}

TEST(ChooseKernel, TakesPlainArithmeticForF32AndWhatTensorCoresDoNotFit) {
  const auto expect_scalar = [](const char* what, const auto& change) {
    for (const DType weight : {DType::kE4m3, DType::kE2m1x2}) {
      for (const int64_t rows : {1, 64, 65}) {
        ProductProblem problem = Published(weight, rows, 256, 1024);
        ASSERT_EQ(ChooseKernel(problem), ProductKernel::kTensorCore);
        change(problem);
        EXPECT_EQ(ChooseKernel(problem), ProductKernel::kScalar) << what;
      }
    }
  };
  expect_scalar("f32 x", [](ProductProblem& p) { p.x_dtype = DType::kF32; });
  expect_scalar("f32 weight", [](ProductProblem& p) { p.weight_dtype = DType::kF32; });
  expect_scalar("unaligned", [](ProductProblem& p) { p.aligned_weight = false; });
  expect_scalar("small blocks of scales", [](ProductProblem& p) { p.block_cols = 96; });
  expect_scalar("blocks of scales across rows", [](ProductProblem& p) { p.block_rows = 8; });
  expect_scalar("bf16 weight with quantized x", [](ProductProblem& p) { p.weight_dtype = DType::kBf16; });
  ProductProblem problem = Published(DType::kE4m3, 1, 40, 1024, 3);  // groups begin inside tiles of 16 rows
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kScalar);
  problem = Published(DType::kE2m1x2, 1, 64, 1024 + 64);
  EXPECT_EQ(ChooseKernel(problem), ProductKernel::kScalar);
}

TEST(ChooseKernel, DoesNotDependOnTheNumberOfRowsUpTo64) {
  for (const bool aligned : {false, true}) {
    for (const ProductProblem& one : PublishedProblems(1)) {
      ProductProblem problem = one;
      problem.aligned_weight = aligned;
      const ProductKernel kernel = ChooseKernel(problem);
      for (problem.rows = 1; problem.rows <= kMaxRowsOfOneOrder; ++problem.rows) {
        EXPECT_EQ(ChooseKernel(problem), kernel);
      }
    }
  }
}

TEST(ChooseTiles, FitsSharedMemoryAndFillsTheMachine) {
  for (const int64_t rows : {1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 512}) {
    for (const ProductProblem& problem : PublishedProblems(rows)) {
      SCOPED_TRACE(testing::Message() << DTypeName(problem.weight_dtype) << " " << problem.outputs << " x "
                                      << problem.inputs << ", " << rows << " rows");
      const ProductTiles tiles = ChooseTiles(problem);
      EXPECT_TRUE(tiles.channel_tiles == 1 || tiles.channel_tiles == 2 || tiles.channel_tiles == 4);
      EXPECT_EQ(tiles.rows_per_block, rows <= 8 ? 8 : 32);
      EXPECT_EQ(tiles.x_rows, std::min<int64_t>(rows, tiles.rows_per_block));
      EXPECT_GE(tiles.stages, 1);
      EXPECT_LE(tiles.stages, 6);
      const int64_t ring =
          kProductSlices * tiles.stages * ProductStageBytes(problem.weight_dtype, tiles.channel_tiles, tiles.x_rows);
      EXPECT_GE(tiles.shared_bytes, ring);
      // Two blocks of few rows share a multiprocessor's 227 KiB, less one each.
      EXPECT_LE(tiles.shared_bytes, (rows <= 8 ? 112 : 224) * 1024);
      const int64_t blocks = problem.groups * problem.outputs / (kChannelsPerTile * tiles.channel_tiles);
      EXPECT_TRUE(tiles.channel_tiles == 1 || blocks >= 128) << blocks << " blocks";
    }
  }
}

TEST(ChooseTiles, GivesLargeWeightsSeveralTilesABlock) {
  EXPECT_EQ(ChooseTiles(Published(DType::kE4m3, 1, 32768, 1024)).channel_tiles, 4);
  EXPECT_EQ(ChooseTiles(Published(DType::kE4m3, 1, 4096, 8192)).channel_tiles, 2);
  EXPECT_EQ(ChooseTiles(Published(DType::kE4m3, 1, 1024, 4096)).channel_tiles, 1);
  // No deeper than a run of blocks is long.
  EXPECT_EQ(ChooseTiles(Published(DType::kE4m3, 1, 32768, 1024)).stages, 1);
  EXPECT_EQ(ChooseTiles(Published(DType::kE4m3, 1, 1024, 4096)).stages, 4);
}

}  // namespace
}  // namespace dsv4
