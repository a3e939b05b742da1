// Attention of each query row over two lists of cached rows, window rows and compressed entries, as one softmax with a
// sink. A cached row is key and value at once, so the output's rotary channels still need the inverse rotation.
//
// Contract
//   A = valid slots of window_slots[i], then of entry_slots[i]. A slot is invalid if negative, wherever it stands, or
//   if it is at or past the list's length (where lengths are given). Invalid rows are not read.
//   s = scale * (q_h . k); m = max s; lse = m + ln sum exp(s - m), the sink not included;
//   out = sum exp(s - m) k / (sum exp(s - m) + exp(sink_h - m)).
//   The sink carries no value and takes no part in the maximum; -inf disables it, +inf gives 0.
//   A row with nothing valid (every pad): out = 0, lse = +inf.
//   Products and softmax in fp32. With bf16 q, exp(s - m) is rounded to bf16 before it multiplies the values (the
//   denominator sums it unrounded), with m the row's maximum. out is rounded once.
//   Reads before the wait: the sink.
// Source: specification, section 7, and 11 item 14.
#ifndef DSV4_OPS_SPARSE_ATTENTION_H_
#define DSV4_OPS_SPARSE_ATTENTION_H_

#include "absl/status/status.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::sparse_attention {

struct Params {
  TensorView q;                // f32|bf16 [N, H, d]
  PagedRows window;            // rows of d channels
  TensorView window_slots;     // i32 [N, window width]
  TensorView window_lengths;   // i32 [N], or empty: the whole width
  PagedRows entries;           // rows of d channels; pages empty for a layer without entries
  TensorView entry_slots;      // i32 [N, entry width], or empty
  TensorView entry_lengths;    // i32 [N], or empty: the whole width
  WeightView sink;             // f32 [H]
  float scale = 0.0f;
  TensorView out;              // f32|bf16 [N, H, d]
  TensorView lse;              // out, f32 [N, H]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_H_
