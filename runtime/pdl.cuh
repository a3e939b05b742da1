// The two device halves of programmatic dependent launch, and the only place that may name griddepcontrol.
//
// Kernels do not call these: the wrapper in launch.cuh does, once, in every thread. Both clobber memory, so that the
// compiler moves no access across them (the CUDA headers' own trigger does not). There is no architecture guard: below
// sm_90 a kernel that waits does not compile, instead of silently not waiting.
#ifndef DSV4_RUNTIME_PDL_CUH_
#define DSV4_RUNTIME_PDL_CUH_

namespace dsv4::pdl {

// Returns when every grid that this one depends on has completed and its writes are visible; at once if there is none.
__device__ __forceinline__ void Wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the grids that depend on this one be scheduled, once every block has triggered or exited. It publishes nothing.
__device__ __forceinline__ void Trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace dsv4::pdl

#endif  // DSV4_RUNTIME_PDL_CUH_
