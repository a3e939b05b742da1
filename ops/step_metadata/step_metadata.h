// The first op of every step: from the step's token rows and the block tables it computes, on the device, every
// slot, count and list that the other ops index with.
//
// Contract
//   A row is a pad if its request is negative. A pad gets slot -1 everywhere, counts of 0, lists of -1, and its token,
//   request and position are replaced by 0, so that later ops can index with them; its input token and position are
//   never used. Live rows' tokens and positions are checked on the host.
//   Row i of a cache group of ratio r at position p: entry j = p / r is written by the row with (p + 1) % r == 0, at slot
//   table[request][(j / rows_per_block) % blocks] * rows_per_block + j % rows_per_block; all other rows get -1. With
//   ratio 1 that is one slot a token. The modulo makes a short table a ring of blocks; a table as long as the context is
//   addressed by absolute position.
//   Visible rows: of the (p + 1) / r entries that exist, all, or the last `limit`; in ascending order.
//   Reads before the wait: nothing. Writes: all outputs, every row.
// Source: specification, sections 5.4, 5.5, 7.3, 9.3.
#ifndef DSV4_OPS_STEP_METADATA_H_
#define DSV4_OPS_STEP_METADATA_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4::step_metadata {

// Where this step's rows are written in one group of caches (all layers of a group share slots).
struct CacheGroup {
  int64_t ratio = 1;  // tokens per entry; 1 for window and state rows
  int64_t rows_per_block = 0;
  TensorView block_table;  // i32 [R, blocks]
  TensorView slots;        // out, i64 [N]
};

// What a row of this step may attend to in one group of caches.
struct VisibleRows {
  int64_t ratio = 1;
  int64_t limit = 0;  // 0: no limit
  int64_t rows_per_block = 0;
  TensorView block_table;  // i32 [R, blocks]; may be empty if `slots` is
  TensorView counts;       // out, i32 [N]
  TensorView slots;        // out, i32 [N, width], -1 past the count; empty: counts only. width >= any count
};

struct Params {
  TensorView token_ids;  // i32 [N]
  TensorView requests;   // i32 [N], row of the block tables; < 0: pad
  TensorView positions;  // i64 [N]

  TensorView row_tokens;     // out, i32 [N]
  TensorView row_requests;   // out, i32 [N]
  TensorView row_positions;  // out, i64 [N]

  std::vector<CacheGroup> groups;
  std::vector<VisibleRows> visible;
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::step_metadata

#endif  // DSV4_OPS_STEP_METADATA_H_
