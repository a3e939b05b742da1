#include "model/attention.h"

#include <algorithm>
#include <cmath>

#include "model/paged_cache.h"
#include "ops/linear/linear.h"
#include "ops/output_projection/output_projection.h"
#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/sparse_attention/split_plan.h"
#include "runtime/status.h"

namespace dsv4 {

AttentionScratch AttentionScratch::LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric,
                                          int64_t rows, int64_t max_context) {
  const DType act = numeric.activation_dtype();
  const int64_t heads = config.num_attention_heads;
  int64_t state_width = 0;
  int64_t index_state_width = 0;
  int64_t entry_width = 0;
  for (const std::vector<LayerKind>* layers : {&config.layers, &config.mtp_layers}) {
    for (const LayerKind& kind : *layers) {
      if (!kind.compressed()) continue;
      state_width = std::max(state_width, (kind.overlap ? 2 : 1) * config.head_dim);
      entry_width = std::max(entry_width, kind.indexer ? config.index_topk : max_context / kind.ratio);
      if (kind.indexer) index_state_width = std::max(index_state_width, (kind.overlap ? 2 : 1) * config.index_head_dim);
    }
  }
  AttentionScratch scratch;
  scratch.q_latent_raw = arena.Add(act, {rows, config.q_lora_rank});
  scratch.q_latent = arena.Add(act, {rows, config.q_lora_rank});
  scratch.q = arena.Add(act, {rows, heads * config.head_dim});
  scratch.kv_raw = arena.Add(act, {rows, config.head_dim});
  scratch.kv = arena.Add(act, {rows, config.head_dim});
  if (state_width > 0) scratch.kv_score = arena.Add(DType::kF32, {rows, 2 * state_width});
  scratch.out = arena.Add(act, {rows, heads, config.head_dim});
  scratch.lse = arena.Add(DType::kF32, {rows, heads});
  const int64_t splits = sparse_attention::MostSplits(act, rows, heads, config.sliding_window + entry_width);
  if (splits > 0) {
    scratch.split_out = arena.Add(DType::kF32, {splits, heads, config.head_dim});
    scratch.split_sums = arena.Add(DType::kF32, {splits, heads, 2});
  }
  scratch.rotated = arena.Add(act, {rows, heads, config.head_dim});
  scratch.low_rank = arena.Add(act, {rows, config.o_groups * config.o_lora_rank});
  if (index_state_width > 0) {
    scratch.indexer = IndexerScratch::LayOut(arena, config, numeric, rows, index_state_width);
  }
  return scratch;
}

AttentionScratch AttentionScratch::FirstRows(int64_t rows) const {
  AttentionScratch first = *this;
  for (TensorView* view : {&first.q_latent_raw, &first.q_latent, &first.q, &first.kv_raw, &first.kv, &first.kv_score,
                           &first.out, &first.lse, &first.rotated, &first.low_rank}) {
    if (!view->empty()) *view = view->FirstRows(rows);
  }
  first.indexer = indexer.FirstRows(rows);
  return first;
}

Attention::Attention(const ModelConfig& config, const NumericOptions& numeric, const CachePlan& plan,
                     const LayerKind& kind, const AttentionWeights& weights, const WeightView& cos_sin)
    : config_(config),
      numeric_(numeric),
      kind_(kind),
      window_plan_(plan.window),
      compressed_index_(kind.compressed() ? plan.CompressedIndex(kind) : -1),
      weights_(weights),
      cos_sin_(cos_sin) {
  if (!kind.compressed()) return;
  const CompressedPlan& compressed = plan.compressed[compressed_index_];
  compressor_.emplace(CompressorOptions{.ratio = kind.ratio,
                                        .overlap = kind.overlap,
                                        .head_dim = config.head_dim,
                                        .rope_dim = config.qk_rope_head_dim,
                                        .eps = config.rms_norm_eps,
                                        .hadamard = false,
                                        .entry_format = numeric.row_format(),
                                        .state = compressed.state,
                                        .entries = compressed.entries},
                      *weights.compressor, cos_sin);
  if (kind.indexer) indexer_.emplace(config, numeric, compressed, *weights.indexer, cos_sin);
}

void Attention::LayOutCaches(Arena& arena) {
  window_ = AddPagedRows(arena, numeric_.row_format(), window_plan_, config_.head_dim, config_.qk_rope_head_dim);
  if (compressor_.has_value()) compressor_->LayOutCaches(arena);
  if (indexer_.has_value()) indexer_->LayOutCaches(arena);
}

absl::Status Attention::RecordLinear(Stream& stream, const TensorView& x, const QuantizedWeight& weight,
                                     const TensorView& out) const {
  return linear::Record(
      stream, {.x = x,
               .weight = weight,
               .quantize_activations = numeric_.quantize_activations() && weight.is_low_precision(),
               .out = out});
}

absl::Status Attention::Record(Stream& stream, const StepContext& context, const TensorView& x,
                               const AttentionScratch& scratch, const Selection& selection,
                               const TensorView& y) const {
  const int64_t rows = context.rows;
  const int64_t heads = config_.num_attention_heads;
  const int64_t head_dim = config_.head_dim;
  const TensorView q = scratch.q.Reshape({rows, heads, head_dim});

  // Query and window row.
  DSV4_RETURN_IF_ERROR(RecordLinear(stream, x, weights_.wq_a, scratch.q_latent_raw));
  DSV4_RETURN_IF_ERROR(RecordLinear(stream, x, weights_.wkv, scratch.kv_raw));
  DSV4_RETURN_IF_ERROR(rms_norm::Record(stream, {.x = scratch.q_latent_raw,
                                                 .weight = weights_.q_norm,
                                                 .eps = config_.rms_norm_eps,
                                                 .out = scratch.q_latent}));
  DSV4_RETURN_IF_ERROR(rms_norm::Record(stream, {.x = scratch.kv_raw,
                                                 .weight = weights_.kv_norm,
                                                 .eps = config_.rms_norm_eps,
                                                 .out = scratch.kv}));
  DSV4_RETURN_IF_ERROR(RecordLinear(stream, scratch.q_latent, weights_.wq_b, scratch.q));
  DSV4_RETURN_IF_ERROR(qnorm_rope_window_insert::Record(stream, {.q = q,
                                                                 .kv = scratch.kv,
                                                                 .slots = context.window_slots,
                                                                 .positions = context.positions,
                                                                 .cos_sin = cos_sin_,
                                                                 .eps = config_.rms_norm_eps,
                                                                 .window = window_}));

  // Compressed entries: save, compress, and (with an indexer) select.
  sparse_attention::Params attend = {.q = q,
                                     .window = window_,
                                     .window_slots = context.window_list,
                                     .window_lengths = context.window_counts,
                                     .sink = weights_.sink,
                                     .scale = 1.0f / std::sqrt(static_cast<float>(head_dim)),
                                     .out = scratch.out,
                                     .lse = scratch.lse};
  if (compressor_.has_value()) {
    const CompressedStep& step = context.compressed[compressed_index_];
    DSV4_RETURN_IF_ERROR(compressor_->Record(stream, context, step, x, scratch.kv_score));
    attend.entries = compressor_->entries();
    if (indexer_.has_value()) {
      DSV4_RETURN_IF_ERROR(
          indexer_->Record(stream, context, step, x, scratch.q_latent, scratch.indexer, selection));
      attend.entry_slots = selection.slots;
    } else {
      attend.entry_slots = step.entry_list;
    }
    attend.entry_lengths = step.entry_counts;  // past the width if the indexer had to select
  }
  const int64_t listed =
      attend.window_slots.extents[1] + (attend.entry_slots.empty() ? 0 : attend.entry_slots.extents[1]);
  const int64_t splits = sparse_attention::SplitCount(q.dtype, rows, heads, listed);
  if (splits > 1) {
    attend.split_out = scratch.split_out.FirstRows(rows * splits).Reshape({rows, splits, heads, head_dim});
    attend.split_sums = scratch.split_sums.FirstRows(rows * splits).Reshape({rows, splits, heads, 2});
  }
  DSV4_RETURN_IF_ERROR(sparse_attention::Record(stream, attend));

  return output_projection::Record(
      stream, {.o = scratch.out,
               .positions = context.positions,
               .cos_sin = cos_sin_,
               .wo_a = weights_.wo_a,
               .groups = config_.o_groups,
               .wo_b = weights_.wo_b,
               .quantize_activations = numeric_.quantize_activations() && weights_.wo_b.is_low_precision(),
               .rotated = scratch.rotated,
               .low_rank = scratch.low_rank,
               .out = y});
}

}  // namespace dsv4
