// The CUDA half of the op. Record calls it.
#ifndef DSV4_OPS_MOE_MOE_CUDA_H_
#define DSV4_OPS_MOE_MOE_CUDA_H_

#include "absl/status/status.h"
#include "ops/moe/moe.h"
#include "runtime/stream.h"

namespace dsv4::moe {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::moe

#endif  // DSV4_OPS_MOE_MOE_CUDA_H_
