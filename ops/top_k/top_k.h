// Selects the K best-scored visible entries of each row, and translates them to cache slots.
//
// Contract
//   Of columns 0 <= j < counts[i] of row i: the K largest logits, all of them if there are at most K; of equal logits
//   the lower index first (-0 equals +0); a NaN is never chosen. indices[i] lists the chosen j in ascending order,
//   then -1.
//   slots[i] lists block_table[request][(j / rows_per_block) % blocks] * rows_per_block + j % rows_per_block for the
//   same entries, then -1.
//   A row with a count of 0 (every pad) gets -1 throughout.
//   Reads before the wait: nothing.
// Source: specification, section 6.5; design, contract 4.
#ifndef DSV4_OPS_TOP_K_H_
#define DSV4_OPS_TOP_K_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::top_k {

struct Params {
  TensorView logits;       // f32 [N, width]
  TensorView counts;       // i32 [N]
  TensorView requests;     // i32 [N]
  TensorView block_table;  // i32 [R, blocks]
  int64_t rows_per_block = 0;
  TensorView indices;  // out, i32 [N, K]
  TensorView slots;    // out, i32 [N, K]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::top_k

#endif  // DSV4_OPS_TOP_K_H_
