// The output head: logits = W x in fp32, for the gathered (already normed) rows that want them.
//
// Contract
//   logits[l] = W x[l] for every l with rows[l] >= 0; other rows of logits are not written. The weights and x are
//   used as fp32; nothing is quantised.
//   Reads before the wait: the weight.
// Source: specification, section 10.3.
#ifndef DSV4_OPS_LM_HEAD_H_
#define DSV4_OPS_LM_HEAD_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::lm_head {

struct Params {
  TensorView x;            // f32|bf16 [L, D]
  TensorView rows;         // i32 [L]; only the sign is used
  QuantizedWeight weight;  // [V, D]
  TensorView logits;       // out, f32 [L, V]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::lm_head

#endif  // DSV4_OPS_LM_HEAD_H_
