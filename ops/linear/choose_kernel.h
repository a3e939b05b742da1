// Which kernel computes a matrix product on CUDA, and how it cuts the work up. Pure functions: no CUDA call, no memory
// access, the same answer on every machine.
//
//   switch (ChooseKernel(problem)) { case ProductKernel::kTensorCore: ... ChooseTiles(problem) ... }
//
// For up to kMaxRowsOfOneOrder rows neither the choice nor the order of summation depends on the number of rows.
#ifndef DSV4_OPS_LINEAR_CHOOSE_KERNEL_H_
#define DSV4_OPS_LINEAR_CHOOSE_KERNEL_H_

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

inline constexpr int64_t kMaxRowsOfOneOrder = 64;

// Input channels that a warp takes at a time; as many as share the scale of a quantised activation.
inline constexpr int64_t kProductBlock = 128;
// The blocks of a sum over the input channels are cut into this many runs, or one a block if there are fewer. A run is
// summed in order, and the runs' sums are added in order.
inline constexpr int64_t kProductSlices = 8;

// out [rows, groups * outputs] = x [rows, groups * inputs] times weight [groups * outputs, inputs], by groups. Of a stack
// whose matrices and rows are chosen on the device (by_expert), each of the chosen is a group, and has up to `rows` rows.
struct ProductProblem {
  int64_t rows = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  int64_t groups = 1;
  DType x_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  int64_t block_rows = 1;  // of the weight's scales
  int64_t block_cols = 1;
  bool quantize_activations = false;
  bool aligned_weight = false;   // rows start on 16 bytes, those of e2m1x2's scales on 4
  bool by_expert = false;
  bool library_allowed = false;  // plain row-major operands that cublasLt can take
};

// Fills all but `library_allowed` and `by_expert`; `weight` may be a stack.
ProductProblem MakeProductProblem(const TensorView& x, const QuantizedWeight& weight, int64_t groups,
                                  bool quantize_activations);

enum class ProductKernel : uint8_t {
  kScalar,      // fp32 arithmetic, any shape and type
  kTensorCore,  // bf16 x, whole 16-byte pieces of weight rows
  kCublasLt,    // bf16 by bf16, more rows than kMaxRowsOfOneOrder
};
ProductKernel ChooseKernel(const ProductProblem& problem);

// Of the tensor core kernel: a block works on `channel_tiles` * 16 output channels and up to rows_per_block rows; its
// eight warps have a slice of the input each, and a ring of `stages` blocks of it in shared memory.
struct ProductTiles {
  int channel_tiles = 1;   // 1, 2 or 4
  int rows_per_block = 8;  // 8 or 32
  int x_rows = 8;          // rows that a stage has room for
  int stages = 1;
  int64_t shared_bytes = 0;

  friend bool operator==(const ProductTiles&, const ProductTiles&) = default;
};
inline constexpr int64_t kChannelsPerTile = 16;
inline constexpr int kMaxChannelTiles = 4;
ProductTiles ChooseTiles(const ProductProblem& problem);

// Bytes of one stage of one warp: the weights' tiles, their scales where each row has its own, and x.
constexpr int64_t ProductTileBytes(DType weight_dtype) {
  return kChannelsPerTile * kProductBlock * DTypeBytes(weight_dtype) / (weight_dtype == DType::kE2m1x2 ? 2 : 1);
}
constexpr int64_t ProductTileScaleBytes(DType weight_dtype) {
  return weight_dtype == DType::kE2m1x2 ? kChannelsPerTile * kProductBlock / 32 : 0;
}
constexpr int64_t ProductStageBytes(DType weight_dtype, int64_t channel_tiles, int64_t x_rows) {
  return channel_tiles * (ProductTileBytes(weight_dtype) + ProductTileScaleBytes(weight_dtype)) +
         x_rows * kProductBlock * DTypeBytes(DType::kBf16);
}

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_CHOOSE_KERNEL_H_
