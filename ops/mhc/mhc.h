// mHC: the M residual streams around each sublayer, mixed by coefficients that depend on the streams.
// Three ops: `pre` (streams -> the sublayer's input, and this sublayer's mixing coefficients), `post` (the sublayer's
// output back into the streams) and `head` (streams -> the single row that the output head reads).
//
// Contract
//   v = flatten(X) in fp32; m = (fn v) * rsqrt(mean(v^2) + rms_eps).
//   pre : in_a = sigmoid(m[a] * scale[0] + base[a]) + hc_eps;  out = sum_a in_a X_a
//         post_a = 2 sigmoid(m[M + a] * scale[1] + base[M + a])
//         C = softmax over b of (m[2M + M a + b] * scale[2] + base[2M + M a + b]), + hc_eps, then Sinkhorn: columns
//         (over a) once, then (sinkhorn_iters - 1) times rows (over b) and columns; each divisor + hc_eps.
//   post: out_b = post_b * y + sum_a C[a][b] X_a   (over the FIRST index). X and out may be the same view.
//   head: out = sum_a (sigmoid(m[a] * scale[0] + base[a]) + hc_eps) X_a, of the rows named by `rows` (row l of out is
//         row rows[l] of X; rows[l] < 0: row l of out is not written); without `rows` of all.
//   fp32 throughout; out rounded once to its type. pre and post process every row, pads too.
//   Reads before the wait: fn, scale, base.
// Source: specification, sections 10.1, 10.3, and 11 item 19.
#ifndef DSV4_OPS_MHC_H_
#define DSV4_OPS_MHC_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::mhc {

struct PreParams {
  TensorView streams;  // f32|bf16 [N, M, D]
  WeightView fn;       // f32 [2M + M*M, M*D]
  WeightView scale;    // f32 [3]
  WeightView base;     // f32 [2M + M*M]
  float rms_eps = 0.0f;
  float hc_eps = 0.0f;
  int64_t sinkhorn_iters = 0;
  TensorView out;   // f32|bf16 [N, D]
  TensorView post;  // out, f32 [N, M]
  TensorView comb;  // out, f32 [N, M, M]: C[a][b]
};

struct PostParams {
  TensorView streams;  // f32|bf16 [N, M, D]
  TensorView y;        // f32|bf16 [N, D]
  TensorView post;     // f32 [N, M]
  TensorView comb;     // f32 [N, M, M]
  TensorView out;      // f32|bf16 [N, M, D]
};

struct HeadParams {
  TensorView streams;  // f32|bf16 [N, M, D]
  TensorView rows;     // i32 [L], or empty: L = N, all rows
  WeightView fn;       // f32 [M, M*D]
  WeightView scale;    // f32 [1]
  WeightView base;     // f32 [M]
  float rms_eps = 0.0f;
  float hc_eps = 0.0f;
  TensorView out;      // f32|bf16 [L, D]
};

absl::Status Validate(const PreParams& params);
absl::Status Validate(const PostParams& params);
absl::Status Validate(const HeadParams& params);
absl::Status Record(Stream& stream, const PreParams& params);
absl::Status Record(Stream& stream, const PostParams& params);
absl::Status Record(Stream& stream, const HeadParams& params);
void RunCpu(const PreParams& params);
void RunCpu(const PostParams& params);
void RunCpu(const HeadParams& params);

}  // namespace dsv4::mhc

#endif  // DSV4_OPS_MHC_H_
