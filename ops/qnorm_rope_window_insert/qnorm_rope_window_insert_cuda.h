// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_CUDA_H_
#define DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_CUDA_H_

#include "absl/status/status.h"
#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert.h"
#include "runtime/stream.h"

namespace dsv4::qnorm_rope_window_insert {

// `params` must have passed Validate. Heads of 512 channels, 64 of them rotary, in rows that allow 16-byte accesses have
// a kernel of their own.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::qnorm_rope_window_insert

#endif  // DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_CUDA_H_
