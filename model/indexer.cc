#include "model/indexer.h"

#include "ops/indexer_logits/indexer_logits.h"
#include "ops/indexer_query/indexer_query.h"
#include "ops/linear/linear.h"
#include "ops/top_k/top_k.h"
#include "runtime/status.h"

namespace dsv4 {

Selection Selection::LayOut(Arena& arena, int64_t rows, int64_t max_entries, int64_t k) {
  Selection selection;
  selection.scores = arena.Add(DType::kF32, {rows, max_entries});
  selection.indices = arena.Add(DType::kI32, {rows, k});
  selection.slots = arena.Add(DType::kI32, {rows, k});
  return selection;
}

Selection Selection::FirstRows(int64_t rows) const {
  return {scores.FirstRows(rows), indices.FirstRows(rows), slots.FirstRows(rows)};
}

IndexerScratch IndexerScratch::LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric,
                                      int64_t rows, int64_t state_width) {
  const int64_t heads = config.index_n_heads;
  const int64_t head_dim = config.index_head_dim;
  IndexerScratch scratch;
  scratch.kv_score = arena.Add(DType::kF32, {rows, 2 * state_width});
  scratch.q = arena.Add(numeric.activation_dtype(), {rows, heads * head_dim});
  scratch.weights = arena.Add(DType::kF32, {rows, heads});
  switch (numeric.key_format()) {
    case RowFormat::kFp8Key:
      scratch.q_values = arena.Add(DType::kE4m3, {rows, heads, head_dim});
      break;
    case RowFormat::kMxfp4Key:
      scratch.q_values = arena.Add(DType::kE2m1x2, {rows, heads, head_dim / 2});
      scratch.q_scales = arena.Add(DType::kE8m0, {rows, heads, head_dim / 32});
      break;
    default:
      scratch.q_values = arena.Add(numeric.activation_dtype(), {rows, heads, head_dim});
  }
  scratch.q_weights = arena.Add(DType::kF32, {rows, heads});
  return scratch;
}

IndexerScratch IndexerScratch::FirstRows(int64_t rows) const {
  IndexerScratch first = *this;
  for (TensorView* view : {&first.kv_score, &first.q, &first.weights, &first.q_values, &first.q_scales,
                           &first.q_weights}) {
    if (!view->empty()) *view = view->FirstRows(rows);
  }
  return first;
}

Indexer::Indexer(const ModelConfig& config, const NumericOptions& numeric, const CompressedPlan& plan,
                 const IndexerWeights& weights, const WeightView& cos_sin)
    : heads_(config.index_n_heads),
      head_dim_(config.index_head_dim),
      numeric_(numeric),
      weights_(weights),
      cos_sin_(cos_sin),
      compressor_({.ratio = plan.kind.ratio,
                   .overlap = plan.kind.overlap,
                   .head_dim = config.index_head_dim,
                   .rope_dim = config.qk_rope_head_dim,
                   .eps = config.rms_norm_eps,
                   .hadamard = numeric.hadamard,
                   .entry_format = numeric.key_format(),
                   .state = plan.state,
                   .entries = plan.entries},
                  weights.compressor, cos_sin) {}

absl::Status Indexer::Record(Stream& stream, const StepContext& context, const CompressedStep& step,
                             const TensorView& x, const TensorView& q_latent, const IndexerScratch& scratch,
                             const Selection& selection) const {
  DSV4_RETURN_IF_ERROR(compressor_.Record(stream, context, step, x, scratch.kv_score));

  DSV4_RETURN_IF_ERROR(linear::Record(stream, {.x = q_latent,
                                               .weight = weights_.wq_b,
                                               .quantize_activations = numeric_.quantize_activations() &&
                                                                       weights_.wq_b.is_low_precision(),
                                               .out = scratch.q}));
  DSV4_RETURN_IF_ERROR(linear::Record(stream, {.x = x, .weight = weights_.weights_proj, .out = scratch.weights}));
  DSV4_RETURN_IF_ERROR(indexer_query::Record(stream, {.q = scratch.q.Reshape({context.rows, heads_, head_dim_}),
                                                      .weights = scratch.weights,
                                                      .positions = context.positions,
                                                      .cos_sin = cos_sin_,
                                                      .hadamard = numeric_.hadamard,
                                                      .format = numeric_.key_format(),
                                                      .out_values = scratch.q_values,
                                                      .out_scales = scratch.q_scales,
                                                      .out_weights = scratch.q_weights}));
  DSV4_RETURN_IF_ERROR(indexer_logits::Record(stream, {.q_values = scratch.q_values,
                                                       .q_scales = scratch.q_scales,
                                                       .weights = scratch.q_weights,
                                                       .keys = keys(),
                                                       .block_table = step.entry_block_table,
                                                       .requests = context.requests,
                                                       .counts = step.entry_counts,
                                                       .logits = selection.scores}));
  return top_k::Record(stream, {.logits = selection.scores,
                                .counts = step.entry_counts,
                                .requests = context.requests,
                                .block_table = step.entry_block_table,
                                .rows_per_block = keys().rows_per_page,
                                .indices = selection.indices,
                                .slots = selection.slots});
}

}  // namespace dsv4
