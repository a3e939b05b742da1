// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_RMS_NORM_RMS_NORM_CUDA_H_
#define DSV4_OPS_RMS_NORM_RMS_NORM_CUDA_H_

#include "absl/status/status.h"
#include "ops/rms_norm/rms_norm.h"
#include "runtime/stream.h"

namespace dsv4::rms_norm {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::rms_norm

#endif  // DSV4_OPS_RMS_NORM_RMS_NORM_CUDA_H_
