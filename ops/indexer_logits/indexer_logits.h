// Scores every visible entry of a row's request: score(j) = sum_h weights[h] * max(q_h . k_j, 0).
//
// Contract
//   For each row i and 0 <= j < counts[i], logits[i][j] is written; columns at or past the count are not. fp32
//   throughout.
//   Key j of the request is at slot
//   block_table[request][(j / rows_per_page) % blocks] * rows_per_page + j % rows_per_page.
//   A row with a count of 0 (every pad) reads no key and writes nothing.
//   Reads before the wait: nothing.
// Source: specification, sections 6.1, 6.3, 6.4, and 11 item 13.
#ifndef DSV4_OPS_INDEXER_LOGITS_H_
#define DSV4_OPS_INDEXER_LOGITS_H_

#include "absl/status/status.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::indexer_logits {

struct Params {
  TensorView q_values;     // as indexer_query's out_values, in the format of `keys`
  TensorView q_scales;     // kMxfp4Key only: e8m0 [N, Hi, di / 32]
  TensorView weights;      // f32 [N, Hi]: indexer_query's out_weights
  PagedRows keys;          // rows of di channels
  TensorView block_table;  // i32 [R, blocks]
  TensorView requests;     // i32 [N]
  TensorView counts;       // i32 [N], visible entries; <= the width of logits
  TensorView logits;       // out, f32 [N, width]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::indexer_logits

#endif  // DSV4_OPS_INDEXER_LOGITS_H_
