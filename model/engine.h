// Serves requests with one decoder: admits them, prefills their prompts in chunks, decodes all of them together at their
// different positions, and reuses their blocks when they finish. Nothing is allocated on the device after Create.
//
//   DSV4_ASSIGN_OR_RETURN(auto engine, Engine::Create(*device, config, weights, options));
//   DSV4_ASSIGN_OR_RETURN(int64_t id, engine->Submit({.prompt = {1, 2, 3}, .max_new_tokens = 16}));
//   while (engine->has_work()) {
//     DSV4_ASSIGN_OR_RETURN(StepReport report, engine->Step());
//     for (const StepOutput& output : report.outputs) ...            // a token each
//   }
//   const std::vector<int32_t>& tokens = engine->outputs(id);
//
// A step is a padded batch: its rows are rounded up to a bucket, the rest are pads. All blocks that a request can need are
// reserved when it is admitted, so a request never runs out of cache midway; one that does not fit yet waits.
#ifndef DSV4_MODEL_ENGINE_H_
#define DSV4_MODEL_ENGINE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/config.h"
#include "model/decoder.h"
#include "model/numeric_options.h"
#include "model/weights.h"
#include "runtime/block_pool.h"
#include "runtime/device.h"

namespace dsv4 {

struct EngineOptions {
  NumericOptions numeric;
  int64_t max_requests = 8;    // decoded at a time
  int64_t max_context = 1024;  // tokens that one request may put into the caches
  int64_t max_step_rows = 64;  // at least max_requests
  int64_t prefill_chunk = 32;  // prompt tokens of one request in one step, at most max_step_rows
  int64_t cache_tokens = 0;    // room in the entry caches for all requests together; 0: max_requests * max_context
  bool mtp = false;            // run the multi-token-prediction block beside the model
  bool copy_logits = false;    // copy logits to the host after each step, into StepOutput

  // For tests: see DecoderOptions; pads added to every step, and a seed for a random order of the step's rows.
  bool keep_selections = false;
  bool poison = false;
  int64_t extra_pads = 0;
  uint64_t shuffle_seed = 0;  // 0: requests in order, pads last
};

struct Request {
  std::vector<int32_t> prompt;      // at least one token
  int64_t max_new_tokens = 0;       // at least 1
  std::vector<int32_t> forced = {};  // output tokens to take instead of sampled ones, from the first on
  float temperature = 0.0f;         // 0: greedy
  int64_t seed = 0;
  bool ignore_eos = false;
};

enum class RequestPhase : uint8_t { kWaiting, kPrefill, kDecode, kFinished };

// One token that a step put out. The spans are valid until the next step and empty unless copy_logits.
struct StepOutput {
  int64_t request_id = 0;
  int64_t index = 0;  // of the token among the request's outputs
  int32_t token = 0;
  absl::Span<const float> logits;
  absl::Span<const float> mtp_logits;
};

// Where a token of a request was in the step.
struct StepRow {
  int64_t row = 0;
  int64_t request_id = 0;
  int64_t position = 0;
};

struct StepReport {
  int64_t rows = 0;  // pads included
  int64_t prefill_rows = 0;
  int64_t decode_rows = 0;
  std::vector<StepRow> live_rows;
  std::vector<StepOutput> outputs;
  std::vector<int64_t> finished;  // request ids
};

// The number of rows that a step of `live_rows` is padded to: the next power of two, at most max_rows.
int64_t StepBucket(int64_t live_rows, int64_t max_rows);

class Engine {
 public:
  // `device` and `weights` must outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(Device& device, const ModelConfig& config,
                                                        const ModelWeights& weights, const EngineOptions& options);

  // Queues a request and returns its id. InvalidArgument, naming what is wrong: an empty prompt, a token out of range, no
  // token to output, more forced tokens than outputs, a negative temperature, a request that can never fit.
  absl::StatusOr<int64_t> Submit(Request request);

  // Ends a request and frees its blocks; its outputs so far stay. NotFound if there is none of this id.
  absl::Status Cancel(int64_t request_id);

  // Forgets a finished request.
  absl::Status Forget(int64_t request_id);

  bool has_work() const { return !waiting_.empty() || !active_.empty(); }

  // One step over all active requests. FailedPrecondition without work.
  absl::StatusOr<StepReport> Step();

  // The id must be known.
  RequestPhase phase(int64_t request_id) const { return requests_.at(request_id).phase; }
  const std::vector<int32_t>& outputs(int64_t request_id) const { return requests_.at(request_id).outputs; }

  Decoder& decoder() { return *decoder_; }
  // Free blocks of each group of CachePlan::Groups().
  std::vector<int32_t> free_blocks() const;

 private:
  struct State {
    int64_t id = 0;
    Request request;
    RequestPhase phase = RequestPhase::kWaiting;
    int64_t request_row = -1;  // of the block tables
    std::vector<std::vector<int32_t>> blocks;  // of each group
    int64_t committed = 0;  // tokens in the caches
    std::vector<int32_t> outputs;

    int64_t cached_tokens() const { return static_cast<int64_t>(request.prompt.size()) + request.max_new_tokens - 1; }
    // The token at `position`, or -1 if it is not known yet.
    int32_t TokenAt(int64_t position) const;
  };

  struct PlannedRow {
    State* state = nullptr;  // null: a pad
    int64_t position = 0;
    bool wants_logits = false;
  };

  explicit Engine(const EngineOptions& options) : options_(options), random_(options.shuffle_seed) {}

  absl::Status CheckRequest(const Request& request) const;
  absl::Status Admit();
  // False, and nothing taken, if a group has too few free blocks.
  bool ReserveBlocks(State& state);
  absl::Status Finish(State& state);
  std::vector<PlannedRow> PlanRows(StepReport& report);
  void FillInputs(const std::vector<PlannedRow>& rows, StepReport& report);
  absl::Status CopyOutputs();

  EngineOptions options_;
  std::mt19937_64 random_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Decoder> decoder_;
  std::vector<CacheGroupPlan> groups_;
  std::vector<BlockPool> pools_;  // a group each
  std::vector<int64_t> free_rows_;
  std::map<int64_t, State> requests_;
  std::deque<int64_t> waiting_;  // ids
  std::vector<int64_t> active_;  // ids, in the order of admission
  int64_t next_id_ = 0;

  std::vector<int32_t> host_tokens_;      // [L]
  std::vector<float> host_logits_;        // [L, V]
  std::vector<float> host_mtp_logits_;    // [L, V]
};

}  // namespace dsv4

#endif  // DSV4_MODEL_ENGINE_H_
