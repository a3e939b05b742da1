// Attention in fp32 arithmetic for any head count, head size, row format and type of q.
//
// A block takes eight heads of one query row, a warp each, and one split of its list, kTile listed rows at a time, which
// it decodes into shared memory once for its heads. A lane owns every 32nd channel of its warp's head.
#ifndef DSV4_OPS_SPARSE_ATTENTION_ATTEND_PLAIN_CUH_
#define DSV4_OPS_SPARSE_ATTENTION_ATTEND_PLAIN_CUH_

#include <cstdint>

#include "ops/sparse_attention/attend.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/launch.cuh"
#include "runtime/shared_memory.cuh"

namespace dsv4::sparse_attention {

// Grid: x = row * splits + split, y = group of kHeads heads.
struct AttendPlain {
  static constexpr char kName[] = "sparse_attention";
  static constexpr int kThreads = 256;
  using Weights = SinkWeights;
  using Params = AttendParams;

  static constexpr int kHeads = kThreads / kWarpThreads;
  static constexpr int kTile = 16;  // a split is a multiple of it

  // keys[kTile][channels], q[kHeads][channels], out[kHeads][channels], each a float.
  static constexpr int64_t SharedBytes(int64_t channels) {
    return (kTile + 2 * kHeads) * channels * static_cast<int64_t>(sizeof(float));
  }

  static __device__ __forceinline__ void Prefetch(const Weights& weights) { weights.sink.PrefetchToL2(0); }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t row = blockIdx.x / params.splits;
    const int32_t split = static_cast<int32_t>(blockIdx.x - row * params.splits);
    const RowList list = ListOf(params, row);
    const int32_t begin = split * list.split_length;
    const int32_t end = min(begin + list.split_length, list.listed);
    if (begin >= end && split > 0) return;  // split 0 also writes the result of an empty list

    float* const shared = &DynamicShared<float>();
    const int channels = params.channels;
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const int head = static_cast<int>(blockIdx.y) * kHeads + warp;
    const bool is_head = head < params.heads;
    float* const keys = shared;
    float* const q = keys + (kTile + warp) * channels;            // of the warp's head, as `out`
    float* const out = keys + (kTile + kHeads + warp) * channels;
    for (int c = lane; c < channels; c += kWarpThreads) {
      q[c] = is_head && begin < end ? LoadQuery(params, row, head, c) : 0.0f;
      out[c] = 0.0f;
    }

    RunningSoftmax softmax;  // the same in all lanes
    for (int32_t tile = begin; tile < end; tile += kTile) {
      const int count = min(kTile, end - tile);
      uint32_t valid = 0;  // bit r: listed row tile + r
      for (int r = 0; r < count; ++r) {
        const int32_t slot = SlotAt(params, list, row, tile + r);
        if (slot < 0) continue;
        valid |= 1u << r;
        if (r % kHeads != warp) continue;
        const bool is_window = tile + r < list.window_length;
        const PagedRowsPointer& rows = is_window ? params.window : params.entries;
        const RowAddress at = LocateRow(rows, slot);
        for (int c = lane; c < channels; c += kWarpThreads) keys[r * channels + c] = DecodeChannel(rows, at, c);
      }
      __syncthreads();
      if (is_head) AddTile(params, lane, keys, valid, q, out, softmax);
      __syncthreads();
    }
    if (!is_head) return;

    if (list.splits() > 1) {
      if (lane == 0) {
        float* const sums = params.split_sums + row * params.split_sums_row_stride +
                            split * params.split_sums_split_stride + head * params.split_sums_head_stride;
        sums[0] = softmax.maximum;
        sums[1] = softmax.sum;
      }
      float* const part = params.split_out + row * params.split_out_row_stride + split * params.split_out_split_stride +
                          head * params.split_out_head_stride;
      for (int c = lane; c < channels; c += kWarpThreads) part[c] = out[c];
      return;
    }
    if (lane == 0) params.lse[row * params.lse_row_stride + head] = softmax.LogSumExp();
    const float normaliser = softmax.Normaliser(weights.sink.Load(head));
    for (int c = lane; c < channels; c += kWarpThreads) StoreOut(params, row, head, c, out[c] * normaliser);
  }

  static __device__ __forceinline__ void StoreOut(const Params& params, int64_t row, int64_t head, int channel,
                                                  float value) {
    const int64_t index = row * params.out_row_stride + head * params.out_head_stride + channel;
    if (params.out_is_bf16) {
      static_cast<Bf16*>(params.out)[index] = Bf16FromFloat(value);
    } else {
      static_cast<float*>(params.out)[index] = value;
    }
  }

 private:
  static __device__ __forceinline__ float LoadQuery(const Params& params, int64_t row, int64_t head, int channel) {
    const int64_t index = row * params.q_row_stride + head * params.q_head_stride + channel;
    return params.q_is_bf16 ? ToFloat(static_cast<const Bf16*>(params.q)[index])
                            : static_cast<const float*>(params.q)[index];
  }

  // A warp lets its head attend to the valid rows of a tile. A lane reads and writes its own channels of q and out.
  static __device__ __forceinline__ void AddTile(const Params& params, int lane, const float* keys, uint32_t valid,
                                                 const float* q, float* out, RunningSoftmax& softmax) {
    float weights[kTile];
    float largest = -INFINITY;
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      weights[r] = -INFINITY;
      if ((valid >> r & 1) == 0) continue;
      float product = 0.0f;
      for (int c = lane; c < params.channels; c += kWarpThreads) {
        product = fmaf(q[c], keys[r * params.channels + c], product);
      }
      weights[r] = WarpSum(product) * params.scale;
      largest = fmaxf(largest, weights[r]);
    }
    const float factor = softmax.Raise(largest);
    const float maximum = softmax.finite_maximum();
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      weights[r] = exp2f(weights[r] - maximum);
      softmax.sum += weights[r];
      if (params.q_is_bf16) weights[r] = RoundToBf16(weights[r]);
    }
    for (int c = lane; c < params.channels; c += kWarpThreads) {
      float sum = out[c] * factor;
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        // What an invalid row's place in `keys` holds is unknown.
        if ((valid >> r & 1) != 0) sum = fmaf(weights[r], keys[r * params.channels + c], sum);
      }
      out[c] = sum;
    }
  }
};

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_ATTEND_PLAIN_CUH_
