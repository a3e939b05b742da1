#include "model/compressor.h"

#include "model/paged_cache.h"
#include "ops/compress_store/compress_store.h"
#include "ops/linear/linear.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/status.h"

namespace dsv4 {

void Compressor::LayOutCaches(Arena& arena) {
  state_cache_ = arena.Add(DType::kF32, {options_.state.num_blocks, options_.state.rows_per_block,
                                         2 * options_.state_width()});
  entries_ = AddPagedRows(arena, options_.entry_format, options_.entries, options_.head_dim, options_.rope_dim);
}

absl::Status Compressor::Record(Stream& stream, const StepContext& context, const CompressedStep& step,
                                const TensorView& x, const TensorView& kv_score) const {
  const int64_t width = options_.state_width();
  const TensorView projected = kv_score.Columns(0, 2 * width);
  DSV4_RETURN_IF_ERROR(linear::Record(stream, {.x = x, .weight = weights_.wkv_gate, .out = projected}));

  DSV4_RETURN_IF_ERROR(save_partial_states::Record(stream, {.kv = projected.Columns(0, width),
                                                            .score = projected.Columns(width, width),
                                                            .ape = weights_.ape,
                                                            .positions = context.positions,
                                                            .slots = step.state_slots,
                                                            .state_cache = state_cache_}));

  return compress_store::Record(stream, {.state_cache = state_cache_,
                                         .state_slots = step.state_slots,
                                         .state_block_table = step.state_block_table,
                                         .requests = context.requests,
                                         .positions = context.positions,
                                         .ratio = options_.ratio,
                                         .overlap = options_.overlap,
                                         .norm_weight = weights_.norm,
                                         .eps = options_.eps,
                                         .cos_sin = cos_sin_,
                                         .hadamard = options_.hadamard,
                                         .entry_slots = step.entry_slots,
                                         .entries = entries_});
}

}  // namespace dsv4
