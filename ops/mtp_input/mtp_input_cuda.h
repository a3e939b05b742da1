// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_MTP_INPUT_MTP_INPUT_CUDA_H_
#define DSV4_OPS_MTP_INPUT_MTP_INPUT_CUDA_H_

#include "absl/status/status.h"
#include "ops/mtp_input/mtp_input.h"
#include "runtime/stream.h"

namespace dsv4::mtp_input {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::mtp_input

#endif  // DSV4_OPS_MTP_INPUT_MTP_INPUT_CUDA_H_
