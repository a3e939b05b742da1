// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_SAMPLE_SAMPLE_CUDA_H_
#define DSV4_OPS_SAMPLE_SAMPLE_CUDA_H_

#include "absl/status/status.h"
#include "ops/sample/sample.h"
#include "runtime/stream.h"

namespace dsv4::sample {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::sample

#endif  // DSV4_OPS_SAMPLE_SAMPLE_CUDA_H_
