// Sums and maxima over the threads of a warp or a block, in one fixed order, so that equal inputs give equal bits.
// Every thread gets the result.
#ifndef DSV4_RUNTIME_BLOCK_REDUCE_CUH_
#define DSV4_RUNTIME_BLOCK_REDUCE_CUH_

#include <cstdint>

namespace dsv4 {

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

// Over each aligned group of kLanes lanes; the whole warp calls these.
template <int kLanes = kWarpThreads, typename T>
__device__ __forceinline__ T WarpSum(T value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}
// NaN is left out unless all are NaN.
template <int kLanes = kWarpThreads>
__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Over a block of kThreads; the whole block calls this. `shared` has kThreads / 32 elements and may be used again after
// the block's next barrier.
template <int kThreads, typename T>
__device__ __forceinline__ T BlockSum(T value, T* shared) {
  constexpr int kWarps = kThreads / kWarpThreads;
  static_assert(kThreads % kWarpThreads == 0);
  value = WarpSum(value);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % kWarpThreads == 0) shared[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = shared[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) value += shared[warp];
  }
  return value;
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_BLOCK_REDUCE_CUH_
