#include "tests/layer_probe.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "tests/read_selection.h"

namespace dsv4 {
namespace {

absl::Status CopyIn(Stream& stream, const float* values, const TensorView& view) {
  const int64_t count = view.num_elements();
  if (view.dtype == DType::kF32) return stream.CopyToDevice(view.data, values, view.num_bytes());
  std::vector<Bf16> rounded(count);
  for (int64_t i = 0; i < count; ++i) rounded[i] = Bf16FromFloat(values[i]);
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(view.data, rounded.data(), view.num_bytes()));
  return stream.Synchronize();
}

absl::Status CopyOut(Stream& stream, const TensorView& view, std::vector<float>& appended) {
  const int64_t count = view.num_elements();
  const size_t offset = appended.size();
  appended.resize(offset + count);
  if (view.dtype == DType::kF32) {
    DSV4_RETURN_IF_ERROR(stream.CopyToHost(appended.data() + offset, view.data, view.num_bytes()));
    return stream.Synchronize();
  }
  std::vector<Bf16> values(count);
  DSV4_RETURN_IF_ERROR(stream.CopyToHost(values.data(), view.data, view.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  for (int64_t i = 0; i < count; ++i) appended[offset + i] = ToFloat(values[i]);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LayerProbe>> LayerProbe::Create(Device& device, const ModelConfig& config,
                                                               const ModelWeights& weights,
                                                               const NumericOptions& numeric, int64_t positions,
                                                               int64_t chunk) {
  std::unique_ptr<LayerProbe> probe(new LayerProbe);
  probe->positions_ = positions;
  probe->chunk_ = chunk;
  DecoderOptions options;
  options.numeric = numeric;
  options.sizes = {
      .max_requests = 1, .max_context = positions, .max_rows_per_request = chunk, .cache_tokens = positions};
  options.max_rows = chunk;
  options.max_logit_rows = 1;
  options.poison = true;
  DSV4_ASSIGN_OR_RETURN(probe->decoder_, Decoder::Create(device, config, weights, options));
  DSV4_ASSIGN_OR_RETURN(probe->stream_, device.CreateStream());
  const std::vector<CacheGroupPlan> groups = probe->decoder_->cache_plan().Groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<int32_t> blocks(groups[g].table_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    DSV4_RETURN_IF_ERROR(
        probe->decoder_->step_state().SetBlockTable(*probe->stream_, static_cast<int64_t>(g), 0, blocks));
  }
  return probe;
}

absl::StatusOr<LayerResult> LayerProbe::Run(int64_t layer, const std::vector<float>& inputs) {
  const int64_t hidden = decoder_->config().hidden_size;
  if (layer < 0 || layer >= decoder_->config().num_layers()) {
    return absl::InvalidArgumentError(
        StrCat("layer: expected 0 to ", decoder_->config().num_layers() - 1, ", got ", layer));
  }
  if (static_cast<int64_t>(inputs.size()) != positions_ * hidden) {
    return absl::InvalidArgumentError(
        StrCat("inputs: expected ", positions_, " rows of ", hidden, " values, got ", inputs.size(), " values"));
  }
  LayerResult result;
  for (int64_t first = 0; first < positions_; first += chunk_) {
    DSV4_RETURN_IF_ERROR(
        RunChunk(layer, inputs.data() + first * hidden, first, std::min(chunk_, positions_ - first), result));
  }
  const Attention& attention = decoder_->attention(layer);
  if (attention.kind().compressed()) {
    const int64_t count = positions_ / attention.kind().ratio;
    DSV4_RETURN_IF_ERROR(ReadRows(attention.compressor()->entries(), count, result.entries));
    if (attention.indexer().has_value()) {
      DSV4_RETURN_IF_ERROR(ReadRows(attention.indexer()->keys(), count, result.indexer_keys));
    }
  }
  return result;
}

absl::Status LayerProbe::RunChunk(int64_t layer, const float* inputs, int64_t first_position, int64_t count,
                                  LayerResult& result) {
  StepState& step = decoder_->step_state();
  step.ClearHostInputs();
  for (int64_t i = 0; i < count; ++i) {
    *step.host_inputs().requests.At<int32_t>(i) = 0;
    *step.host_inputs().positions.At<int64_t>(i) = first_position + i;
  }
  DSV4_RETURN_IF_ERROR(step.Upload(*stream_));
  const BlockScratch scratch = decoder_->scratch().FirstRows(count);
  DSV4_RETURN_IF_ERROR(CopyIn(*stream_, inputs, scratch.x));

  const Attention& attention = decoder_->attention(layer);
  const bool indexed = attention.indexer().has_value();
  const Selection selection = indexed ? decoder_->selection(layer).FirstRows(count) : Selection{};
  DSV4_RETURN_IF_ERROR(step.RecordMetadata(*stream_, count));
  DSV4_RETURN_IF_ERROR(
      attention.Record(*stream_, step.Context(count), scratch.x, scratch.attention, selection, scratch.y));
  DSV4_RETURN_IF_ERROR(CopyOut(*stream_, scratch.y, result.attn_out));
  if (!indexed) return absl::OkStatus();

  DSV4_ASSIGN_OR_RETURN(const HostSelection host, HostSelection::Read(*stream_, selection));
  for (int64_t i = 0; i < count; ++i) {
    result.selection.push_back(host.Chosen(i));
    result.scores.push_back(host.Scores(i, (first_position + i + 1) / attention.kind().ratio));
  }
  return absl::OkStatus();
}

// Entry j is at slot j: the probe's block tables are the identity.
absl::Status LayerProbe::ReadRows(const PagedRows& cache, int64_t count, std::vector<float>& rows) {
  std::vector<uint8_t> pages(cache.pages.num_bytes());
  DSV4_RETURN_IF_ERROR(stream_->CopyToHost(pages.data(), cache.pages.data, cache.pages.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream_->Synchronize());
  PagedRows host = cache;
  host.pages.data = pages.data();
  rows.resize(count * cache.row_size);
  for (int64_t j = 0; j < count; ++j) DecodeRow(host, j, rows.data() + j * cache.row_size);
  return absl::OkStatus();
}

}  // namespace dsv4
