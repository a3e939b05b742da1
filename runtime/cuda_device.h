// The CUDA backend. Ops reach it through device.h and launch.cuh; this header is for what deals in CUDA streams: the
// launch layer, graph capture, tests and benchmarks.
#ifndef DSV4_RUNTIME_CUDA_DEVICE_H_
#define DSV4_RUNTIME_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "runtime/device.h"

namespace dsv4 {

// Unavailable, saying why, without a driver, a GPU, or compute capability 9.0.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice();

// Of a stream whose device is a CUDA device.
cudaStream_t CudaStreamOf(Stream& stream);

// Memory for the intermediate results of what is enqueued on this stream, and for nothing else: work on different
// streams may run at once. Allocated at the first call, which must be outside a capture (FailedPrecondition otherwise).
inline constexpr int64_t kCudaWorkspaceBytes = int64_t{32} << 20;
absl::StatusOr<void*> CudaWorkspaceOf(Stream& stream);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_CUDA_DEVICE_H_
