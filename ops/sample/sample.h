// Draws the next token of each row that wants one, from its logits: greedy, or at a temperature.
//
// Contract
//   For each l with rows[l] = i >= 0: temperature 0 takes the largest logit, of equal ones the lowest token. Otherwise the
//   token is the inverse CDF, in order of token id, of softmax(logits / temperature) at u = (word 0 of Philox4x32-10) in [0, 1),
//   with key = seed and counter = (request id, position of the token drawn), so a draw does not depend on the batch.
//   Weights are exp((logit - largest) / temperature) in fp32, their sums fp64; the token is the first whose running sum
//   exceeds u times the total. If the largest logit is infinite, it and its equals share all probability.
//   NaN logits have probability 0 and are never chosen; if all are NaN, token 0 is.
//   tokens[l] gets the token; next_tokens[i] gets it too unless next_tokens[i] is already >= 0 (a forced or known token).
//   rows[l] < 0: nothing is read or written for l.
//   Philox: key words = low and high half of the seed; counter words = low and high half of the request id, then of the
//   position; u = (word 0 >> 8) * 2^-24. The position of the token drawn is positions[i] + 1.
//   Reads before the wait: nothing.
// Source: design, definitions; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#ifndef DSV4_OPS_SAMPLE_H_
#define DSV4_OPS_SAMPLE_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::sample {

struct Params {
  TensorView logits;        // f32 [L, V]
  TensorView rows;          // i32 [L]
  TensorView positions;     // i64 [N], of the rows' input tokens
  TensorView temperatures;  // f32 [L], >= 0
  TensorView seeds;         // i64 [L]
  TensorView request_ids;   // i64 [L]
  TensorView tokens;        // out, i32 [L]
  TensorView next_tokens;   // in and out, i32 [N]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

// Ten rounds of Philox4x32.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

}  // namespace dsv4::sample

#endif  // DSV4_OPS_SAMPLE_H_
