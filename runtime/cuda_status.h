// CUDA errors as absl::Status.
//
//   DSV4_RETURN_IF_CUDA_ERROR("copy to device", cudaMemcpyAsync(...));
//     -> "copy to device: cudaErrorInvalidValue: invalid argument"
#ifndef DSV4_RUNTIME_CUDA_STATUS_H_
#define DSV4_RUNTIME_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

#define DSV4_RETURN_IF_CUDA_ERROR(what, call)                                                              \
  do {                                                                                                     \
    if (const cudaError_t dsv4_error = (call); dsv4_error != cudaSuccess) return ::dsv4::CudaStatus(what, dsv4_error); \
  } while (false)

namespace dsv4 {

// `what` names the op or call. ResourceExhausted for lack of memory, Unavailable for lack of a usable device or
// driver, Internal for the rest. Clears the runtime's last error, so that it is not reported a second time.
absl::Status CudaStatus(std::string_view what, cudaError_t error);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_CUDA_STATUS_H_
