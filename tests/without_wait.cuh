// Launches an op's kernel without the wait that the launch layer gives it: the fault that tests of waits must find.
#ifndef DSV4_TESTS_WITHOUT_WAIT_CUH_
#define DSV4_TESTS_WITHOUT_WAIT_CUH_

#include <type_traits>

#include "runtime/launch.cuh"

namespace dsv4 {

template <class Op>
__global__ void __launch_bounds__(Op::kThreads)
    KernelWithoutWait(const __grid_constant__ typename Op::Weights weights,
                      const __grid_constant__ typename Op::Params params) {
  pdl::Trigger();
  if constexpr (std::is_void_v<decltype(Op::Prefetch(weights))>) {
    Op::Run(weights, params);
  } else {
    Op::Run(weights, params, Op::Prefetch(weights));
  }
}

template <class Op>
absl::Status LaunchWithoutWait(Stream& stream, const Grid& grid, const typename Op::Weights& weights,
                               const typename Op::Params& params) {
  void* arguments[] = {const_cast<typename Op::Weights*>(&weights), const_cast<typename Op::Params*>(&params)};
  return LaunchKernel(Op::kName, stream, reinterpret_cast<const void*>(&KernelWithoutWait<Op>), grid, Op::kThreads,
                      /*shared_bytes=*/0, arguments);
}

}  // namespace dsv4

#endif  // DSV4_TESTS_WITHOUT_WAIT_CUH_
