// The input of a multi-token-prediction block: the projected embedding of the next token, added to each projected
// residual stream: out[i][a] = e[i] + h[i][a].
//
// Contract
//   fp32 sums, rounded once to out's type. Every row is processed, pads too. h and out may be the same view.
//   Reads before the wait: nothing.
// Source: specification, section 10.3.
#ifndef DSV4_OPS_MTP_INPUT_H_
#define DSV4_OPS_MTP_INPUT_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::mtp_input {

struct Params {
  TensorView e;    // f32|bf16 [N, D]
  TensorView h;    // f32|bf16 [N, M, D]
  TensorView out;  // f32|bf16 [N, M, D]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::mtp_input

#endif  // DSV4_OPS_MTP_INPUT_H_
