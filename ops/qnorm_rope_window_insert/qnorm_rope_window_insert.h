// Query: RMS norm of each head (no weight), then rotary embedding, in place.
// Window: rotary embedding of the (already normed) latent row, quantised and inserted into its page.
//
// Contract
//   q[i][h] = q * rsqrt(mean(q^2) + eps), its last dr channels rotated by the row's position; fp32, one rounding to q's type.
//   The kv row's last dr channels are rotated in fp32, then the row is stored in the cache's format (rounded to bf16
//   first in every format but f32). kv is not modified.
//   slots[i] < 0: row i reads and writes nothing, neither q nor the cache.
//   Two rows must not have the same slot.
//   Reads before the wait: cos_sin.
// Source: specification, sections 3.1, 3.2, 4.4, 5.6, and 11 item 5.
#ifndef DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_H_
#define DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_H_

#include "absl/status/status.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::qnorm_rope_window_insert {

struct Params {
  TensorView q;          // in and out, f32|bf16 [N, H, d]
  TensorView kv;         // f32|bf16 [N, d]
  TensorView slots;      // i64 [N], into `window`
  TensorView positions;  // i64 [N]
  WeightView cos_sin;    // f32 [max positions, dr]: dr/2 cosines, then dr/2 sines
  float eps = 0.0f;
  PagedRows window;      // rows of d channels, dr of them rotary
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::qnorm_rope_window_insert

#endif  // DSV4_OPS_QNORM_ROPE_WINDOW_INSERT_H_
