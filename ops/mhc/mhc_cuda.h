// The CUDA half of the ops, which Record calls.
#ifndef DSV4_OPS_MHC_MHC_CUDA_H_
#define DSV4_OPS_MHC_MHC_CUDA_H_

#include "absl/status/status.h"
#include "ops/mhc/mhc.h"
#include "runtime/stream.h"

namespace dsv4::mhc {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const PreParams& params);
absl::Status RecordCuda(Stream& stream, const PostParams& params);
absl::Status RecordCuda(Stream& stream, const HeadParams& params);

}  // namespace dsv4::mhc

#endif  // DSV4_OPS_MHC_MHC_CUDA_H_
