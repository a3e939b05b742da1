// The step's inputs and everything computed from them once a step: token rows, block tables, slots, counts and lists.
// Modules see it as a StepContext.
//
// The inputs of a step are one block of memory on the host and its twin on the device, so that one copy starts a step:
//   StepInputs& in = state.host_inputs();  ... fill rows [0, rows) ...
//   DSV4_RETURN_IF_ERROR(state.Upload(stream));
//   DSV4_RETURN_IF_ERROR(state.RecordMetadata(stream, rows));      // first op of the step
//   StepContext context = state.Context(rows);
#ifndef DSV4_MODEL_STEP_STATE_H_
#define DSV4_MODEL_STEP_STATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/cache_plan.h"
#include "model/config.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dsv4 {

// N rows of the step, of which L want logits.
struct StepInputs {
  TensorView token_ids;  // i32 [N]
  TensorView requests;   // i32 [N], row of the block tables; -1: pad
  TensorView positions;  // i64 [N]
  // i32 [N], the token after this one where it is known, else -1; `sample` fills the rest. In pads too it is -1 or a
  // token: unlike the other three it is not replaced.
  TensorView next_tokens;

  TensorView logit_rows;    // i32 [L], -1: none
  TensorView temperatures;  // f32 [L]
  TensorView seeds;         // i64 [L]
  TensorView request_ids;   // i64 [L]
};

// One compressed kind's part of a step.
struct CompressedStep {
  TensorView state_slots;        // i64 [N]
  TensorView state_block_table;  // i32 [R, blocks]
  TensorView entry_slots;        // i64 [N]
  TensorView entry_block_table;  // i32 [R, blocks]
  TensorView entry_counts;       // i32 [N], visible entries
  TensorView entry_list;         // i32 [N, width], slots of all visible entries; empty for kinds with an indexer
};

struct StepContext {
  int64_t rows = 0;      // N
  TensorView tokens;     // i32 [N], pads 0
  TensorView requests;   // i32 [N], pads 0
  TensorView positions;  // i64 [N], pads 0

  TensorView window_slots;                 // i64 [N]
  TensorView window_list;                  // i32 [N, sliding_window, or the context if that is less], slots, -1 past the count
  TensorView window_counts;                // i32 [N]
  std::vector<CompressedStep> compressed;  // in the cache plan's order
};

class StepState {
 public:
  static absl::StatusOr<std::unique_ptr<StepState>> Create(Device& device, const ModelConfig& config,
                                                           const CachePlan& plan, const CacheSizes& sizes,
                                                           int64_t max_rows, int64_t max_logit_rows);

  int64_t max_rows() const { return max_rows_; }
  int64_t max_logit_rows() const { return max_logit_rows_; }
  int64_t device_bytes() const { return inputs_arena_.size_bytes() + arena_.size_bytes(); }

  StepInputs& host_inputs() { return host_inputs_; }
  const StepInputs& device_inputs() const { return device_inputs_; }
  // Every row a pad, no row wants logits.
  void ClearHostInputs();
  absl::Status Upload(Stream& stream);

  // Sets the blocks of a request's row in group `group` of CachePlan::Groups(); the rest of the row becomes block 0,
  // which is a valid index that no live row uses. InvalidArgument, and nothing set, if there is no such group, request
  // row or block, or if there are more blocks than the table is wide.
  absl::Status SetBlockTable(Stream& stream, int64_t group, int64_t request_row, absl::Span<const int32_t> blocks);

  absl::Status RecordMetadata(Stream& stream, int64_t rows);
  StepContext Context(int64_t rows) const;

 private:
  StepState() = default;

  int64_t max_rows_ = 0;
  int64_t max_logit_rows_ = 0;
  CachePlan plan_;
  std::unique_ptr<Device> host_;
  Arena host_arena_;
  Arena inputs_arena_;
  Arena arena_;
  StepInputs host_inputs_;
  StepInputs device_inputs_;
  std::vector<TensorView> block_tables_;             // in the order of CachePlan::Groups()
  std::vector<std::vector<int32_t>> table_staging_;  // host rows, alive until the copy is done
  StepContext full_;                                 // for max_rows_ rows
};

}  // namespace dsv4

#endif  // DSV4_MODEL_STEP_STATE_H_
