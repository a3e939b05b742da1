#include "ops/rms_norm/rms_norm_cuda.h"

#include <cstdint>

#include "runtime/block_reduce.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"

namespace dsv4::rms_norm {
namespace {

constexpr int kWidth = 8;  // consecutive channels of a thread

// A block a row. A thread keeps its first channels in registers, and reads those of a longer row again.
template <class Access>
struct NormRows {
  static constexpr char kName[] = "rms_norm";
  static constexpr int kThreads = 256;
  static constexpr int kHeld = 4;  // vectors: rows of up to 8192 channels
  using Floats = Vector<float, kWidth>;

  struct Weights {
    typename Access::Weight weight;
    int64_t channels;
  };
  struct Params {
    typename Access::Data x;
    int64_t x_stride;
    typename Access::Data out;
    int64_t out_stride;
    float eps;
  };
  struct HeldWeights {
    Floats vectors[kHeld];
  };

  static __device__ __forceinline__ int64_t Channel(int64_t vector) {
    return (vector * kThreads + threadIdx.x) * kWidth;
  }

  static __device__ __forceinline__ HeldWeights Prefetch(const Weights& weights) {
    HeldWeights held = {};
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int64_t count = weights.channels - Channel(v);
      if (count > 0) held.vectors[v] = weights.weight.template Load<kWidth>(Channel(v), count);
    }
    return held;
  }

  static __device__ __forceinline__ float SquareSum(const Floats& x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += x.values[i] * x.values[i];
    return sum;
  }
  static __device__ __forceinline__ Floats Scale(Floats x, float factor, const Floats& weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x.values[i] = x.values[i] * factor * weight.values[i];
    return x;
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params,
                                             const HeldWeights& held_weights) {
    __shared__ float sums[kThreads / kWarpThreads];
    const int64_t x_row = blockIdx.x * params.x_stride, out_row = blockIdx.x * params.out_stride;
    typename Access::Data::template Stored<kWidth> held[kHeld];
    float square_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int64_t count = weights.channels - Channel(v);
      if (count > 0) held[v] = params.x.template LoadStored<kWidth>(x_row + Channel(v), count);
    }
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (Channel(v) < weights.channels) square_sum += SquareSum(ToFloats(held[v]));
    }
    for (int64_t v = kHeld; Channel(v) < weights.channels; ++v) {
      square_sum += SquareSum(params.x.template Load<kWidth>(x_row + Channel(v), weights.channels - Channel(v)));
    }
    square_sum = BlockSum<kThreads>(square_sum, sums);
    const float factor = 1.0f / sqrtf(square_sum / static_cast<float>(weights.channels) + params.eps);

#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int64_t count = weights.channels - Channel(v);
      if (count > 0) {
        params.out.template Store<kWidth>(out_row + Channel(v), Scale(ToFloats(held[v]), factor, held_weights.vectors[v]), count);
      }
    }
    for (int64_t v = kHeld; Channel(v) < weights.channels; ++v) {
      const int64_t channel = Channel(v), count = weights.channels - channel;
      const Floats x = params.x.template Load<kWidth>(x_row + channel, count);
      const Floats weight = weights.weight.template Load<kWidth>(channel, count);
      params.out.template Store<kWidth>(out_row + channel, Scale(x, factor, weight), count);
    }
  }
};

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  return DispatchAccess({params.x, params.out}, {params.weight}, kWidth, [&](auto access) {
    using Access = decltype(access);
    return Launch<NormRows<Access>>(
        stream, {.x = params.x.extents[0]},
        {.weight = Access::Weight::Make(params.weight, kWidth), .channels = params.x.extents[1]},
        {.x = Access::Data::Make(params.x, kWidth),
         .x_stride = params.x.strides[0],
         .out = Access::Data::Make(params.out, kWidth),
         .out_stride = params.out.strides[0],
         .eps = params.eps});
  });
}

}  // namespace dsv4::rms_norm
