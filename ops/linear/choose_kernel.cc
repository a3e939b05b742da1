#include "ops/linear/choose_kernel.h"

#include <algorithm>

namespace dsv4 {
namespace {

// A multiprocessor of Hopper has 227 KiB of shared memory for blocks, of which each takes another KiB.
constexpr int64_t kSharedBytesAlone = 224 * 1024;
constexpr int64_t kSharedBytesOfTwo = 112 * 1024;
constexpr int64_t kMaxStages = 6;

// As many blocks as give each of about 132 multiprocessors one or two.
constexpr int64_t kBlocksForTwoTiles = 128;
constexpr int64_t kBlocksForFourTiles = 256;

// A lane of a warp holds the scale of one block of its slice.
constexpr int64_t kMaxBlocksPerSlice = 32;

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t BlocksPerSlice(const ProductProblem& problem) {
  return CeilDivide(CeilDivide(problem.inputs, kProductBlock), kProductSlices);
}

bool TensorCoresFit(const ProductProblem& problem) {
  if (problem.x_dtype != DType::kBf16 || !problem.aligned_weight || problem.inputs < 1) return false;
  switch (problem.weight_dtype) {
    case DType::kBf16:
      return !problem.quantize_activations;
    case DType::kE4m3:
      // A tile of 16 rows and a block of 128 columns have one scale.
      return problem.block_rows % kChannelsPerTile == 0 && problem.block_cols % kProductBlock == 0 &&
             (problem.groups == 1 || problem.by_expert || problem.outputs % kChannelsPerTile == 0) &&
             BlocksPerSlice(problem) <= kMaxBlocksPerSlice;
    case DType::kE2m1x2:
      // A block of 128 columns has four scales in each row.
      return problem.block_rows == 1 && problem.block_cols == 32 && problem.inputs % kProductBlock == 0;
    default:
      return false;
  }
}

bool IsMultiple(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether every row of every matrix starts on a multiple of `bytes`.
bool RowsAligned(const WeightView& view, int64_t bytes) {
  if (!IsMultiple(view.data(), bytes)) return false;
  for (int i = 0; i + 1 < view.rank(); ++i) {
    if (view.extent(i) > 1 && view.stride(i) * DTypeBytes(view.dtype()) % bytes != 0) return false;
  }
  return true;
}

}  // namespace

ProductProblem MakeProductProblem(const TensorView& x, const QuantizedWeight& weight, int64_t groups,
                                  bool quantize_activations) {
  ProductProblem problem = {.rows = x.extents[0],
                            .inputs = weight.cols(),
                            .outputs = weight.rows() / groups,
                            .groups = groups,
                            .x_dtype = x.dtype,
                            .weight_dtype = weight.values.dtype(),
                            .block_rows = weight.block_rows,
                            .block_cols = weight.block_cols,
                            .quantize_activations = quantize_activations};
  problem.aligned_weight = RowsAligned(weight.values, 16);
  if (weight.values.dtype() == DType::kE2m1x2) {
    // Only E8M0 scales are copied in words of four.
    problem.aligned_weight =
        problem.aligned_weight && weight.scales.dtype() == DType::kE8m0 && RowsAligned(weight.scales, 4);
  }
  return problem;
}

ProductKernel ChooseKernel(const ProductProblem& problem) {
  if (problem.rows > kMaxRowsOfOneOrder && problem.library_allowed && problem.groups == 1 && !problem.by_expert &&
      !problem.quantize_activations && problem.x_dtype == DType::kBf16 && problem.weight_dtype == DType::kBf16) {
    return ProductKernel::kCublasLt;
  }
  return TensorCoresFit(problem) ? ProductKernel::kTensorCore : ProductKernel::kScalar;
}

ProductTiles ChooseTiles(const ProductProblem& problem) {
  ProductTiles tiles;
  tiles.rows_per_block = problem.rows <= 8 ? 8 : 32;
  tiles.x_rows = static_cast<int>(std::min<int64_t>(problem.rows, tiles.rows_per_block));
  const int64_t budget = tiles.rows_per_block == 8 ? kSharedBytesOfTwo : kSharedBytesAlone;
  const int64_t channels = problem.outputs * problem.groups;
  const int64_t blocks_per_slice = BlocksPerSlice(problem);
  tiles.channel_tiles = channels / (4 * kChannelsPerTile) >= kBlocksForFourTiles  ? 4
                        : channels / (2 * kChannelsPerTile) >= kBlocksForTwoTiles ? 2
                                                                                  : 1;
  for (;; tiles.channel_tiles /= 2) {
    const int64_t ring_bytes =
        kProductSlices * ProductStageBytes(problem.weight_dtype, tiles.channel_tiles, tiles.x_rows);
    tiles.stages = static_cast<int>(std::min({kMaxStages, blocks_per_slice, budget / ring_bytes}));
    if (tiles.channel_tiles == 1 || tiles.stages >= std::min<int64_t>(2, blocks_per_slice)) {
      tiles.stages = std::max(tiles.stages, 1);
      tiles.shared_bytes = tiles.stages * ring_bytes;
      break;
    }
  }
  // After the last stage, the slices' sums take the ring's place; rows are padded by four floats.
  const int64_t sums_bytes = kProductSlices * CeilDivide(tiles.x_rows, 8) * 8 *
                             (tiles.channel_tiles * kChannelsPerTile + 4) * static_cast<int64_t>(sizeof(float));
  tiles.shared_bytes = std::max(tiles.shared_bytes, sums_bytes);
  return tiles;
}

}  // namespace dsv4
