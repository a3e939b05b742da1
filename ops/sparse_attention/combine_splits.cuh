// Adds up the splits of each row that has several, in order, and applies the sink.
#ifndef DSV4_OPS_SPARSE_ATTENTION_COMBINE_SPLITS_CUH_
#define DSV4_OPS_SPARSE_ATTENTION_COMBINE_SPLITS_CUH_

#include <cstdint>

#include "ops/sparse_attention/attend.cuh"
#include "ops/sparse_attention/attend_plain.cuh"
#include "runtime/launch.cuh"

namespace dsv4::sparse_attention {

// Grid: x = row, y = head.
struct CombineSplits {
  static constexpr char kName[] = "sparse_attention_combine";
  static constexpr int kThreads = 128;
  using Weights = SinkWeights;
  using Params = AttendParams;

  static __device__ __forceinline__ void Prefetch(const Weights& weights) { weights.sink.PrefetchToL2(blockIdx.y); }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t row = blockIdx.x, head = blockIdx.y;
    const int splits = ListOf(params, row).splits();
    if (splits <= 1) return;  // attention itself has written the result

    const float* const sums = params.split_sums + row * params.split_sums_row_stride + head * params.split_sums_head_stride;
    const float* const parts = params.split_out + row * params.split_out_row_stride + head * params.split_out_head_stride;
    RunningSoftmax softmax;
    for (int split = 0; split < splits; ++split) softmax.Raise(sums[split * params.split_sums_split_stride]);
    const float maximum = softmax.finite_maximum();
    // Every thread, a channel at a time; the factors are powers of two, so only the sums round.
    for (int split = 0; split < splits; ++split) {
      const float* const of_split = sums + split * params.split_sums_split_stride;
      softmax.sum += PowerOfTwoOrZero(of_split[0] - maximum) * of_split[1];
    }
    const float normaliser = softmax.Normaliser(weights.sink.Load(head));
    if (threadIdx.x == 0) params.lse[row * params.lse_row_stride + head] = softmax.LogSumExp();
    for (int channel = static_cast<int>(threadIdx.x); channel < params.channels; channel += kThreads) {
      float sum = 0.0f;
#pragma unroll 8
      for (int split = 0; split < splits; ++split) {
        const float factor = PowerOfTwoOrZero(sums[split * params.split_sums_split_stride] - maximum);
        sum += factor * parts[split * params.split_out_split_stride + channel];
      }
      AttendPlain::StoreOut(params, row, head, channel, sum * normaliser);
    }
  }
};

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_COMBINE_SPLITS_CUH_
