// From attention's output to the layer's: inverse rotary embedding, then the grouped low-rank product wo_a, then wo_b.
//
// Contract
//   rotated = o with the last dr channels of each head rotated back by the row's position (fp32, rounded to rotated's
//   type).
//   low_rank = wo_a in G groups over rotated viewed as [N, G, (H/G) * d], rounded to its type; wo_a's input is never
//   quantised. out = wo_b low_rank; with quantize_activations its input is quantised as in `linear`.
//   Every row is processed, pads too.
//   Reads before the wait: cos_sin and the weights.
// Source: specification, section 8, and 11 item 8.
#ifndef DSV4_OPS_OUTPUT_PROJECTION_H_
#define DSV4_OPS_OUTPUT_PROJECTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::output_projection {

struct Params {
  TensorView o;           // f32|bf16 [N, H, d]
  TensorView positions;   // i64 [N]
  WeightView cos_sin;     // f32 [max positions, dr]
  QuantizedWeight wo_a;   // [G * Ro, (H/G) * d]
  int64_t groups = 1;     // G
  QuantizedWeight wo_b;   // [D, G * Ro]
  bool quantize_activations = false;
  TensorView rotated;     // scratch, f32|bf16 [N, H, d], contiguous
  TensorView low_rank;    // scratch, f32|bf16 [N, G * Ro]
  TensorView out;         // f32|bf16 [N, D]
};

absl::Status Validate(const Params& params);
// Records three ops: the rotation and two products.
absl::Status Record(Stream& stream, const Params& params);
// The first of the three; the products run as `linear`.
void RunRotationCpu(const Params& params);

}  // namespace dsv4::output_projection

#endif  // DSV4_OPS_OUTPUT_PROJECTION_H_
