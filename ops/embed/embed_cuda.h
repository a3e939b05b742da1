// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_EMBED_EMBED_CUDA_H_
#define DSV4_OPS_EMBED_EMBED_CUDA_H_

#include "absl/status/status.h"
#include "ops/embed/embed.h"
#include "runtime/stream.h"

namespace dsv4::embed {

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::embed

#endif  // DSV4_OPS_EMBED_EMBED_CUDA_H_
