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
//   Products and softmax in fp32, by powers of two: a weight is 2^(s / ln 2 - M), with M the maximum of s / ln 2 rounded up
//   to an integer. With bf16 q a weight is rounded to bf16 before it multiplies the values (the denominator sums it
//   unrounded). Since M is an integer that is a rounding to 8 bits whatever M is, so in which order and in how many parts
//   a list is taken changes the order of sums only. out is rounded once.
//   CUDA takes a row's list (its window rows, then its entries, up to their lengths) in split_out's number of splits at
//   most, each by blocks of its own, and adds them up in order; without split_out in one. A row's bits depend on that
//   number and on the row alone. The number that is fast depends on the number of rows (split_plan.h), and so do the bits
//   of a run in bf16 on the bucket: a fixed one would cost more than 10 %. Tensor cores serve bf16 q with fp8 or bf16 rows of 512 channels, 64 of them
//   rotary, where pointers and strides are multiples of 16 bytes; all else is plain and slower, up to 1792 channels.
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
  TensorView split_out;        // scratch, f32 [N, splits, H, d], or empty; the CPU leaves it alone
  TensorView split_sums;       // scratch, f32 [N, splits, H, 2], or empty; likewise
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_H_
