#include "tests/decoder_driver.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "runtime/status.h"

namespace dsv4 {

std::vector<StepToken> TokensOf(int32_t request, const std::vector<int32_t>& sequence, int64_t begin, int64_t end) {
  std::vector<StepToken> tokens;
  for (int64_t p = begin; p < end; ++p) {
    const int32_t next = p + 1 < static_cast<int64_t>(sequence.size()) ? sequence[p + 1] : -1;
    tokens.push_back({.request = request, .position = p, .token = sequence[p], .next_token = next});
  }
  return tokens;
}

absl::StatusOr<std::unique_ptr<DecoderDriver>> DecoderDriver::Create(const LoadedModel& model,
                                                                     const DecoderOptions& options) {
  std::unique_ptr<DecoderDriver> driver(new DecoderDriver);
  DSV4_ASSIGN_OR_RETURN(driver->stream_, model.device->CreateStream());
  DSV4_ASSIGN_OR_RETURN(driver->decoder_, Decoder::Create(*model.device, model.config, model.weights, options));
  DSV4_RETURN_IF_ERROR(driver->AssignBlocks(0));
  return driver;
}

absl::Status DecoderDriver::AssignBlocks(uint64_t seed) {
  const std::vector<CacheGroupPlan> groups = decoder_->cache_plan().Groups();
  const int64_t requests = decoder_->options().sizes.max_requests;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t each = groups[g].table_blocks;
    if (groups[g].num_blocks < each * requests) {
      return absl::FailedPreconditionError("blocks: too few for every request to have a full table");
    }
    std::vector<int32_t> blocks(groups[g].num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    if (seed != 0) std::shuffle(blocks.begin(), blocks.end(), std::mt19937_64(seed));
    for (int64_t r = 0; r < requests; ++r) {
      DSV4_RETURN_IF_ERROR(decoder_->step_state().SetBlockTable(
          *stream_, static_cast<int64_t>(g), r, absl::MakeConstSpan(blocks).subspan(r * each, each)));
    }
  }
  return stream_->Synchronize();
}

void DecoderDriver::Fill(const std::vector<StepToken>& tokens) {
  StepState& step = decoder_->step_state();
  step.ClearHostInputs();
  const StepInputs& inputs = step.host_inputs();
  wanted_logits_ = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i);
    *inputs.token_ids.At<int32_t>(row) = tokens[i].token;
    *inputs.requests.At<int32_t>(row) = tokens[i].request;
    *inputs.positions.At<int64_t>(row) = tokens[i].position;
    *inputs.next_tokens.At<int32_t>(row) = tokens[i].next_token;
    if (!tokens[i].wants_logits) continue;
    *inputs.logit_rows.At<int32_t>(wanted_logits_++) = static_cast<int32_t>(row);
  }
}

absl::Status DecoderDriver::Upload() {
  DSV4_RETURN_IF_ERROR(decoder_->step_state().Upload(*stream_));
  return stream_->Synchronize();
}

absl::Status DecoderDriver::Run(const std::vector<StepToken>& tokens, int64_t rows) {
  Fill(tokens);
  DSV4_RETURN_IF_ERROR(Upload());
  return decoder_->Record(*stream_, rows);
}

absl::StatusOr<std::vector<std::vector<float>>> DecoderDriver::Read(const TensorView& logits) {
  std::vector<std::vector<float>> rows;
  for (int64_t l = 0; l < wanted_logits_; ++l) {
    const TensorView row = logits.Index(l);
    rows.emplace_back(row.num_elements());
    DSV4_RETURN_IF_ERROR(stream_->CopyToHost(rows.back().data(), row.data, row.num_bytes()));
  }
  DSV4_RETURN_IF_ERROR(stream_->Synchronize());
  return rows;
}

std::vector<TensorView> DecoderDriver::Caches() const {
  std::vector<TensorView> caches;
  for (int64_t layer = 0; layer < decoder_->config().num_layers(); ++layer) {
    const Attention& attention = decoder_->attention(layer);
    caches.push_back(attention.window().pages);
    if (attention.compressor().has_value()) {
      caches.push_back(attention.compressor()->state_cache());
      caches.push_back(attention.compressor()->entries().pages);
    }
    if (attention.indexer().has_value()) {
      caches.push_back(attention.indexer()->compressor().state_cache());
      caches.push_back(attention.indexer()->keys().pages);
    }
  }
  return caches;
}

absl::StatusOr<std::vector<std::vector<uint8_t>>> DecoderDriver::CacheBytes() {
  std::vector<std::vector<uint8_t>> bytes;
  for (const TensorView& cache : Caches()) {
    bytes.emplace_back(cache.num_bytes());
    DSV4_RETURN_IF_ERROR(stream_->CopyToHost(bytes.back().data(), cache.data, cache.num_bytes()));
  }
  DSV4_RETURN_IF_ERROR(stream_->Synchronize());
  return bytes;
}

}  // namespace dsv4
