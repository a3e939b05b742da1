// Copies from global to shared memory that go on while the thread does other things (cp.async).
//
//   CopyAsync<16>(destination, source, valid);   // valid < 16: the rest of the destination becomes zero
//   CommitAsyncCopies();                         // what was issued since the last commit is a group
//   WaitForAsyncCopies<1>();                     // this thread's groups are complete, but for the last one
//   __syncwarp();                                // ... and now those of the warp's other threads are visible too
//
// Of weights, WeightPointer::CopyAsync does the same and may do so before the wait (pdl.cuh).
#ifndef DSV4_RUNTIME_ASYNC_COPY_CUH_
#define DSV4_RUNTIME_ASYNC_COPY_CUH_

#include <cstdint>

namespace dsv4 {

// What is copied. A weight is read in order, so what follows in memory is brought into L2 with it (256 bytes); that
// hint is also what tells these copies, which may precede the wait, from others in the machine code
// (tests/check_sass.py).
enum class AsyncSource { kTensor, kWeight };

// kBytes: 4 or 16; both addresses are multiples of it. `valid` bytes, from 0 to kBytes, are read.
template <int kBytes, AsyncSource kSource = AsyncSource::kTensor>
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, int valid) {
  static_assert(kBytes == 4 || kBytes == 16);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  // 16 bytes go past the first-level cache: what is copied is read once.
  if constexpr (kBytes == 16 && kSource == AsyncSource::kWeight) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid)
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid) : "memory");
  } else if constexpr (kSource == AsyncSource::kWeight) {
    asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(valid) : "memory");
  }
}

__device__ __forceinline__ void CommitAsyncCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void WaitForAsyncCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_ASYNC_COPY_CUH_
