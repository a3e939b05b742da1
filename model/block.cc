#include "model/block.h"

#include "ops/mhc/mhc.h"
#include "ops/moe/moe.h"
#include "ops/rms_norm/rms_norm.h"
#include "runtime/status.h"

namespace dsv4 {

BlockScratch BlockScratch::LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric,
                                  int64_t rows, int64_t max_context) {
  const DType act = numeric.activation_dtype();
  BlockScratch scratch;
  scratch.mixed = arena.Add(act, {rows, config.hidden_size});
  scratch.x = arena.Add(act, {rows, config.hidden_size});
  scratch.y = arena.Add(act, {rows, config.hidden_size});
  scratch.post = arena.Add(DType::kF32, {rows, config.hc_mult});
  scratch.comb = arena.Add(DType::kF32, {rows, config.hc_mult, config.hc_mult});
  scratch.expert_ids = arena.Add(DType::kI32, {rows, config.num_experts_per_tok});
  scratch.expert_weights = arena.Add(DType::kF32, {rows, config.num_experts_per_tok});
  scratch.moe_scratch =
      moe::Scratch::LayOut(arena, {.rows = rows,
                                   .channels = config.hidden_size,
                                   .experts = config.n_routed_experts,
                                   .chosen = config.num_experts_per_tok,
                                   .inner = config.moe_intermediate_size,
                                   .shared_inner = config.moe_intermediate_size,
                                   .dtype = act});
  scratch.attention = AttentionScratch::LayOut(arena, config, numeric, rows, max_context);
  return scratch;
}

BlockScratch BlockScratch::FirstRows(int64_t rows) const {
  BlockScratch first = *this;
  for (TensorView* view : {&first.mixed, &first.x, &first.y, &first.post, &first.comb, &first.expert_ids,
                           &first.expert_weights}) {
    *view = view->FirstRows(rows);
  }
  first.moe_scratch = moe_scratch.FirstRows(rows);
  first.attention = attention.FirstRows(rows);
  return first;
}

absl::Status Block::RecordMix(Stream& stream, const TensorView& streams, const MhcWeights& weights,
                              const WeightView& norm, const BlockScratch& scratch) const {
  DSV4_RETURN_IF_ERROR(mhc::Record(stream, mhc::PreParams{.streams = streams,
                                                          .fn = weights.fn,
                                                          .scale = weights.scale,
                                                          .base = weights.base,
                                                          .rms_eps = config_.rms_norm_eps,
                                                          .hc_eps = config_.hc_eps,
                                                          .sinkhorn_iters = config_.hc_sinkhorn_iters,
                                                          .out = scratch.mixed,
                                                          .post = scratch.post,
                                                          .comb = scratch.comb}));
  return rms_norm::Record(
      stream, {.x = scratch.mixed, .weight = norm, .eps = config_.rms_norm_eps, .out = scratch.x});
}

absl::Status Block::RecordUnmix(Stream& stream, const TensorView& streams, const BlockScratch& scratch) const {
  return mhc::Record(stream, mhc::PostParams{.streams = streams,
                                             .y = scratch.y,
                                             .post = scratch.post,
                                             .comb = scratch.comb,
                                             .out = streams});
}

absl::Status Block::Record(Stream& stream, const StepContext& context, const TensorView& streams,
                           const BlockScratch& scratch, const Selection& selection) const {
  DSV4_RETURN_IF_ERROR(RecordMix(stream, streams, weights_.hc_attn, weights_.attn_norm, scratch));
  DSV4_RETURN_IF_ERROR(attention_.Record(stream, context, scratch.x, scratch.attention, selection, scratch.y));
  DSV4_RETURN_IF_ERROR(RecordUnmix(stream, streams, scratch));

  DSV4_RETURN_IF_ERROR(RecordMix(stream, streams, weights_.hc_ffn, weights_.ffn_norm, scratch));
  DSV4_RETURN_IF_ERROR(moe::Record(stream, {.x = scratch.x,
                                            .gate = weights_.moe.gate,
                                            .bias = weights_.moe.bias,
                                            .expert_table = weights_.moe.expert_table,
                                            .row_tokens = context.tokens,
                                            .experts = weights_.moe.experts,
                                            .shared = weights_.moe.shared,
                                            .routed_scaling_factor = config_.routed_scaling_factor,
                                            .swiglu_limit = config_.swiglu_limit,
                                            .quantize_activations = numeric_.quantize_activations(),
                                            .scratch = scratch.moe_scratch,
                                            .expert_ids = scratch.expert_ids,
                                            .expert_weights = scratch.expert_weights,
                                            .out = scratch.y}));
  return RecordUnmix(stream, streams, scratch);
}

}  // namespace dsv4
