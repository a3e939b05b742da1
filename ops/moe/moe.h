// Mixture of experts with one shared expert: routing (by score, or by a table from token to experts), the experts'
// SwiGLU, and their weighted sum.
//
// Contract
//   s = sqrt(softplus(gate x)) in fp32. Experts of a row: expert_table[token], or the top k of s + bias (of equal sums
//   the lower index; a NaN ranks as -inf, so that every row gets k different experts). weight_e = s_e / sum of the
//   chosen s * routed_scaling_factor; the bias only selects.
//   expert: g = min(w1 x, limit), u = clamp(w3 x, -limit, limit), h = silu(g) * u * weight_e, y_e = w2 h. The shared
//   expert has weight 1. out = sum of y_e in the order of choice (fp32), plus the shared expert's, rounded once.
//   With bf16 x: w1 x, w3 x, w2 h and h are each rounded to bf16. quantize_activations: the inputs of w1, w3 and w2 are
//   quantised as in `linear` (the gate's is not).
//   expert_ids lists the choice: by table in the table's order, by score in descending order of s + bias.
//   Every row is processed, pads too (their token is 0). On CUDA, too, a row's bits depend on that row alone.
//   scratch holds what the CUDA kernels hand to each other; what it holds afterwards is unspecified. The CPU leaves it alone.
//   Reads before the wait: weights, bias, table.
// Source: specification, section 10.2, and 11 items 15 and 16.
#ifndef DSV4_OPS_MOE_H_
#define DSV4_OPS_MOE_H_

#include <cstdint>

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/arena.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::moe {

struct ExpertWeights {
  QuantizedWeight w1;  // gate,  [I, D]
  QuantizedWeight w3;  // up,    [I, D]
  QuantizedWeight w2;  // down,  [D, I]
};

// C = N * k choices, each a row and one of its experts; at most S = min(E, C) experts are chosen.
struct Scratch {
  TensorView scores;        // f32 [N, E]
  TensorView expert_slots;  // i32 [S, 3]: the chosen experts in ascending order, with their part of `choices`; then -1
  TensorView choices;       // i32 [C]: by expert, in ascending order
  TensorView gate;          // x's type [C, I]: w1 x, then h
  TensorView up;            // x's type [C, I]: w3 x
  TensorView routed;        // x's type [C, D]: w2 h
  TensorView shared_gate;   // x's type [N, Is]: the same of the shared expert
  TensorView shared_up;     // x's type [N, Is]
  TensorView shared_out;    // x's type [N, D]

  struct Sizes {
    int64_t rows = 0;          // N
    int64_t channels = 0;      // D
    int64_t experts = 0;       // E
    int64_t chosen = 0;        // k
    int64_t inner = 0;         // I
    int64_t shared_inner = 0;  // Is
    DType dtype = DType::kF32;  // of x
  };
  static Scratch LayOut(Arena& arena, const Sizes& sizes);
  // For a step with fewer rows. The scratch has at least one.
  Scratch FirstRows(int64_t rows) const;
};

struct Params {
  TensorView x;             // f32|bf16 [N, D]
  QuantizedWeight gate;     // [E, D]
  WeightView bias;          // f32 [E]; empty if expert_table is given
  WeightView expert_table;  // i32 [V, k]; empty if bias is given
  TensorView row_tokens;    // i32 [N]; used with expert_table
  ExpertWeights experts;    // stacks: [E, I, D], [E, I, D], [E, D, I]
  ExpertWeights shared;
  float routed_scaling_factor = 1.0f;
  float swiglu_limit = 0.0f;  // > 0; infinity does not limit
  bool quantize_activations = false;
  Scratch scratch;
  TensorView expert_ids;      // out, i32 [N, k]
  TensorView expert_weights;  // out, f32 [N, k]
  TensorView out;             // f32|bf16 [N, D]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::moe

#endif  // DSV4_OPS_MOE_H_
