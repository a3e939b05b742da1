// Pools the saved state rows of a complete compression window into one entry: softmax-weighted sum per channel, RMS norm,
// rotary embedding, optional Hadamard rotation, quantisation, and the store into the entry's page.
//
// Contract
//   Row i at position p writes an entry iff state_slots[i] >= 0, (p + 1) % ratio == 0 and entry_slots[i] >= 0; of any
//   other row nothing but its elements of the four lists is read, and nothing is written.
//   State row t of the request lies in block state_block_table[request][(t / block_size) % blocks], row t % block_size.
//   Without overlap: pools rows t = p - ratio + 1 .. p, values at columns [0, d), scores at [W, W + d), with W = d.
//   With overlap (W = 2d): the previous window's rows t = p - 2 ratio + 1 .. p - ratio with columns [0, d) and [W, W + d),
//   and the current window's with columns [d, 2d) and [W + d, W + 2d). Rows t < 0 do not exist and are not read.
//   Per channel: softmax over the rows' scores, in fp32. Then z = weight * c * rsqrt(mean(c^2) + eps); the last dr channels
//   rotated by position ratio * (p / ratio); the Hadamard rotation over all d if asked; stored in the cache's format (rounded
//   to bf16 first in every format but f32). fp32 until then.
//   Sizes, strides and alignment change the speed only: the published model's have kernels of their own (kernel_choice.h).
//   Reads before the wait: norm weight, cos_sin.
// Source: specification, sections 5.2, 5.3, 5.5 to 5.7, 6.2, and 11 items 6 and 7.
#ifndef DSV4_OPS_COMPRESS_STORE_H_
#define DSV4_OPS_COMPRESS_STORE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::compress_store {

struct Params {
  TensorView state_cache;        // f32|bf16 [blocks, block_size, 2 * W]
  TensorView state_slots;        // i64 [N]; only the sign is used
  TensorView state_block_table;  // i32 [R, blocks of a request]
  TensorView requests;           // i32 [N]
  TensorView positions;          // i64 [N]
  int64_t ratio = 0;
  bool overlap = false;
  WeightView norm_weight;  // f32|bf16 [d]
  float eps = 0.0f;
  WeightView cos_sin;  // f32 [max positions, dr]
  bool hadamard = false;
  TensorView entry_slots;  // i64 [N], into `entries`
  PagedRows entries;       // out, rows of d channels
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::compress_store

#endif  // DSV4_OPS_COMPRESS_STORE_H_
