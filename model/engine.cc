#include "model/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

absl::Status CheckTokens(const char* name, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size) {
      return absl::InvalidArgumentError(
          StrCat(name, "[", i, "]: expected a token in 0 .. ", vocab_size - 1, ", got ", tokens[i]));
    }
  }
  return absl::OkStatus();
}

// What the decoder does not check, and what must hold before sizes are multiplied.
absl::Status CheckOptions(const EngineOptions& options) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  for (auto [name, value, minimum] :
       {std::tuple<const char*, int64_t, int64_t>{"max_requests", options.max_requests, 1},
        {"max_context", options.max_context, 1},
        {"max_step_rows", options.max_step_rows, 1},
        {"extra_pads", options.extra_pads, 0}}) {
    if (value >= minimum && value <= kMaxSize) continue;
    return absl::InvalidArgumentError(StrCat(name, ": expected ", minimum, " to ", kMaxSize, ", got ", value));
  }
  if (options.max_step_rows < options.max_requests) {
    return absl::InvalidArgumentError(StrCat("max_step_rows: expected at least max_requests = ", options.max_requests,
                                             ", got ", options.max_step_rows));
  }
  if (options.prefill_chunk < 1 || options.prefill_chunk > options.max_step_rows) {
    return absl::InvalidArgumentError(StrCat("prefill_chunk: expected 1 to max_step_rows = ", options.max_step_rows,
                                             ", got ", options.prefill_chunk));
  }
  if (options.cache_tokens < 0) {
    return absl::InvalidArgumentError(StrCat("cache_tokens: expected at least 0, got ", options.cache_tokens));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t StepBucket(int64_t live_rows, int64_t max_rows) {
  int64_t rows = 1;
  while (rows < live_rows) rows *= 2;
  return std::min(rows, max_rows);
}

int32_t Engine::State::TokenAt(int64_t position) const {
  const int64_t prompt_size = static_cast<int64_t>(request.prompt.size());
  if (position < prompt_size) return request.prompt[position];
  const int64_t index = position - prompt_size;
  if (index < static_cast<int64_t>(outputs.size())) return outputs[index];
  if (index < static_cast<int64_t>(request.forced.size())) return request.forced[index];
  return -1;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(Device& device, const ModelConfig& config,
                                                       const ModelWeights& weights, const EngineOptions& options) {
  DSV4_RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<Engine> engine(new Engine(options));
  DSV4_ASSIGN_OR_RETURN(engine->stream_, device.CreateStream());

  DecoderOptions decoder_options;
  decoder_options.numeric = options.numeric;
  decoder_options.sizes.max_requests = options.max_requests;
  decoder_options.sizes.max_context = options.max_context;
  // No request has more rows in a step, no step more rows, than there can be tokens.
  decoder_options.sizes.max_rows_per_request = std::min(options.prefill_chunk, options.max_context);
  decoder_options.sizes.cache_tokens =
      options.cache_tokens > 0 ? options.cache_tokens : options.max_requests * options.max_context;
  engine->options_.max_step_rows = std::min(options.max_step_rows, options.max_requests * options.max_context);
  decoder_options.max_rows = engine->options_.max_step_rows + options.extra_pads;
  decoder_options.max_logit_rows = options.max_requests;
  decoder_options.mtp = options.mtp;
  decoder_options.keep_selections = options.keep_selections;
  decoder_options.poison = options.poison;
  DSV4_ASSIGN_OR_RETURN(engine->decoder_, Decoder::Create(device, config, weights, decoder_options));

  engine->groups_ = engine->decoder_->cache_plan().Groups();
  for (const CacheGroupPlan& group : engine->groups_) {
    engine->pools_.emplace_back(static_cast<int32_t>(group.num_blocks));
  }
  for (int64_t row = options.max_requests - 1; row >= 0; --row) engine->free_rows_.push_back(row);
  engine->host_tokens_.resize(options.max_requests);
  if (options.copy_logits) {
    engine->host_logits_.resize(options.max_requests * config.vocab_size);
    if (options.mtp) engine->host_mtp_logits_.resize(options.max_requests * config.vocab_size);
  }
  return engine;
}

absl::Status Engine::CheckRequest(const Request& request) const {
  const ModelConfig& config = decoder_->config();
  const int64_t prompt_size = static_cast<int64_t>(request.prompt.size());
  if (prompt_size == 0) return absl::InvalidArgumentError("prompt: expected at least one token, got none");
  if (request.max_new_tokens < 1) {
    return absl::InvalidArgumentError(
        StrCat("max_new_tokens: expected at least 1, got ", request.max_new_tokens));
  }
  DSV4_RETURN_IF_ERROR(CheckTokens("prompt", request.prompt, config.vocab_size));
  DSV4_RETURN_IF_ERROR(CheckTokens("forced", request.forced, config.vocab_size));
  if (static_cast<int64_t>(request.forced.size()) > request.max_new_tokens) {
    return absl::InvalidArgumentError(StrCat("forced: expected at most max_new_tokens = ", request.max_new_tokens,
                                             " tokens, got ", request.forced.size()));
  }
  if (!(request.temperature >= 0.0f) || std::isinf(request.temperature)) {
    return absl::InvalidArgumentError(
        StrCat("temperature: expected a finite value of at least 0, got ", request.temperature));
  }
  // The last output token is never put into the caches.
  if (prompt_size > options_.max_context || request.max_new_tokens - 1 > options_.max_context - prompt_size) {
    return absl::InvalidArgumentError(StrCat("prompt of ", prompt_size, " tokens with ", request.max_new_tokens,
                                             " to output: expected at most max_context = ", options_.max_context,
                                             " tokens in the caches"));
  }
  for (const CacheGroupPlan& group : groups_) {
    const int64_t blocks = group.BlocksFor(prompt_size + request.max_new_tokens - 1);
    if (blocks > group.num_blocks) {
      return absl::InvalidArgumentError(StrCat("prompt of ", prompt_size, " tokens with ", request.max_new_tokens,
                                               " to output: needs ", blocks, " blocks of a cache that has ",
                                               group.num_blocks));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Engine::Submit(Request request) {
  DSV4_RETURN_IF_ERROR(CheckRequest(request));
  const int64_t id = next_id_++;
  State& state = requests_[id];
  state.id = id;
  state.request = std::move(request);
  waiting_.push_back(id);
  return id;
}

absl::Status Engine::Cancel(int64_t request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return absl::NotFoundError(StrCat("request ", request_id, ": not known"));
  State& state = found->second;
  if (state.phase == RequestPhase::kFinished) return absl::OkStatus();
  if (state.phase == RequestPhase::kWaiting) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), request_id));
    state.phase = RequestPhase::kFinished;
    return absl::OkStatus();
  }
  return Finish(state);
}

absl::Status Engine::Forget(int64_t request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return absl::NotFoundError(StrCat("request ", request_id, ": not known"));
  if (found->second.phase != RequestPhase::kFinished) {
    return absl::FailedPreconditionError(StrCat("request ", request_id, ": not finished"));
  }
  requests_.erase(found);
  return absl::OkStatus();
}

bool Engine::ReserveBlocks(State& state) {
  const int64_t tokens = state.cached_tokens();
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].BlocksFor(tokens) > pools_[g].num_free()) return false;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    state.blocks.push_back(*pools_[g].Allocate(groups_[g].BlocksFor(tokens)));
  }
  return true;
}

// First come, first served: a request that does not fit yet is not overtaken.
absl::Status Engine::Admit() {
  while (!waiting_.empty() && !free_rows_.empty()) {
    State& state = requests_.at(waiting_.front());
    if (!ReserveBlocks(state)) break;
    waiting_.pop_front();
    state.request_row = free_rows_.back();
    free_rows_.pop_back();
    state.phase = RequestPhase::kPrefill;
    active_.push_back(state.id);
    for (size_t g = 0; g < groups_.size(); ++g) {
      DSV4_RETURN_IF_ERROR(decoder_->step_state().SetBlockTable(*stream_, static_cast<int64_t>(g), state.request_row,
                                                                state.blocks[g]));
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::Finish(State& state) {
  for (size_t g = 0; g < state.blocks.size(); ++g) {
    DSV4_RETURN_IF_ERROR(pools_[g].Release(state.blocks[g]));
  }
  state.blocks.clear();
  free_rows_.push_back(state.request_row);
  state.request_row = -1;
  state.phase = RequestPhase::kFinished;
  active_.erase(std::find(active_.begin(), active_.end(), state.id));
  return absl::OkStatus();
}

// Every decoding request gets its row first; prompts share what is left, in the order of admission.
std::vector<Engine::PlannedRow> Engine::PlanRows(StepReport& report) {
  std::vector<PlannedRow> rows;
  for (int64_t id : active_) {
    State& state = requests_.at(id);
    if (state.phase != RequestPhase::kDecode) continue;
    rows.push_back({&state, state.committed, true});
  }
  report.decode_rows = static_cast<int64_t>(rows.size());
  for (int64_t id : active_) {
    State& state = requests_.at(id);
    if (state.phase != RequestPhase::kPrefill) continue;
    const int64_t prompt_size = static_cast<int64_t>(state.request.prompt.size());
    const int64_t room = options_.max_step_rows - static_cast<int64_t>(rows.size());
    const int64_t chunk = std::min({options_.prefill_chunk, prompt_size - state.committed, room});
    for (int64_t position = state.committed; position < state.committed + chunk; ++position) {
      rows.push_back({&state, position, position == prompt_size - 1});
    }
  }
  const int64_t live = static_cast<int64_t>(rows.size());
  report.prefill_rows = live - report.decode_rows;
  rows.resize(StepBucket(live, options_.max_step_rows) + options_.extra_pads);
  if (options_.shuffle_seed != 0) std::shuffle(rows.begin(), rows.end(), random_);
  report.rows = static_cast<int64_t>(rows.size());
  return rows;
}

void Engine::FillInputs(const std::vector<PlannedRow>& rows, StepReport& report) {
  StepState& step = decoder_->step_state();
  StepInputs& inputs = step.host_inputs();
  step.ClearHostInputs();
  int64_t logit_row = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const PlannedRow& row = rows[i];
    if (row.state == nullptr) continue;
    const State& state = *row.state;
    const int64_t index = static_cast<int64_t>(i);
    report.live_rows.push_back({index, state.id, row.position});
    *inputs.token_ids.At<int32_t>(index) = state.TokenAt(row.position);
    *inputs.requests.At<int32_t>(index) = static_cast<int32_t>(state.request_row);
    *inputs.positions.At<int64_t>(index) = row.position;
    *inputs.next_tokens.At<int32_t>(index) = state.TokenAt(row.position + 1);
    if (!row.wants_logits) continue;
    *inputs.logit_rows.At<int32_t>(logit_row) = static_cast<int32_t>(i);
    *inputs.temperatures.At<float>(logit_row) = state.request.temperature;
    *inputs.seeds.At<int64_t>(logit_row) = state.request.seed;
    *inputs.request_ids.At<int64_t>(logit_row) = state.id;
    ++logit_row;
  }
}

absl::Status Engine::CopyOutputs() {
  const DecoderOutputs& outputs = decoder_->outputs();
  auto copy = [&](void* host, const TensorView& view) {
    return stream_->CopyToHost(host, view.data, view.num_bytes());
  };
  DSV4_RETURN_IF_ERROR(copy(host_tokens_.data(), outputs.tokens));
  if (options_.copy_logits) {
    DSV4_RETURN_IF_ERROR(copy(host_logits_.data(), outputs.logits));
    if (options_.mtp) DSV4_RETURN_IF_ERROR(copy(host_mtp_logits_.data(), outputs.mtp_logits));
  }
  return stream_->Synchronize();
}

absl::StatusOr<StepReport> Engine::Step() {
  if (!has_work()) return absl::FailedPreconditionError("step: there is no request to work on");
  DSV4_RETURN_IF_ERROR(Admit());

  StepReport report;
  const std::vector<PlannedRow> rows = PlanRows(report);
  FillInputs(rows, report);
  DSV4_RETURN_IF_ERROR(decoder_->step_state().Upload(*stream_));
  DSV4_RETURN_IF_ERROR(decoder_->Record(*stream_, report.rows));
  DSV4_RETURN_IF_ERROR(CopyOutputs());

  const size_t vocab_size = static_cast<size_t>(decoder_->config().vocab_size);
  const int32_t eos_token = decoder_->config().eos_token_id;
  std::vector<State*> finished;
  size_t logit_row = 0;
  for (const PlannedRow& row : rows) {
    if (row.state == nullptr) continue;
    State& state = *row.state;
    ++state.committed;
    if (!row.wants_logits) continue;

    StepOutput output;
    output.request_id = state.id;
    output.index = static_cast<int64_t>(state.outputs.size());
    const bool forced = output.index < static_cast<int64_t>(state.request.forced.size());
    output.token = forced ? state.request.forced[output.index] : host_tokens_[logit_row];
    if (options_.copy_logits) {
      output.logits = absl::MakeConstSpan(host_logits_).subspan(logit_row * vocab_size, vocab_size);
      if (options_.mtp) {
        output.mtp_logits = absl::MakeConstSpan(host_mtp_logits_).subspan(logit_row * vocab_size, vocab_size);
      }
    }
    ++logit_row;
    state.outputs.push_back(output.token);
    state.phase = RequestPhase::kDecode;
    report.outputs.push_back(output);
    const bool ended = output.token == eos_token && !forced && !state.request.ignore_eos;
    if (ended || static_cast<int64_t>(state.outputs.size()) == state.request.max_new_tokens) {
      finished.push_back(&state);
    }
  }
  for (State* state : finished) {
    report.finished.push_back(state->id);
    DSV4_RETURN_IF_ERROR(Finish(*state));
  }
  return report;
}

std::vector<int32_t> Engine::free_blocks() const {
  std::vector<int32_t> free;
  for (const BlockPool& pool : pools_) free.push_back(pool.num_free());
  return free;
}

}  // namespace dsv4
