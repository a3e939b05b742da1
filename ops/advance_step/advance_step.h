// The last op of a looped step: turns this step's rows into the next step's, on the device, one row a request.
//
// Contract, for each row i with requests[i] = r >= 0 (a pad is left as it is):
//   t = next_tokens[i] is output: outputs[r][output_counts[r]] = t if there is room, output_counts[r] += 1,
//   remaining[r] -= 1.
//   The request is finished if remaining[r] is now 0 or less, or if t == eos_token, the request does not ignore it
//   (ignore_eos[r] == 0), and t was not forced.
//   A finished row becomes a pad (requests[i] = -1). Otherwise token_ids[i] = t, positions[i] += 1, and
//   next_tokens[i] = forced[r][output_counts[r]], or -1 ("sample it") past the end of `forced` or if that is -1.
//   live_rows[0] = the number of rows that are not pads afterwards: the loop's continue flag.
//   A token was forced if forced[r][output_counts[r] before] >= 0.
//   Reads before the wait: nothing.
// Source: design, definitions (stop conditions).
#ifndef DSV4_OPS_ADVANCE_STEP_H_
#define DSV4_OPS_ADVANCE_STEP_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::advance_step {

struct Params {
  TensorView requests;     // in and out, i32 [N]; no request twice
  TensorView token_ids;    // in and out, i32 [N]
  TensorView positions;    // in and out, i64 [N]
  TensorView next_tokens;  // in and out, i32 [N]; filled by `sample`

  TensorView remaining;   // in and out, i32 [R]: tokens still to output
  TensorView ignore_eos;  // u8 [R]
  TensorView forced;      // i32 [R, F], -1: not forced; may be empty
  int32_t eos_token = -1;  // < 0: none

  TensorView outputs;        // out, i32 [R, capacity]
  TensorView output_counts;  // in and out, i32 [R]
  TensorView live_rows;      // out, i32 [1]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::advance_step

#endif  // DSV4_OPS_ADVANCE_STEP_H_
