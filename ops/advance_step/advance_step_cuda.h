// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_ADVANCE_STEP_ADVANCE_STEP_CUDA_H_
#define DSV4_OPS_ADVANCE_STEP_ADVANCE_STEP_CUDA_H_

#include "absl/status/status.h"
#include "ops/advance_step/advance_step.h"
#include "runtime/stream.h"

namespace dsv4::advance_step {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::advance_step

#endif  // DSV4_OPS_ADVANCE_STEP_ADVANCE_STEP_CUDA_H_
