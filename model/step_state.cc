#include "model/step_state.h"

#include <algorithm>
#include <utility>

#include "runtime/str_cat.h"
#include "ops/step_metadata/step_metadata.h"
#include "runtime/status.h"

namespace dsv4 {
namespace {

StepInputs LayOutInputs(Arena& arena, int64_t rows, int64_t logit_rows) {
  StepInputs inputs;
  inputs.token_ids = arena.Add(DType::kI32, {rows});
  inputs.requests = arena.Add(DType::kI32, {rows});
  inputs.positions = arena.Add(DType::kI64, {rows});
  inputs.next_tokens = arena.Add(DType::kI32, {rows});
  inputs.logit_rows = arena.Add(DType::kI32, {logit_rows});
  inputs.temperatures = arena.Add(DType::kF32, {logit_rows});
  inputs.seeds = arena.Add(DType::kI64, {logit_rows});
  inputs.request_ids = arena.Add(DType::kI64, {logit_rows});
  return inputs;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepState>> StepState::Create(Device& device, const ModelConfig& config,
                                                             const CachePlan& plan, const CacheSizes& sizes,
                                                             int64_t max_rows, int64_t max_logit_rows) {
  std::unique_ptr<StepState> state(new StepState);
  state->max_rows_ = max_rows;
  state->max_logit_rows_ = max_logit_rows;
  state->plan_ = plan;

  DSV4_ASSIGN_OR_RETURN(state->host_, CreateDevice(DeviceKind::kCpu));
  DSV4_ASSIGN_OR_RETURN(state->host_arena_, Arena::Create(*state->host_, [&](Arena& arena) {
    state->host_inputs_ = LayOutInputs(arena, max_rows, max_logit_rows);
  }));
  DSV4_ASSIGN_OR_RETURN(state->inputs_arena_, Arena::Create(device, [&](Arena& arena) {
    state->device_inputs_ = LayOutInputs(arena, max_rows, max_logit_rows);
  }));

  DSV4_ASSIGN_OR_RETURN(state->arena_, Arena::Create(device, [&](Arena& arena) {
    state->block_tables_.clear();
    for (const CacheGroupPlan& group : plan.Groups()) {
      state->block_tables_.push_back(arena.Add(DType::kI32, {sizes.max_requests, group.table_blocks}));
    }
    StepContext& full = state->full_;
    full = StepContext{};
    full.rows = max_rows;
    full.tokens = arena.Add(DType::kI32, {max_rows});
    full.requests = arena.Add(DType::kI32, {max_rows});
    full.positions = arena.Add(DType::kI64, {max_rows});
    full.window_slots = arena.Add(DType::kI64, {max_rows});
    full.window_list = arena.Add(DType::kI32, {max_rows, std::min(config.sliding_window, sizes.max_context)});
    full.window_counts = arena.Add(DType::kI32, {max_rows});
    for (size_t i = 0; i < plan.compressed.size(); ++i) {
      const LayerKind& kind = plan.compressed[i].kind;
      CompressedStep step;
      step.state_slots = arena.Add(DType::kI64, {max_rows});
      step.state_block_table = state->block_tables_[1 + 2 * i];
      step.entry_slots = arena.Add(DType::kI64, {max_rows});
      step.entry_block_table = state->block_tables_[2 + 2 * i];
      step.entry_counts = arena.Add(DType::kI32, {max_rows});
      if (!kind.indexer) {
        const int64_t width = std::max<int64_t>(1, sizes.max_context / kind.ratio);
        step.entry_list = arena.Add(DType::kI32, {max_rows, width});
      }
      full.compressed.push_back(step);
    }
  }));
  state->table_staging_.resize(state->block_tables_.size() * static_cast<size_t>(sizes.max_requests));
  state->ClearHostInputs();
  return state;
}

void StepState::ClearHostInputs() {
  for (int64_t i = 0; i < max_rows_; ++i) {
    *host_inputs_.token_ids.At<int32_t>(i) = 0;
    *host_inputs_.requests.At<int32_t>(i) = -1;
    *host_inputs_.positions.At<int64_t>(i) = 0;
    *host_inputs_.next_tokens.At<int32_t>(i) = -1;
  }
  for (int64_t l = 0; l < max_logit_rows_; ++l) {
    *host_inputs_.logit_rows.At<int32_t>(l) = -1;
    *host_inputs_.temperatures.At<float>(l) = 0.0f;
    *host_inputs_.seeds.At<int64_t>(l) = 0;
    *host_inputs_.request_ids.At<int64_t>(l) = 0;
  }
}

absl::Status StepState::Upload(Stream& stream) {
  return stream.CopyToDevice(inputs_arena_.data(), host_arena_.data(), host_arena_.size_bytes());
}

absl::Status StepState::SetBlockTable(Stream& stream, int64_t group, int64_t request_row,
                                      absl::Span<const int32_t> blocks) {
  const int64_t num_groups = static_cast<int64_t>(block_tables_.size());
  if (group < 0 || group >= num_groups) {
    return absl::InvalidArgumentError(
        StrCat("block table: expected a group of 0 to ", num_groups - 1, ", got ", group));
  }
  const TensorView& table = block_tables_[group];
  if (request_row < 0 || request_row >= table.extents[0]) {
    return absl::InvalidArgumentError(
        StrCat("block table: expected a request row of 0 to ", table.extents[0] - 1, ", got ", request_row));
  }
  if (static_cast<int64_t>(blocks.size()) > table.extents[1]) {
    return absl::InvalidArgumentError(
        StrCat("block table: expected at most ", table.extents[1], " blocks, got ", blocks.size()));
  }
  const int64_t num_blocks = plan_.Groups()[group].num_blocks;
  for (int32_t block : blocks) {
    if (block >= 0 && block < num_blocks) continue;
    return absl::InvalidArgumentError(
        StrCat("block table: expected blocks of 0 to ", num_blocks - 1, ", got ", block));
  }
  std::vector<int32_t>& row = table_staging_[group * table.extents[0] + request_row];
  row.assign(table.extents[1], 0);
  std::copy(blocks.begin(), blocks.end(), row.begin());
  return stream.CopyToDevice(table.Row<int32_t>(request_row), row.data(),
                             static_cast<int64_t>(row.size() * sizeof(int32_t)));
}

absl::Status StepState::RecordMetadata(Stream& stream, int64_t rows) {
  const StepContext context = Context(rows);
  step_metadata::Params params;
  params.token_ids = device_inputs_.token_ids.FirstRows(rows);
  params.requests = device_inputs_.requests.FirstRows(rows);
  params.positions = device_inputs_.positions.FirstRows(rows);
  params.row_tokens = context.tokens;
  params.row_requests = context.requests;
  params.row_positions = context.positions;
  params.groups.push_back({.ratio = 1,
                           .rows_per_block = plan_.window.rows_per_block,
                           .block_table = block_tables_[0],
                           .slots = context.window_slots});
  params.visible.push_back({.ratio = 1,
                            .limit = context.window_list.extents[1],
                            .rows_per_block = plan_.window.rows_per_block,
                            .block_table = block_tables_[0],
                            .counts = context.window_counts,
                            .slots = context.window_list});
  for (size_t i = 0; i < plan_.compressed.size(); ++i) {
    const CompressedPlan& plan = plan_.compressed[i];
    const CompressedStep& step = context.compressed[i];
    params.groups.push_back({.ratio = 1,
                             .rows_per_block = plan.state.rows_per_block,
                             .block_table = step.state_block_table,
                             .slots = step.state_slots});
    params.groups.push_back({.ratio = plan.kind.ratio,
                             .rows_per_block = plan.entries.rows_per_block,
                             .block_table = step.entry_block_table,
                             .slots = step.entry_slots});
    params.visible.push_back({.ratio = plan.kind.ratio,
                              .limit = 0,
                              .rows_per_block = plan.entries.rows_per_block,
                              .block_table = step.entry_block_table,
                              .counts = step.entry_counts,
                              .slots = step.entry_list});
  }
  return step_metadata::Record(stream, params);
}

StepContext StepState::Context(int64_t rows) const {
  StepContext context = full_;
  context.rows = rows;
  for (TensorView* view : {&context.tokens, &context.requests, &context.positions, &context.window_slots,
                           &context.window_list, &context.window_counts}) {
    *view = view->FirstRows(rows);
  }
  for (CompressedStep& step : context.compressed) {
    for (TensorView* view : {&step.state_slots, &step.entry_slots, &step.entry_counts, &step.entry_list}) {
      if (!view->empty()) *view = view->FirstRows(rows);
    }
  }
  return context;
}

}  // namespace dsv4
