// The indexer's query side: rotary embedding, optional Hadamard rotation and quantisation of each head's query, and the
// scaling of the head weights.
//
// Contract
//   The last dr channels of q[i][h] are rotated by the row's position; q is rounded to its own type; Hadamard if asked,
//   rounded again.
//   The format follows the key cache's:
//     kF32, kBf16: out_values f32|bf16 [N, Hi, di]; out_weights = w * di^-1/2 * Hi^-1/2
//     kFp8Key    : out_values e4m3 [N, Hi, di], one power-of-two scale per head, folded into out_weights
//     kMxfp4Key  : out_values e2m1x2 [N, Hi, di / 2], out_scales e8m0 [N, Hi, di / 32]; out_weights as for kF32
//   Every row is processed, pads too. q is not modified.
//   Reads before the wait: cos_sin.
// Source: specification, sections 6.1 to 6.3, and 11 items 2 and 17.
#ifndef DSV4_OPS_INDEXER_QUERY_H_
#define DSV4_OPS_INDEXER_QUERY_H_

#include "absl/status/status.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::indexer_query {

struct Params {
  TensorView q;          // f32|bf16 [N, Hi, di]
  TensorView weights;    // f32 [N, Hi]
  TensorView positions;  // i64 [N]
  WeightView cos_sin;    // f32 [max positions, dr]
  bool hadamard = false;
  RowFormat format = RowFormat::kFp8Key;
  TensorView out_values;   // see above
  TensorView out_scales;   // kMxfp4Key only
  TensorView out_weights;  // f32 [N, Hi]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::indexer_query

#endif  // DSV4_OPS_INDEXER_QUERY_H_
