// Scores on the tensor cores: heads of 128 channels, 64 heads at most, keys in the FP8, MXFP4 and bf16 formats.
//
// A warp scores 16 keys at a time: keys[16][128] . q[128][64 heads], then each key's sum over the heads. It holds the
// whole query in registers and reads keys from global memory straight into operands, the next ones while it works on
// these. Small floats become f16 or bf16, exactly, so that products are exact and sums are in fp32; the tensor cores' own
// FP8 products sum in fewer bits than fp32 has.
//
// The work is all rows' keys in units of 64 (a warp's 16, times four). Each block takes an equal part of the list of all
// units, one stretch, so that rows of any lengths balance. Which block scores a key does not change the score.
#ifndef DSV4_OPS_INDEXER_LOGITS_SCORE_TENSOR_CORES_CUH_
#define DSV4_OPS_INDEXER_LOGITS_SCORE_TENSOR_CORES_CUH_

#include <cstdint>

#include "ops/indexer_logits/score.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/launch.cuh"
#include "runtime/packed_convert.cuh"
#include "runtime/shared_memory.cuh"
#include "runtime/tensor_core.cuh"

namespace dsv4::indexer_logits {

// Grid: x = any number of blocks.
template <RowFormat kFormat>
struct ScoreTensorCores {
  static_assert(kFormat == RowFormat::kFp8Key || kFormat == RowFormat::kMxfp4Key || kFormat == RowFormat::kBf16);
  static constexpr char kName[] = "indexer_logits";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocksPerMultiprocessor = 2;
  using Weights = NoWeights;
  using Params = ScoreParams;

  static constexpr int kMostHeads = 64;
  static constexpr int kChannels = 128;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kUnitKeys = 16 * kWarps;
  static constexpr int kHeadTiles = kMostHeads / 8;
  static constexpr int kSteps = kChannels / 16;  // of a product

  struct Shared {
    int64_t ends[kThreads];  // of each row of a group of rows, the units up to its last
    int64_t warp_sums[kWarps];
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    Shared& shared = DynamicShared<Shared>();
    const int thread = static_cast<int>(threadIdx.x);
    int64_t sum = 0;
    for (int64_t row = thread; row < params.rows; row += kThreads) sum += UnitsOf(params, row);
    const int64_t total = BlockSum<kThreads>(sum, shared.warp_sums);
    int64_t unit = total * blockIdx.x / gridDim.x;
    const int64_t end = total * (blockIdx.x + int64_t{1}) / gridDim.x;

    int64_t group_begin = 0;  // units before the group
    for (int64_t group = 0; unit < end; group += kThreads) {
      const int64_t group_end = SumUpGroup(params, group, group_begin, shared);
      if (unit < group_end) {
        // The first row with units past `unit`.
        int row = 0;
        for (int last = kThreads - 1; row < last;) {
          const int middle = (row + last) / 2;
          if (shared.ends[middle] > unit) {
            last = middle;
          } else {
            row = middle + 1;
          }
        }
        for (; unit < end && unit < group_end; ++row) {
          const int64_t row_begin = row == 0 ? group_begin : shared.ends[row - 1];
          const int64_t row_end = min(shared.ends[row], end);
          if (row_end <= unit) continue;  // a row without units
          ScoreUnits(params, group + row, static_cast<int32_t>(unit - row_begin),
                     static_cast<int32_t>(row_end - row_begin));
          unit = row_end;
        }
      }
      group_begin = group_end;
    }
  }

 private:
  static __device__ __forceinline__ int64_t UnitsOf(const Params& params, int64_t row) {
    if (row >= params.rows) return 0;
    const int32_t count = params.counts[row];
    return count <= 0 ? 0 : (int64_t{count} + kUnitKeys - 1) / kUnitKeys;
  }

  // Fills shared.ends of rows group .. group + kThreads - 1. Returns the last. The whole block calls this.
  static __device__ __forceinline__ int64_t SumUpGroup(const Params& params, int64_t group, int64_t group_begin,
                                                       Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    int64_t units = UnitsOf(params, group + threadIdx.x);
#pragma unroll
    for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const int64_t before = __shfl_up_sync(kFullWarp, units, lanes);
      if (lane >= lanes) units += before;
    }
    __syncthreads();  // what was in `shared` is no longer in use
    if (lane == kWarpThreads - 1) shared.warp_sums[warp] = units;
    __syncthreads();
    for (int i = 0; i < warp; ++i) units += shared.warp_sums[i];
    shared.ends[threadIdx.x] = group_begin + units;
    __syncthreads();
    return shared.ends[kThreads - 1];
  }

  // A lane's part of 128 channels as they are stored, and the scale that is multiplied in before products.
  struct Channels {
    static constexpr int kWords = kFormat == RowFormat::kFp8Key ? 8 : kFormat == RowFormat::kMxfp4Key ? 4 : 16;
    uint32_t words[kWords];
    uint32_t scale_byte;  // kMxfp4Key

    // Of the vector at `values`. A lane has 16-byte pieces t, t + 4, ..., with t = lane % 4: in which order a product
    // takes channels is free, and keys and heads agree in it. Of MXFP4 a piece is the 32 channels of one scale.
    __device__ __forceinline__ void Load(const uint8_t* values, const uint8_t* scale_bytes, int t) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 piece = *reinterpret_cast<const uint4*>(values + 16 * (t + 4 * i));
        words[4 * i] = piece.x;
        words[4 * i + 1] = piece.y;
        words[4 * i + 2] = piece.z;
        words[4 * i + 3] = piece.w;
      }
      if constexpr (kFormat == RowFormat::kMxfp4Key) scale_byte = scale_bytes[t];
    }

    // The four channels of one step, as two pairs.
    __device__ __forceinline__ TwoPairs Operand(int step) const {
      if constexpr (kFormat == RowFormat::kFp8Key) {
        return F16OfE4m3(words[step]);
      } else if constexpr (kFormat == RowFormat::kMxfp4Key) {
        uint32_t pairs[4];
        ScaledBf16OfE2m1(words[step / 2], scale_byte, pairs);
        return step % 2 == 0 ? TwoPairs{pairs[0], pairs[1]} : TwoPairs{pairs[2], pairs[3]};
      } else {
        return {words[2 * step], words[2 * step + 1]};
      }
    }
  };

  // Entries j + lane / 4 and that + 8.
  struct Keys {
    Channels low, high;
    float low_scale, high_scale;  // kFp8Key
  };

  static __device__ __forceinline__ void LoadKey(const Params& params, const int32_t* table, int32_t j, int t,
                                                 Channels& channels, float& scale) {
    const RowAddress at = params.KeyAddress(table, j);
    channels.Load(at.values, at.scales, t);
    if constexpr (kFormat == RowFormat::kFp8Key) scale = *reinterpret_cast<const float*>(at.scales);
  }

  // Units begin .. end - 1 of a row. The whole block calls this; warps do not meet.
  static __device__ __forceinline__ void ScoreUnits(const Params& params, int64_t row, int32_t begin, int32_t end) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const int g = lane / 4, t = lane % 4;
    const int32_t count = params.counts[row];
    const int32_t* const table = params.TableOf(row);
    // No branches about loads, so that all of them are in flight together: in the place of an entry past the last stands
    // the last, whose score is not written twice, and in that of a head past the last the last with a weight of 0.
    const auto load = [&](int32_t unit) {
      const int32_t j = unit * kUnitKeys + warp * 16 + g;
      Keys keys;
      LoadKey(params, table, min(j, count - 1), t, keys.low, keys.low_scale);
      LoadKey(params, table, min(j + 8, count - 1), t, keys.high, keys.high_scale);
      return keys;
    };
    Keys next = load(begin);

    Channels heads[kHeadTiles];
    float weights[kHeadTiles][2];  // of heads 8n + 2t, 8n + 2t + 1
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const int64_t head = min(8 * n + g, params.heads - 1);
      const int64_t first = row * params.q_row_stride + head * params.q_head_stride;
      heads[n].Load(static_cast<const uint8_t*>(params.q_values) + first * (kFormat == RowFormat::kBf16 ? 2 : 1),
                    params.q_scales + row * params.q_scales_row_stride + head * params.q_scales_head_stride, t);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_head = 8 * n + 2 * t + i;
        weights[n][i] = of_head < params.heads ? params.weights[row * params.weights_row_stride + of_head] : 0.0f;
      }
    }
    uint32_t q[kHeadTiles][kSteps][2];  // the second operands of all steps: heads 8n + g
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const TwoPairs operand = heads[n].Operand(step);
        q[n][step][0] = operand.low;
        q[n][step][1] = operand.high;
      }
    }

    for (int32_t unit = begin; unit < end; ++unit) {
      const Keys keys = next;
      if (unit + 1 < end) next = load(unit + 1);
      float products[kHeadTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const TwoPairs low = keys.low.Operand(step), high = keys.high.Operand(step);
        const uint32_t a[4] = {low.low, high.low, low.high, high.high};
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
          if constexpr (kFormat == RowFormat::kFp8Key) {
            tensor_core::MultiplyF16(products[n], a, q[n][step]);
          } else {
            tensor_core::MultiplyBf16(products[n], a, q[n][step]);
          }
        }
      }
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          low = fmaf(weights[n][i], Rectified(products[n][i]), low);
          high = fmaf(weights[n][i], Rectified(products[n][2 + i]), high);
        }
      }
      low = WarpSum<4>(low);
      high = WarpSum<4>(high);
      if constexpr (kFormat == RowFormat::kFp8Key) {
        low *= keys.low_scale;
        high *= keys.high_scale;
      }
      // Lane t = 0 of each four writes one, t = 1 the other.
      const int32_t j = unit * kUnitKeys + warp * 16 + g + 8 * t;
      if (t < 2 && j < count) params.logits[row * params.logits_row_stride + j] = t == 0 ? low : high;
    }
  }
};

}  // namespace dsv4::indexer_logits

#endif  // DSV4_OPS_INDEXER_LOGITS_SCORE_TENSOR_CORES_CUH_
