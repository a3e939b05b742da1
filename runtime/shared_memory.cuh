// A block's dynamic shared memory as one struct.
//
//   struct Shared { float tile[64][64]; };
//   Shared& shared = DynamicShared<Shared>();          // the launch passes sizeof(Shared)
#ifndef DSV4_RUNTIME_SHARED_MEMORY_CUH_
#define DSV4_RUNTIME_SHARED_MEMORY_CUH_

namespace dsv4 {

// Aligned to 1024 bytes.
template <typename T>
__device__ __forceinline__ T& DynamicShared() {
  static_assert(alignof(T) <= 1024);
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  return *reinterpret_cast<T*>(dynamic_shared);
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_SHARED_MEMORY_CUH_
