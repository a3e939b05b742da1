#include "model/decoder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "model/rope_tables.h"
#include "ops/embed/embed.h"
#include "ops/lm_head/lm_head.h"
#include "ops/linear/linear.h"
#include "ops/mhc/mhc.h"
#include "ops/mtp_input/mtp_input.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/sample/sample.h"
#include "runtime/paged_rows.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

constexpr uint8_t kPoison = 0xff;  // NaN in f32, bf16, e4m3 and E8M0

// Steps index rows, requests and blocks with 32 bits.
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

absl::Status CheckPart(size_t layer, const char* part, bool expected, bool given) {
  if (expected == given) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat("layers[", layer, "]: expected weights ", expected ? "with " : "without ",
                                           part, " as the config says, got others"));
}

// That each layer has the weights that its kind asks for. Their shapes are for the ops to check.
absl::Status CheckWeights(const ModelConfig& config, const ModelWeights& weights) {
  if (weights.layers.size() != config.layers.size()) {
    return absl::InvalidArgumentError(StrCat("layers: expected weights of ", config.layers.size(),
                                             " layers as the config says, got ", weights.layers.size()));
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const AttentionWeights& attention = weights.layers[i].attention;
    DSV4_RETURN_IF_ERROR(
        CheckPart(i, "a compressor", config.layers[i].compressed(), attention.compressor.has_value()));
    DSV4_RETURN_IF_ERROR(CheckPart(i, "an indexer", config.layers[i].indexer, attention.indexer.has_value()));
  }
  return absl::OkStatus();
}

// That the precision's formats can hold rows of the model's sizes: now, rather than in the first step.
absl::Status CheckCaches(const Attention& attention) {
  DSV4_RETURN_IF_ERROR(CheckPagedRows("window rows", attention.window()));
  if (attention.compressor().has_value()) {
    DSV4_RETURN_IF_ERROR(CheckPagedRows("entries", attention.compressor()->entries()));
  }
  if (attention.indexer().has_value()) {
    DSV4_RETURN_IF_ERROR(CheckPagedRows("indexer keys", attention.indexer()->keys()));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const ModelConfig& config, const ModelWeights& weights, const DecoderOptions& options) {
  DSV4_RETURN_IF_ERROR(ValidateModelConfig(config));
  if (options.sizes.max_context > config.max_position_embeddings) {
    return absl::InvalidArgumentError(StrCat("max_context: expected at most max_position_embeddings = ",
                                             config.max_position_embeddings, ", got ", options.sizes.max_context));
  }
  for (auto [name, value] : {std::pair<const char*, int64_t>{"max_requests", options.sizes.max_requests},
                             {"max_context", options.sizes.max_context},
                             {"max_rows_per_request", options.sizes.max_rows_per_request},
                             {"max_rows", options.max_rows},
                             {"max_logit_rows", options.max_logit_rows}}) {
    if (value >= 1 && value <= kMaxSize) continue;
    return absl::InvalidArgumentError(StrCat(name, ": expected 1 to ", kMaxSize, ", got ", value));
  }
  if (options.sizes.cache_tokens < 1) {
    return absl::InvalidArgumentError(StrCat("cache_tokens: expected at least 1, got ", options.sizes.cache_tokens));
  }
  const RowFormat key_format = options.numeric.indexer_format;
  if (key_format != RowFormat::kFp8Key && key_format != RowFormat::kMxfp4Key) {
    return absl::InvalidArgumentError(StrCat("indexer_format: expected ", RowFormatName(RowFormat::kFp8Key), " or ",
                                             RowFormatName(RowFormat::kMxfp4Key), ", got ",
                                             RowFormatName(key_format)));
  }
  if (options.mtp && (config.mtp_layers.empty() || weights.mtp.empty())) {
    return absl::InvalidArgumentError("mtp: asked for, but the model has no multi-token-prediction block");
  }
  return CheckWeights(config, weights);
}

// The largest number of compressed entries that an indexer has to score for one row; at least 1, the least width.
int64_t MaxIndexedEntries(const ModelConfig& config, const CacheSizes& sizes) {
  int64_t entries = 1;
  for (const LayerKind& kind : config.layers) {
    if (kind.indexer) entries = std::max(entries, sizes.max_context / kind.ratio);
  }
  return entries;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Create(Device& device, const ModelConfig& config,
                                                         const ModelWeights& weights, const DecoderOptions& options) {
  DSV4_RETURN_IF_ERROR(CheckOptions(config, weights, options));
  std::unique_ptr<Decoder> decoder(new Decoder(config, weights, options));
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateStream());
  decoder->plan_ = PlanCaches(config, options.sizes);
  DSV4_ASSIGN_OR_RETURN(decoder->step_state_,
                        StepState::Create(device, config, decoder->plan_, options.sizes, options.max_rows,
                                          options.max_logit_rows));
  DSV4_RETURN_IF_ERROR(decoder->LoadRopeTables(device, *stream));

  auto add_block = [&](std::vector<Block>& blocks, const LayerKind& kind, const BlockWeights& block_weights) {
    blocks.emplace_back(config, options.numeric, decoder->plan_, kind, block_weights,
                        kind.compressed() ? decoder->compressed_cos_sin_ : decoder->plain_cos_sin_);
  };
  for (size_t i = 0; i < config.layers.size(); ++i) add_block(decoder->blocks_, config.layers[i], weights.layers[i]);
  if (options.mtp) add_block(decoder->mtp_blocks_, config.mtp_layers[0], weights.mtp[0].block);

  DSV4_ASSIGN_OR_RETURN(decoder->cache_arena_, Arena::Create(device, [&](Arena& arena) {
    for (Block& block : decoder->blocks_) block.LayOutCaches(arena);
    for (Block& block : decoder->mtp_blocks_) block.LayOutCaches(arena);
  }));
  for (const Block& block : decoder->blocks_) DSV4_RETURN_IF_ERROR(CheckCaches(block.attention()));

  const DType act = options.numeric.activation_dtype();
  const int64_t rows = options.max_rows;
  const int64_t logit_rows = options.max_logit_rows;
  const int64_t hidden = config.hidden_size;
  const int64_t max_indexed = MaxIndexedEntries(config, options.sizes);
  Decoder& d = *decoder;
  DSV4_ASSIGN_OR_RETURN(decoder->buffer_arena_, Arena::Create(device, [&](Arena& arena) {
    d.streams_ = arena.Add(act, {rows, config.hc_mult, hidden});
    d.head_mixed_ = arena.Add(act, {logit_rows, hidden});
    d.head_x_ = arena.Add(act, {logit_rows, hidden});
    d.scratch_ = BlockScratch::LayOut(arena, config, options.numeric, rows);
    d.outputs_.logits = arena.Add(DType::kF32, {logit_rows, config.vocab_size});
    d.outputs_.tokens = arena.Add(DType::kI32, {logit_rows});

    d.selections_.assign(config.layers.size(), Selection{});
    Selection shared;
    for (size_t i = 0; i < config.layers.size(); ++i) {
      if (!config.layers[i].indexer) continue;
      if (shared.indices.empty() || options.keep_selections) {
        shared = Selection::LayOut(arena, rows, max_indexed, std::min(config.index_topk, max_indexed));
      }
      d.selections_[i] = shared;
    }

    if (!options.mtp) return;
    d.mtp_embedding_ = arena.Add(act, {rows, 1, hidden});
    d.mtp_normed_ = arena.Add(act, {rows, hidden});
    d.mtp_e_ = arena.Add(act, {rows, hidden});
    d.mtp_h_normed_ = arena.Add(act, {rows, config.hc_mult, hidden});
    d.mtp_streams_ = arena.Add(act, {rows, config.hc_mult, hidden});
    d.outputs_.mtp_logits = arena.Add(DType::kF32, {logit_rows, config.vocab_size});
  }));

  if (options.poison) {
    for (const Arena* arena : {&d.cache_arena_, &d.buffer_arena_}) {
      DSV4_RETURN_IF_ERROR(stream->Fill(arena->data(), kPoison, arena->size_bytes()));
    }
    DSV4_RETURN_IF_ERROR(stream->Synchronize());
  }
  return decoder;
}

absl::Status Decoder::LoadRopeTables(Device& device, Stream& stream) {
  const int64_t positions = options_.sizes.max_context;
  TensorView plain;
  TensorView compressed;
  DSV4_ASSIGN_OR_RETURN(rope_arena_, Arena::Create(device, [&](Arena& arena) {
    plain = arena.Add(DType::kF32, {positions, config_.qk_rope_head_dim});
    compressed = arena.Add(DType::kF32, {positions, config_.qk_rope_head_dim});
  }));
  for (bool is_compressed : {false, true}) {
    const std::vector<float> table = RopeTable(config_, is_compressed, positions);
    const TensorView& view = is_compressed ? compressed : plain;
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(view.data, table.data(), view.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream.Synchronize());
  }
  plain_cos_sin_ = WeightView(plain);
  compressed_cos_sin_ = WeightView(compressed);
  return absl::OkStatus();
}

absl::Status Decoder::Record(Stream& stream, int64_t rows) {
  if (rows < 1 || rows > options_.max_rows) {
    return absl::InvalidArgumentError(
        StrCat("rows: expected 1 to max_rows = ", options_.max_rows, ", got ", rows));
  }
  DSV4_RETURN_IF_ERROR(step_state_->RecordMetadata(stream, rows));
  const StepContext context = step_state_->Context(rows);
  const TensorView streams = streams_.FirstRows(rows);
  const BlockScratch scratch = scratch_.FirstRows(rows);

  DSV4_RETURN_IF_ERROR(
      embed::Record(stream, {.token_ids = context.tokens, .table = weights_.embed, .out = streams}));
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Selection selection =
        config_.layers[i].indexer ? selections_[i].FirstRows(rows) : Selection{};
    DSV4_RETURN_IF_ERROR(blocks_[i].Record(stream, context, streams, scratch, selection));
  }
  DSV4_RETURN_IF_ERROR(RecordHead(stream, streams, weights_.hc_head, weights_.norm, outputs_.logits));

  const StepInputs& inputs = step_state_->device_inputs();
  DSV4_RETURN_IF_ERROR(sample::Record(stream, {.logits = outputs_.logits,
                                               .rows = inputs.logit_rows,
                                               .positions = context.positions,
                                               .temperatures = inputs.temperatures,
                                               .seeds = inputs.seeds,
                                               .request_ids = inputs.request_ids,
                                               .tokens = outputs_.tokens,
                                               .next_tokens = inputs.next_tokens.FirstRows(rows)}));
  return options_.mtp ? RecordMtp(stream, context) : absl::OkStatus();
}

absl::Status Decoder::RecordHead(Stream& stream, const TensorView& streams, const MhcWeights& hc_head,
                                 const WeightView& norm, const TensorView& logits) {
  const TensorView& logit_rows = step_state_->device_inputs().logit_rows;
  DSV4_RETURN_IF_ERROR(mhc::Record(stream, mhc::HeadParams{.streams = streams,
                                                           .rows = logit_rows,
                                                           .fn = hc_head.fn,
                                                           .scale = hc_head.scale,
                                                           .base = hc_head.base,
                                                           .rms_eps = config_.rms_norm_eps,
                                                           .hc_eps = config_.hc_eps,
                                                           .out = head_mixed_}));
  DSV4_RETURN_IF_ERROR(rms_norm::Record(
      stream, {.x = head_mixed_, .weight = norm, .eps = config_.rms_norm_eps, .out = head_x_}));
  return lm_head::Record(stream,
                         {.x = head_x_, .rows = logit_rows, .weight = weights_.head, .logits = logits});
}

absl::Status Decoder::RecordMtp(Stream& stream, const StepContext& context) {
  const int64_t rows = context.rows;
  const MtpWeights& weights = weights_.mtp[0];
  const int64_t hidden = config_.hidden_size;
  const TensorView next_tokens = step_state_->device_inputs().next_tokens.FirstRows(rows);
  const TensorView embedding = mtp_embedding_.FirstRows(rows);
  const TensorView normed = mtp_normed_.FirstRows(rows);
  const TensorView e = mtp_e_.FirstRows(rows);
  const TensorView h_normed = mtp_h_normed_.FirstRows(rows);
  const TensorView streams = mtp_streams_.FirstRows(rows);
  const int64_t stream_rows = rows * config_.hc_mult;

  auto record_projection = [&](const TensorView& x, const QuantizedWeight& weight, const TensorView& out) {
    return linear::Record(
        stream, {.x = x,
                 .weight = weight,
                 .quantize_activations = options_.numeric.quantize_activations() && weight.is_low_precision(),
                 .out = out});
  };
  DSV4_RETURN_IF_ERROR(
      embed::Record(stream, {.token_ids = next_tokens, .table = weights_.embed, .out = embedding}));
  DSV4_RETURN_IF_ERROR(rms_norm::Record(stream, {.x = embedding.Reshape({rows, hidden}),
                                                 .weight = weights.enorm,
                                                 .eps = config_.rms_norm_eps,
                                                 .out = normed}));
  DSV4_RETURN_IF_ERROR(record_projection(normed, weights.e_proj, e));
  DSV4_RETURN_IF_ERROR(rms_norm::Record(stream, {.x = streams_.FirstRows(rows).Reshape({stream_rows, hidden}),
                                                 .weight = weights.hnorm,
                                                 .eps = config_.rms_norm_eps,
                                                 .out = h_normed.Reshape({stream_rows, hidden})}));
  DSV4_RETURN_IF_ERROR(record_projection(h_normed.Reshape({stream_rows, hidden}), weights.h_proj,
                                         streams.Reshape({stream_rows, hidden})));
  DSV4_RETURN_IF_ERROR(mtp_input::Record(stream, {.e = e, .h = streams, .out = streams}));
  DSV4_RETURN_IF_ERROR(
      mtp_blocks_[0].Record(stream, context, streams, scratch_.FirstRows(rows), Selection{}));
  return RecordHead(stream, streams, weights.hc_head, weights.norm, outputs_.mtp_logits);
}

}  // namespace dsv4
