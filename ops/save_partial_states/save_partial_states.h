// Saves each token's contribution to its compression window: writes the row [kv | score + ape[position % ratio]] into the
// paged state cache, from which a later token at a boundary pools the rows into one compressed entry.
//
// Contract
//   For each token i with slots[i] >= 0, at block slots[i] / block_size, row slots[i] % block_size:
//     columns [0, head_size)                         = kv[i]
//     columns [state_width, state_width + head_size) = score[i] + ape[positions[i] % ratio]     in fp32
//   Every other column and row keeps its bits. bf16 inputs are converted exactly; a bf16 cache takes one rounding.
//   slots[i] < 0 (a pad): nothing of row i is read but the slot, nothing is written, whatever its inputs hold.
//   Two live rows must not have the same slot. In checked mode (runtime/slot_check.h) a row whose slot an earlier row has
//   too, or is past the cache, is reported instead of written.
//   kv and score may be two halves of one projection (row strides are free). The cache's block and row strides are free.
//   Sizes, strides and alignment change the speed only: the published model's have kernels of their own (compile_key.h).
//   Reads before the wait: ape. Triggers after it.
// Source: specification, section 5.4.
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_H_
#define DSV4_OPS_SAVE_PARTIAL_STATES_H_

#include "absl/status/status.h"
#include "runtime/slot_check.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::save_partial_states {

struct Params {
  TensorView kv;           // f32|bf16 [N, head_size]
  TensorView score;        // as kv
  WeightView ape;          // f32 [ratio, head_size]
  TensorView positions;    // i64 [N], >= 0 for live rows
  TensorView slots;        // i64 [N]
  TensorView state_cache;  // out, f32|bf16 [blocks, block_size, 2 * state_width], state_width >= head_size
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params, const SlotCheck& check = {});

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_H_
