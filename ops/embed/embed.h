// Looks up token embeddings, into one or several copies (the residual streams of mHC all start from the embedding).
//
// Contract
//   out[i][c] = table[token_ids[i]] for every copy c, converted to out's type.
//   A row with a token < 0 is neither read nor written. A token >= V is a fault of the caller (tokens are checked on
//   the host).
//   Reads before the wait: the table (not its rows: those depend on the tokens).
// Source: specification, section 10.1.
#ifndef DSV4_OPS_EMBED_H_
#define DSV4_OPS_EMBED_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::embed {

struct Params {
  TensorView token_ids;  // i32 [N]
  WeightView table;      // f32|bf16 [V, D]
  TensorView out;        // f32|bf16 [N, copies, D]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::embed

#endif  // DSV4_OPS_EMBED_H_
