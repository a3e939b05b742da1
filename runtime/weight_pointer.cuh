// A weight as a kernel sees it: the only data that it may touch before its wait (pdl.cuh). Only a WeightView makes one.
//
// Loads go through the read-only path (ld.global.nc), which is outside the memory model that the wait acts in; that is
// right for what no kernel writes, and for nothing else.
#ifndef DSV4_RUNTIME_WEIGHT_POINTER_CUH_
#define DSV4_RUNTIME_WEIGHT_POINTER_CUH_

#include <cstdint>

#include "runtime/async_copy.cuh"
#include "runtime/vector_access.cuh"
#include "runtime/weight_view.h"

namespace dsv4 {

template <typename T>
class WeightPointer {
 public:
  WeightPointer() = default;
  // The caller has checked the view's dtype.
  explicit WeightPointer(const WeightView& view) : data_(view.As<T>()) {}

  // Elements index .. index + N - 1; their address must be aligned to N elements.
  template <int N>
  __device__ __forceinline__ Vector<T, N> LoadVector(int64_t index) const {
    using Bits = VectorBits<sizeof(T) * N>;
    return __builtin_bit_cast(Vector<T, N>, __ldg(reinterpret_cast<const Bits*>(data_ + index)));
  }
  __device__ __forceinline__ T Load(int64_t index) const { return LoadVector<1>(index).values[0]; }

  // Brings the 128-byte line of element `index` into L2.
  __device__ __forceinline__ void PrefetchToL2(int64_t index) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(data_ + index));
  }

  // Elements from `index` on into shared memory, `valid` bytes of kBytes (async_copy.cuh).
  template <int kBytes>
  __device__ __forceinline__ void CopyAsync(void* shared, int64_t index, int valid) const {
    dsv4::CopyAsync<kBytes, AsyncSource::kWeight>(shared, data_ + index, valid);
  }

 private:
  const T* data_ = nullptr;
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_WEIGHT_POINTER_CUH_
