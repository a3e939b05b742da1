// Checked mode in kernels; slot_check.h explains.
#ifndef DSV4_RUNTIME_SLOT_CHECK_CUH_
#define DSV4_RUNTIME_SLOT_CHECK_CUH_

#include "runtime/slot_check.h"

namespace dsv4 {

// Whether `row` may be written through its slot; reports it if not. A barrier: every thread of the block calls this,
// with the same row.
__device__ inline bool BlockAcceptsSlot(const SlotCheck& check, int64_t row) {
  const SlotProblem problem = FindSlotProblem(check, row, threadIdx.x, blockDim.x);
  const bool past_cache = problem == SlotProblem::kPastCache;
  if (!__syncthreads_or(problem != SlotProblem::kNone)) return true;
  if (threadIdx.x == 0) {
    while (atomicCAS(&check.report->lock, 0, 1) != 0) {
    }
    __threadfence();
    KeepFirst(check, row, past_cache ? SlotProblem::kPastCache : SlotProblem::kRepeated);
    __threadfence();
    atomicExch(&check.report->lock, 0);
  }
  return false;
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_SLOT_CHECK_CUH_
