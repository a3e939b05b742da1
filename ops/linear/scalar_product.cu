// The matrix product in plain fp32 arithmetic, for every type, shape and alignment: the oracle, and what has no kernel
// of its own.
//
// A block computes 16 output channels of 8 rows, each of its eight warps two channels. 1024 input channels of the rows
// at a time are in shared memory as floats. A lane multiplies four consecutive input channels of each block of 128; a
// warp's lanes are summed at the end, always by the same tree.
#include <algorithm>
#include <cstdint>

#include "ops/linear/product_kernel.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/block_scale.h"
#include "runtime/launch.cuh"
#include "runtime/vector_access.cuh"

namespace dsv4 {
namespace {

constexpr int kRows = 8;
constexpr int kWarps = 8;
constexpr int kChannelsPerWarp = 2;
constexpr int kChannels = kWarps * kChannelsPerWarp;
constexpr int kChunk = 1024;
constexpr int kBlock = static_cast<int>(kProductBlock);
constexpr int kWidth = 4;  // a lane's share of a block

using Quad = Vector<float, kWidth>;

__device__ __forceinline__ Quad LoadX(const ProductParams& params, int64_t index, int64_t count) {
  if (params.x_vectors && count >= kWidth) {
    return params.x_is_bf16 ? ToFloats(LoadVector<Bf16, kWidth>(static_cast<const Bf16*>(params.x) + index))
                            : LoadVector<float, kWidth>(static_cast<const float*>(params.x) + index);
  }
  Quad quad;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    quad.values[i] = i >= count         ? 0.0f
                     : params.x_is_bf16 ? ToFloat(static_cast<const Bf16*>(params.x)[index + i])
                                        : static_cast<const float*>(params.x)[index + i];
  }
  return quad;
}

__device__ __forceinline__ float LoadScale(const ProductWeights& weights, int64_t matrix, int64_t scale_row,
                                           int64_t scale_col) {
  const int64_t row = matrix * weights.scale_matrix_bytes + scale_row * weights.scale_row_bytes;
  if (weights.float_scales) {
    return __builtin_bit_cast(float, weights.scales.LoadVector<4>(row + scale_col * 4));
  }
  return ToFloat(E8m0{weights.scales.Load(row + scale_col)});
}

// Elements k .. k + 3 of a row, as they are stored; past `count`, zeros.
__device__ __forceinline__ Quad LoadStored(const ProductWeights& weights, int64_t row, int64_t k, int64_t count) {
  Quad quad;
  const bool vectors = weights.vectors && count >= kWidth;
  switch (weights.dtype) {
    case DType::kF32:
      if (vectors) return __builtin_bit_cast(Quad, weights.values.LoadVector<16>(row + k * 4));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        quad.values[i] = i < count ? __builtin_bit_cast(float, weights.values.LoadVector<4>(row + (k + i) * 4)) : 0.0f;
      }
      return quad;
    case DType::kBf16:
      if (vectors) {
        return ToFloats(__builtin_bit_cast(Vector<Bf16, kWidth>, weights.values.LoadVector<8>(row + k * 2)));
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        quad.values[i] =
            i < count ? ToFloat(__builtin_bit_cast(Bf16, weights.values.LoadVector<2>(row + (k + i) * 2))) : 0.0f;
      }
      return quad;
    case DType::kE4m3: {
      Vector<uint8_t, kWidth> codes = {};
      if (vectors) {
        codes = weights.values.LoadVector<4>(row + k);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) codes.values[i] = i < count ? weights.values.Load(row + k + i) : uint8_t{0};
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) quad.values[i] = ToFloat(E4m3{codes.values[i]});
      return quad;
    }
    default: {  // kE2m1x2; Validate admits no other. A row has an even number of elements, and k is even.
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        const uint8_t pair = i < count ? weights.values.Load(row + (k + i) / 2) : uint8_t{0};
        quad.values[i] = ToFloat(E2m1{static_cast<uint8_t>(pair & 0xf)});
        quad.values[i + 1] = ToFloat(E2m1{static_cast<uint8_t>(pair >> 4)});
      }
      return quad;
    }
  }
}

// The weight's values, with the rounding of the CPU's.
__device__ __forceinline__ Quad LoadWeight(const ProductWeights& weights, int64_t matrix, int64_t row, int64_t k,
                                           int64_t count) {
  Quad quad = LoadStored(weights, matrix * weights.matrix_bytes + row * weights.row_bytes, k, count);
  if (!weights.has_scales) return quad;
  const int64_t scale_row = row / weights.block_rows;
  if (weights.block_cols % kWidth == 0) {
    const float scale = LoadScale(weights, matrix, scale_row, static_cast<int32_t>(k) / weights.block_cols);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) quad.values[i] = __fmul_rn(quad.values[i], scale);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i >= count) continue;
      const float scale = LoadScale(weights, matrix, scale_row, static_cast<int32_t>(k + i) / weights.block_cols);
      quad.values[i] = __fmul_rn(quad.values[i], scale);
    }
  }
  return quad;
}

// What a warp's lanes hold of one block of a row, rounded to e4m3 times a power of two.
__device__ __forceinline__ void Quantize(Quad& quad) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(quad.values[i]));
  const int exponent = Fp8ScaleExponent(WarpMax(largest));
  const float scale = PowerOfTwo(exponent);
  const float inverse = PowerOfTwo(-exponent);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    quad.values[i] = __fmul_rn(ToFloat(E4m3FromFloat(__fmul_rn(quad.values[i], inverse))), scale);
  }
}

struct ScalarProduct {
  static constexpr char kName[] = "linear";
  static constexpr int kThreads = kWarps * kWarpThreads;
  using Weights = ProductWeights;
  using Params = ProductParams;

  static __device__ void Prefetch(const Weights&) {}

  static __device__ void Run(const Weights& weights, const Params& params) {
    __shared__ Quad x_shared[kRows][kChunk / kWidth];
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const ProductRows rows = RowsOfBlock(params);
    if (rows.matrix < 0) return;
    const int64_t group = GroupOfBlock(weights);
    const int64_t first_channel = int64_t{blockIdx.x} * kChannels + warp * kChannelsPerWarp;

    for (int64_t first_row = int64_t{blockIdx.y} * kRows; first_row < rows.count;
         first_row += int64_t{gridDim.y} * kRows) {
      const ProductRow staged = RowOfProduct(params, rows, first_row + warp);  // a warp puts one row into shared memory
      float sums[kChannelsPerWarp][kRows] = {};
      for (int64_t begin = 0; begin < weights.inputs; begin += kChunk) {
        __syncthreads();  // all warps are done with the chunk before
#pragma unroll
        for (int block = 0; block < kChunk; block += kBlock) {
          const int64_t k = begin + block + lane * kWidth;
          Quad quad = {};
          if (staged.x >= 0 && k < weights.inputs) {
            quad = LoadX(params, staged.x * params.x_stride + group * weights.inputs + k, weights.inputs - k);
          }
          if (params.quantize_activations) Quantize(quad);
          x_shared[warp][block / kWidth + lane] = quad;
        }
        __syncthreads();
        for (int block = 0; block < kChunk && begin + block < weights.inputs; block += kBlock) {
          const int64_t k = begin + block + lane * kWidth;
          Quad w[kChannelsPerWarp];
#pragma unroll
          for (int c = 0; c < kChannelsPerWarp; ++c) {
            w[c] = Quad{};
            if (first_channel + c < weights.outputs && k < weights.inputs) {
              w[c] =
                  LoadWeight(weights, rows.matrix, group * weights.outputs + first_channel + c, k, weights.inputs - k);
            }
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const Quad x = x_shared[r][block / kWidth + lane];
#pragma unroll
            for (int c = 0; c < kChannelsPerWarp; ++c) {
#pragma unroll
              for (int i = 0; i < kWidth; ++i) sums[c][r] = fmaf(w[c].values[i], x.values[i], sums[c][r]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kChannelsPerWarp; ++c) {
          const float sum = WarpSum(sums[c][r]);
          if (lane != r * kChannelsPerWarp + c || first_channel + c >= weights.outputs) continue;
          const ProductRow row = RowOfProduct(params, rows, first_row + r);
          if (row.out < 0) continue;
          StoreProduct(params, row.out * params.out_stride + group * weights.outputs + first_channel + c, sum);
        }
      }
    }
  }
};

}  // namespace

absl::Status LaunchScalarProduct(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                                 int64_t groups_or_slots) {
  const int64_t row_sets = std::min<int64_t>((params.rows + kRows - 1) / kRows, 65535);
  return Launch<ScalarProduct>(
      stream,
      {.x = (weights.outputs + kChannels - 1) / kChannels, .y = weights.by_expert ? 1 : row_sets, .z = groups_or_slots},
      weights, params);
}

}  // namespace dsv4
