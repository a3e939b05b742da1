// The CUDA half of the op's rotation; its products run as `linear`. Record calls it.
#ifndef DSV4_OPS_OUTPUT_PROJECTION_OUTPUT_PROJECTION_CUDA_H_
#define DSV4_OPS_OUTPUT_PROJECTION_OUTPUT_PROJECTION_CUDA_H_

#include "absl/status/status.h"
#include "ops/output_projection/output_projection.h"
#include "runtime/stream.h"

namespace dsv4::output_projection {

// `params` must have passed Validate.
absl::Status RecordRotationCuda(Stream& stream, const Params& params);

}  // namespace dsv4::output_projection

#endif  // DSV4_OPS_OUTPUT_PROJECTION_OUTPUT_PROJECTION_CUDA_H_
