// Copies from global to shared memory that a thread starts and later waits for (cp.async).
//
//   CopyAsync16(&shared.tile[i], source + i);
//   CommitCopies();
//   ... work on something else ...
//   WaitForCopies<0>();     // this thread's copies have arrived; a block barrier makes the others' visible
#ifndef DSV4_RUNTIME_ASYNC_COPY_CUH_
#define DSV4_RUNTIME_ASYNC_COPY_CUH_

#include <cstdint>

namespace dsv4 {

// 16 bytes, both addresses a multiple of 16. Past L1: for data that the block reads once.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_ASYNC_COPY_CUH_
