// The CUDA half of the op. Record calls it.
#ifndef DSV4_OPS_LM_HEAD_LM_HEAD_CUDA_H_
#define DSV4_OPS_LM_HEAD_LM_HEAD_CUDA_H_

#include "absl/status/status.h"
#include "ops/lm_head/lm_head.h"
#include "runtime/stream.h"

namespace dsv4::lm_head {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::lm_head

#endif  // DSV4_OPS_LM_HEAD_LM_HEAD_CUDA_H_
