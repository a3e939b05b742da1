// What the kernels of a matrix product share: their parameters, and which rows a block works on.
//
// blockIdx.x is a tile of output channels, blockIdx.y a set of rows (further ones follow at a distance of the grid),
// and blockIdx.z a group of output channels or, where experts are chosen on the device, one of the chosen experts.
#ifndef DSV4_OPS_LINEAR_PRODUCT_KERNEL_CUH_
#define DSV4_OPS_LINEAR_PRODUCT_KERNEL_CUH_

#include <cstdint>

#include "absl/status/status.h"
#include "ops/linear/choose_kernel.h"
#include "runtime/launch.h"
#include "runtime/stream.h"
#include "runtime/weight_pointer.cuh"

namespace dsv4 {

struct ProductWeights {
  WeightPointer<uint8_t> values;
  WeightPointer<uint8_t> scales;
  int64_t row_bytes;     // from one row of values to the next
  int64_t matrix_bytes;  // from one matrix of a stack to the next
  int64_t scale_row_bytes;
  int64_t scale_matrix_bytes;
  int64_t inputs;   // of a group
  int64_t outputs;  // of a group
  int32_t block_rows, block_cols;
  DType dtype;
  bool has_scales;
  bool float_scales;                      // otherwise E8M0
  bool vectors;                           // for kScalar: accesses of four elements are aligned
  bool by_expert;                         // which matrix is known after the wait only
  int32_t channel_tiles, stages, x_rows;  // for kTensorCore
};

struct ProductParams {
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  bool x_is_bf16;
  bool x_vectors;  // kScalar: accesses of four elements are aligned; kTensorCore: of 16 bytes
  bool out_is_bf16;
  bool quantize_activations;
  int64_t rows;
  const int32_t* live_rows;  // null: all
  // Of experts chosen on the device:
  const int32_t* expert_slots;  // [slots, 3]: expert (-1: none), its first entry in `choices`, how many
  const int32_t* choices;       // the rows of out; a row of x is one of these / choices_per_row
  int64_t choices_per_row;
};

struct ProductRows {
  int64_t matrix;  // -1: nothing to do
  int64_t first;   // in `choices`
  int64_t count;
};
__device__ __forceinline__ ProductRows RowsOfBlock(const ProductParams& params) {
  if (params.expert_slots == nullptr) return {0, 0, params.rows};
  const int32_t* const slot = params.expert_slots + 3 * int64_t{blockIdx.z};
  return {slot[0], slot[1], slot[2]};
}

struct ProductRow {
  int64_t x;  // -1: neither read nor written
  int64_t out;
};
__device__ __forceinline__ ProductRow RowOfProduct(const ProductParams& params, const ProductRows& rows, int64_t i) {
  if (i >= rows.count) return {-1, -1};
  if (params.expert_slots != nullptr) {
    const int64_t choice = params.choices[rows.first + i];
    return {choice / params.choices_per_row, choice};
  }
  if (params.live_rows != nullptr && params.live_rows[i] < 0) return {-1, -1};
  return {i, i};
}

__device__ __forceinline__ void StoreProduct(const ProductParams& params, int64_t index, float sum) {
  if (params.out_is_bf16) {
    static_cast<Bf16*>(params.out)[index] = Bf16FromFloat(sum);
  } else {
    static_cast<float*>(params.out)[index] = sum;
  }
}

__device__ __forceinline__ int64_t GroupOfBlock(const ProductWeights& weights) {
  return weights.by_expert ? 0 : int64_t{blockIdx.z};
}

// Each in a file of its own.
absl::Status LaunchScalarProduct(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                                 int64_t groups_or_slots);
absl::Status LaunchBf16Product(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                               int64_t groups_or_slots, const ProductTiles& tiles);
absl::Status LaunchE4m3Product(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                               int64_t groups_or_slots, const ProductTiles& tiles);
absl::Status LaunchE2m1Product(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                               int64_t groups_or_slots, const ProductTiles& tiles);

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_PRODUCT_KERNEL_CUH_
