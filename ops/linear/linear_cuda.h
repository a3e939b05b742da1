// The CUDA half of the op. Record calls it.
#ifndef DSV4_OPS_LINEAR_LINEAR_CUDA_H_
#define DSV4_OPS_LINEAR_LINEAR_CUDA_H_

#include "absl/status/status.h"
#include "ops/linear/linear.h"
#include "runtime/stream.h"

namespace dsv4::linear {

// `params` must have passed Validate. With more than 64 rows of bf16 and a bf16 weight the first call of its shape must
// be outside a capture (runtime/cublaslt.h).
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::linear

#endif  // DSV4_OPS_LINEAR_LINEAR_CUDA_H_
