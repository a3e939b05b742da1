// Scores in fp32 arithmetic for any head count, head size and format.
#ifndef DSV4_OPS_INDEXER_LOGITS_SCORE_PLAIN_CUH_
#define DSV4_OPS_INDEXER_LOGITS_SCORE_PLAIN_CUH_

#include <cstdint>

#include "ops/indexer_logits/score.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/launch.cuh"
#include "runtime/shared_memory.cuh"

namespace dsv4::indexer_logits {

// A block decodes the query of one row, then each warp takes a key at a time; a lane has every 32nd head.
// Grid: x = row * blocks per row + block.
struct ScorePlain {
  static constexpr char kName[] = "indexer_logits";
  static constexpr int kThreads = 256;
  using Weights = NoWeights;
  struct Params {
    ScoreParams score;
    int32_t blocks_per_row;
  };

  static constexpr int kWarps = kThreads / kWarpThreads;

  // q[heads][channels + 1], so that lanes at different heads meet different banks; keys[kWarps][channels]. Floats.
  static constexpr int64_t SharedBytes(int64_t heads, int64_t channels) {
    return (heads * (channels + 1) + kWarps * channels) * static_cast<int64_t>(sizeof(float));
  }

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& kernel) {
    const ScoreParams& params = kernel.score;
    const int64_t row = blockIdx.x / kernel.blocks_per_row;
    const int32_t block = static_cast<int32_t>(blockIdx.x - row * kernel.blocks_per_row);
    const int32_t count = params.counts[row];
    if (block * kWarps >= count) return;

    float* const q = &DynamicShared<float>();
    const int heads = params.heads, channels = params.channels;
    for (int i = static_cast<int>(threadIdx.x); i < heads * channels; i += kThreads) {
      const int head = i / channels, channel = i % channels;
      q[head * (channels + 1) + channel] = QueryValue(params, row, head, channel);
    }
    __syncthreads();

    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    float* const key = q + heads * (channels + 1) + warp * channels;
    const int32_t* const table = params.TableOf(row);
    const float* const weights = params.weights + row * params.weights_row_stride;
    for (int32_t j = block * kWarps + warp; j < count; j += kernel.blocks_per_row * kWarps) {
      const RowAddress at = params.KeyAddress(table, j);
      for (int c = lane; c < channels; c += kWarpThreads) key[c] = DecodeChannel(params.keys, at, c);
      __syncwarp();
      float score = 0.0f;
      for (int head = lane; head < heads; head += kWarpThreads) {
        float product = 0.0f;
        for (int c = 0; c < channels; ++c) product = fmaf(q[head * (channels + 1) + c], key[c], product);
        score = fmaf(weights[head], Rectified(product), score);
      }
      score = WarpSum(score);
      if (lane == 0) params.logits[row * params.logits_row_stride + j] = score;
      __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ float QueryValue(const ScoreParams& params, int64_t row, int64_t head,
                                                     int channel) {
    const int64_t first = row * params.q_row_stride + head * params.q_head_stride;
    switch (params.q_dtype) {
      case DType::kE4m3:
        return ToFloat(static_cast<const E4m3*>(params.q_values)[first + channel]);
      case DType::kE2m1x2: {
        const int pair = static_cast<const uint8_t*>(params.q_values)[first + channel / 2];
        const int64_t scale = row * params.q_scales_row_stride + head * params.q_scales_head_stride;
        return ToFloat(E2m1{static_cast<uint8_t>(channel % 2 == 0 ? pair & 0xf : pair >> 4)}) *
               ToFloat(E8m0{params.q_scales[scale + channel / kMxfp4GroupChannels]});
      }
      case DType::kBf16:
        return ToFloat(static_cast<const Bf16*>(params.q_values)[first + channel]);
      default:
        return static_cast<const float*>(params.q_values)[first + channel];
    }
  }
};

}  // namespace dsv4::indexer_logits

#endif  // DSV4_OPS_INDEXER_LOGITS_SCORE_PLAIN_CUH_
