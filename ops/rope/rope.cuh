// Rotary embedding and the Hadamard rotation in kernels, with the bits of rope_cpu.h: products are rounded before they
// are added.
#ifndef DSV4_OPS_ROPE_ROPE_CUH_
#define DSV4_OPS_ROPE_ROPE_CUH_

#include "runtime/block_reduce.cuh"
#include "runtime/vector_access.cuh"

namespace dsv4 {

// One pair of channels (2i, 2i + 1), by the angle of cosine[i] and sine[i].
__device__ __forceinline__ void RotatePair(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
  b = __fadd_rn(__fmul_rn(x, sine), __fmul_rn(y, cosine));
}
__device__ __forceinline__ void RotatePairInverse(float& a, float& b, float cosine, float sine) {
  const float x = a, y = b;
  a = __fadd_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
  b = __fsub_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
}

// Of 32 * kWidth channels, a power of two, kWidth consecutive ones a lane; the whole warp calls this.
template <int kWidth>
__device__ __forceinline__ void HadamardWarp(Vector<float, kWidth>& v) {
#pragma unroll
  for (int half = 1; half < kWidth; half *= 2) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if ((i & half) != 0) continue;
      const float a = v.values[i], b = v.values[i + half];
      v.values[i] = a + b;
      v.values[i + half] = a - b;
    }
  }
#pragma unroll
  for (int offset = 1; offset < kWarpThreads; offset *= 2) {
    const bool upper = (threadIdx.x & offset) != 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, v.values[i], offset);
      v.values[i] = upper ? other - v.values[i] : v.values[i] + other;
    }
  }
  const float scale = 1.0f / sqrtf(static_cast<float>(kWarpThreads * kWidth));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v.values[i] = __fmul_rn(v.values[i], scale);
}

// Of a row of `channels` (a power of two) in shared memory, by threads first, first + step, ... that `barrier`
// synchronises. It ends with a barrier; one must precede it.
template <class Barrier>
__device__ __forceinline__ void HadamardShared(float* row, int channels, int first, int step, const Barrier& barrier) {
  for (int half = 1; half < channels; half *= 2) {
    for (int pair = first; pair < channels / 2; pair += step) {
      const int i = (pair / half) * 2 * half + pair % half;
      const float a = row[i], b = row[i + half];
      row[i] = a + b;
      row[i + half] = a - b;
    }
    barrier();
  }
  const float scale = 1.0f / sqrtf(static_cast<float>(channels));
  for (int i = first; i < channels; i += step) row[i] = __fmul_rn(row[i], scale);
  barrier();
}

}  // namespace dsv4

#endif  // DSV4_OPS_ROPE_ROPE_CUH_
