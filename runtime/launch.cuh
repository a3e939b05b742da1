// How an op launches a kernel: it describes the kernel as a type, and Launch does the rest.
//
//   struct ScaleRows {
//     static constexpr char kName[] = "scale_rows";       // for messages
//     static constexpr int kThreads = 256;                // threads in a block
//     struct Weights { WeightPointer<float> scale; };     // WeightPointer members and sizes, nothing else
//     struct Params { const float* x; float* out; int64_t columns; };
//     // Before the wait: the predecessor may still be running. Sees weights only, and writes nothing.
//     static __device__ void Prefetch(const Weights& weights) { weights.scale.PrefetchToL2(threadIdx.x * 32); }
//     // After the wait. Every thread of the grid gets here.
//     static __device__ void Run(const Weights& weights, const Params& params) { ... }
//   };
//   return Launch<ScaleRows>(stream, {.x = rows}, weights, params);
//
// Optional members: kMinBlocksPerMultiprocessor (a register cap), kTrigger (see below). What Prefetch returns, if
// anything, is handed to Run as a third argument: weights held in registers across the wait.
//
// The kernel waits by construction: no op can return, read or write before the wait. Its code is loaded by WarmUp
// (warmup.h) without the op doing anything.
#ifndef DSV4_RUNTIME_LAUNCH_CUH_
#define DSV4_RUNTIME_LAUNCH_CUH_

#include <type_traits>

#include "runtime/launch.h"
#include "runtime/pdl.cuh"
#include "runtime/warmup.h"
#include "runtime/weight_pointer.cuh"

namespace dsv4 {

// When a kernel lets its dependents be scheduled; they wait for its completion in either case. Early gives them more
// time to prefetch and costs room on the multiprocessors.
enum class Trigger { kAfterWait, kBeforeWait };

namespace launch_internal {

template <class Op>
constexpr Trigger TriggerOf() {
  if constexpr (requires { Op::kTrigger; }) {
    return Op::kTrigger;
  } else {
    return Trigger::kAfterWait;
  }
}

template <class Op>
constexpr int MinBlocksOf() {
  if constexpr (requires { Op::kMinBlocksPerMultiprocessor; }) {
    return Op::kMinBlocksPerMultiprocessor;
  } else {
    return 1;
  }
}

__device__ __forceinline__ void WaitAndTrigger(Trigger trigger) {
  if (trigger == Trigger::kBeforeWait) pdl::Trigger();
  pdl::Wait();
  if (trigger == Trigger::kAfterWait) pdl::Trigger();
}

template <class Op>
__global__ void __launch_bounds__(Op::kThreads, MinBlocksOf<Op>())
    Kernel(const __grid_constant__ typename Op::Weights weights, const __grid_constant__ typename Op::Params params) {
  if constexpr (std::is_void_v<decltype(Op::Prefetch(weights))>) {
    Op::Prefetch(weights);
    WaitAndTrigger(TriggerOf<Op>());
    Op::Run(weights, params);
  } else {
    const auto prefetched = Op::Prefetch(weights);
    WaitAndTrigger(TriggerOf<Op>());
    Op::Run(weights, params, prefetched);
  }
}

template <class Op>
const void* KernelAddress() {
  return reinterpret_cast<const void*>(&Kernel<Op>);
}

// Registers every kernel that Launch is instantiated for, before main.
template <class Op>
inline const WarmupRegistration kWarmup{Op::kName, [](Device&) { return LoadKernel(Op::kName, KernelAddress<Op>()); }};

}  // namespace launch_internal

template <class Op>
absl::Status Launch(Stream& stream, const Grid& grid, const typename Op::Weights& weights,
                    const typename Op::Params& params, int64_t shared_bytes = 0) {
  static_assert(std::is_trivially_copyable_v<typename Op::Weights> && std::is_trivially_copyable_v<typename Op::Params>);
  (void)&launch_internal::kWarmup<Op>;
  void* arguments[] = {const_cast<typename Op::Weights*>(&weights), const_cast<typename Op::Params*>(&params)};
  return LaunchKernel(Op::kName, stream, launch_internal::KernelAddress<Op>(), grid, Op::kThreads, shared_bytes,
                      arguments);
}

// Loads the kernel that Launch<Op> would launch.
template <class Op>
absl::Status Load() {
  return LoadKernel(Op::kName, launch_internal::KernelAddress<Op>());
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_LAUNCH_CUH_
