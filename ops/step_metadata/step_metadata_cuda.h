// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_STEP_METADATA_CUDA_H_
#define DSV4_OPS_STEP_METADATA_CUDA_H_

#include "absl/status/status.h"
#include "ops/step_metadata/step_metadata.h"
#include "runtime/stream.h"

namespace dsv4::step_metadata {

// `params` must have passed Validate. One launch for up to 8 groups and 8 visible lists, more launches for more.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::step_metadata

#endif  // DSV4_OPS_STEP_METADATA_CUDA_H_
