// The CUDA half of the op. Record calls it.
#ifndef DSV4_OPS_TOP_K_TOP_K_CUDA_H_
#define DSV4_OPS_TOP_K_TOP_K_CUDA_H_

#include "absl/status/status.h"
#include "ops/top_k/top_k.h"
#include "runtime/stream.h"

namespace dsv4::top_k {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::top_k

#endif  // DSV4_OPS_TOP_K_TOP_K_CUDA_H_
