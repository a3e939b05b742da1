// The life of requests in an engine: admitting, waiting, prefill, decoding, ending; blocks, capacity, refusals.
#include "model/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/numeric_options.h"
#include "runtime/device.h"
#include "runtime/stream.h"
#include "runtime/testing.h"
#include "tests/generate.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

constexpr NumericOptions kFp32 = {.precision = Precision::kFp32};

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    DSV4_ASSERT_OK_AND_ASSIGN(model_,
                              LoadRandomModel(RandomModel(SmallModelConfig({kWindowOnly, kRatio4}), /*seed=*/31)));
  }

  std::vector<int32_t> Prompt(int64_t size, uint64_t seed = 1) const {
    return RandomTokens(size, model_.config.vocab_size, seed);
  }

  absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options) {
    return Engine::Create(*model_.device, model_.config, model_.weights, options);
  }

  // What the request gives without company.
  absl::StatusOr<Generation> Alone(const Request& request, int64_t id = 0) {
    return GenerateAlone(model_, {.numeric = kFp32, .max_requests = 1, .max_context = 1024, .copy_logits = true},
                         request, id);
  }

  LoadedModel model_;
};

// One step, which must go well and work on something.
StepReport Step(Engine& engine) {
  absl::StatusOr<StepReport> report = engine.Step();
  EXPECT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(!report.ok() || !report->live_rows.empty()) << "a step of pads";
  return report.ok() ? *std::move(report) : StepReport{};
}

// All steps that there are, looked at by `visit`; they end early if something is wrong.
template <typename Visit>
void Drain(Engine& engine, const Visit& visit) {
  while (engine.has_work() && !testing::Test::HasFailure()) visit(Step(engine));
}
void Drain(Engine& engine) {
  Drain(engine, [](const StepReport&) {});
}

int64_t Submit(Engine& engine, const Request& request) {
  absl::StatusOr<int64_t> id = engine.Submit(request);
  EXPECT_TRUE(id.ok()) << id.status();
  return id.value_or(-1);
}

int32_t ArgMax(absl::Span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST(StepBucket, IsTheNextPowerOfTwoUpToTheLargestStep) {
  const std::vector<std::pair<int64_t, int64_t>> of_64 = {{1, 1},   {2, 2},   {3, 4},   {4, 4},   {5, 8}, {31, 32},
                                                          {32, 32}, {33, 64}, {63, 64}, {64, 64}, {0, 1}};
  for (const auto& [rows, bucket] : of_64) EXPECT_EQ(StepBucket(rows, 64), bucket) << rows;
  EXPECT_EQ(StepBucket(33, 48), 48);
  EXPECT_EQ(StepBucket(48, 48), 48);
  EXPECT_EQ(StepBucket(1, 1), 1);
}

TEST_F(EngineTest, GreedyTokensAreTheLargestLogits) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32, .copy_logits = true}));
  const int64_t id = Submit(*engine, {.prompt = Prompt(5), .max_new_tokens = 6, .ignore_eos = true});
  int64_t outputs = 0;
  Drain(*engine, [&](const StepReport& report) {
    for (const StepOutput& output : report.outputs) {
      EXPECT_EQ(output.request_id, id);
      EXPECT_EQ(output.index, outputs++);
      ASSERT_EQ(static_cast<int64_t>(output.logits.size()), model_.config.vocab_size);
      EXPECT_EQ(output.token, ArgMax(output.logits));
      EXPECT_TRUE(output.mtp_logits.empty()) << "without MTP";
    }
  });
  EXPECT_EQ(outputs, 6);
  EXPECT_EQ(engine->phase(id), RequestPhase::kFinished);
}

TEST_F(EngineTest, ReportsWhatAStepWasMadeOf) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32, .max_step_rows = 12, .prefill_chunk = 7}));
  const int64_t a = Submit(*engine, {.prompt = Prompt(2), .max_new_tokens = 3, .ignore_eos = true});
  const int64_t b = Submit(*engine, {.prompt = Prompt(15), .max_new_tokens = 2, .ignore_eos = true});
  const int64_t c = Submit(*engine, {.prompt = Prompt(9), .max_new_tokens = 1, .ignore_eos = true});
  EXPECT_EQ(engine->phase(a), RequestPhase::kWaiting);

  // Both rows of a, a chunk of b, and what is left of the step for c.
  StepReport report = Step(*engine);
  EXPECT_EQ(report.rows, 12);
  EXPECT_EQ(report.prefill_rows, 2 + 7 + 3);
  EXPECT_EQ(report.decode_rows, 0);
  ASSERT_EQ(report.live_rows.size(), 12u);
  for (int64_t row = 0; row < 12; ++row) EXPECT_EQ(report.live_rows[row].row, row);
  EXPECT_EQ(report.live_rows[1].request_id, a);
  EXPECT_EQ(report.live_rows[1].position, 1);
  EXPECT_EQ(report.live_rows[8].request_id, b);
  EXPECT_EQ(report.live_rows[8].position, 6);
  EXPECT_EQ(report.live_rows[11].request_id, c);
  EXPECT_EQ(report.live_rows[11].position, 2);
  ASSERT_EQ(report.outputs.size(), 1u);
  EXPECT_EQ(report.outputs[0].request_id, a);
  EXPECT_TRUE(report.outputs[0].logits.empty()) << "without copy_logits";
  EXPECT_EQ(engine->phase(a), RequestPhase::kDecode);
  EXPECT_EQ(engine->phase(b), RequestPhase::kPrefill);

  // The decoding request goes first.
  report = Step(*engine);
  EXPECT_EQ(report.decode_rows, 1);
  EXPECT_EQ(report.prefill_rows, 7 + 4);
  EXPECT_EQ(report.live_rows[0].request_id, a);
  EXPECT_EQ(report.live_rows[0].position, 2);

  report = Step(*engine);
  EXPECT_EQ(report.decode_rows, 1);
  EXPECT_EQ(report.prefill_rows, 1 + 2);
  EXPECT_EQ(report.rows, 4);
  EXPECT_EQ(report.finished, (std::vector<int64_t>{a, c}));

  report = Step(*engine);
  EXPECT_EQ(report.decode_rows, 1);
  EXPECT_EQ(report.prefill_rows, 0);
  EXPECT_EQ(report.rows, 1);
  EXPECT_EQ(report.finished, (std::vector<int64_t>{b}));
  EXPECT_FALSE(engine->has_work());
}

TEST_F(EngineTest, EndOfSequenceEndsARequestAndIsOutput) {
  const Request request = {
      .prompt = Prompt(7), .max_new_tokens = 20, .temperature = 3.0f, .seed = 1, .ignore_eos = true};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation without, Alone(request));
  // Make the third token that comes the end, where it has not come before.
  const int32_t eos = without.tokens[2];
  ASSERT_NE(without.tokens[0], eos);
  ASSERT_NE(without.tokens[1], eos);
  model_.config.eos_token_id = eos;
  const std::vector<int32_t> first_three(without.tokens.begin(), without.tokens.begin() + 3);

  Request stops = request;
  stops.ignore_eos = false;
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation stopped, Alone(stops));
  EXPECT_EQ(stopped.tokens, first_three);

  DSV4_ASSERT_OK_AND_ASSIGN(const Generation ignored, Alone(request));
  EXPECT_EQ(ignored.tokens, without.tokens);

  // As the last token that may come it ends the request once.
  stops.max_new_tokens = 3;
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation last, Alone(stops));
  EXPECT_EQ(last.tokens, first_three);
}

TEST_F(EngineTest, ForcedTokensAreOutputAndDoNotEndARequest) {
  const int32_t eos = model_.config.eos_token_id;
  const std::vector<int32_t> forced = {9, eos, eos, 4};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation actual,
                            Alone({.prompt = Prompt(6), .max_new_tokens = 7, .forced = forced, .ignore_eos = true}));
  ASSERT_EQ(actual.tokens.size(), 7u);
  EXPECT_EQ(std::vector<int32_t>(actual.tokens.begin(), actual.tokens.begin() + 4), forced);
  // A prompt of all that was put in gives the same next tokens.
  std::vector<int32_t> prompt = Prompt(6);
  prompt.insert(prompt.end(), forced.begin(), forced.end());
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation expected,
                            Alone({.prompt = prompt, .max_new_tokens = 3, .ignore_eos = true}));
  EXPECT_EQ(std::vector<int32_t>(actual.tokens.begin() + 4, actual.tokens.end()), expected.tokens);

  DSV4_ASSERT_OK_AND_ASSIGN(const Generation not_ignoring,
                            Alone({.prompt = Prompt(6), .max_new_tokens = 4, .forced = forced}));
  EXPECT_EQ(not_ignoring.tokens, forced);
}

TEST_F(EngineTest, RefusesBadRequestsByName) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine,
                            MakeEngine({.numeric = kFp32, .max_requests = 2, .max_context = 600, .cache_tokens = 300}));
  const std::vector<int32_t> free_before = engine->free_blocks();
  const int32_t vocab_size = static_cast<int32_t>(model_.config.vocab_size);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();
  const struct {
    Request request;
    const char* message;
  } cases[] = {
      {{.prompt = {}, .max_new_tokens = 1}, "prompt: expected at least one token"},
      {{.prompt = {1, vocab_size}, .max_new_tokens = 1}, "prompt[1]: expected a token in 0 .. 63, got 64"},
      {{.prompt = {-1}, .max_new_tokens = 1}, "prompt[0]: expected a token in 0 .. 63, got -1"},
      {{.prompt = {1, 2, std::numeric_limits<int32_t>::min()}, .max_new_tokens = 1}, "prompt[2]"},
      {{.prompt = {1}, .max_new_tokens = 0}, "max_new_tokens: expected at least 1, got 0"},
      {{.prompt = {1}, .max_new_tokens = -5}, "max_new_tokens: expected at least 1, got -5"},
      {{.prompt = {1}, .max_new_tokens = kSmallest}, "max_new_tokens: expected at least 1"},
      {{.prompt = {1}, .max_new_tokens = 3, .forced = {1, 64}}, "forced[1]: expected a token in 0 .. 63, got 64"},
      {{.prompt = {1}, .max_new_tokens = 3, .forced = {-1}}, "forced[0]: expected a token in 0 .. 63, got -1"},
      {{.prompt = {1}, .max_new_tokens = 1, .forced = {1, 2}},
       "forced: expected at most max_new_tokens = 1 tokens, got 2"},
      {{.prompt = {1}, .max_new_tokens = 1, .temperature = -0.5f},
       "temperature: expected a finite value of at least 0"},
      {{.prompt = {1}, .max_new_tokens = 1, .temperature = nan}, "temperature"},
      {{.prompt = {1}, .max_new_tokens = 1, .temperature = infinity}, "temperature"},
      {{.prompt = Prompt(601), .max_new_tokens = 1}, "expected at most max_context = 600"},
      {{.prompt = Prompt(1), .max_new_tokens = 601}, "expected at most max_context = 600"},
      {{.prompt = Prompt(1), .max_new_tokens = kLargest}, "expected at most max_context = 600"},
  };
  for (const auto& [request, message] : cases) {
    EXPECT_THAT(engine->Submit(request), StatusIs(absl::StatusCode::kInvalidArgument, message));
  }
  EXPECT_FALSE(engine->has_work());
  EXPECT_EQ(engine->free_blocks(), free_before);
  EXPECT_THAT(engine->Step(), StatusIs(absl::StatusCode::kFailedPrecondition, "no request"));

  // Refusals leave no trace: the next request is the first.
  EXPECT_EQ(Submit(*engine, {.prompt = {1}, .max_new_tokens = 1, .temperature = 0.0f}), 0);
}

TEST_F(EngineTest, RefusesARequestThatCanNeverFit) {
  // Entry blocks span 256 tokens: room for 256 tokens, and one block for each of the two requests.
  DSV4_ASSERT_OK_AND_ASSIGN(
      auto engine, MakeEngine({.numeric = kFp32, .max_requests = 2, .max_context = 2000, .cache_tokens = 256}));
  EXPECT_THAT(engine->Submit({.prompt = Prompt(3), .max_new_tokens = 1 + 3 * 256 + 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, "needs 4 blocks of a cache that has 3"));
  EXPECT_GE(Submit(*engine, {.prompt = Prompt(3), .max_new_tokens = 3 * 256 - 2}), 0);
}

TEST_F(EngineTest, TheLastPositionThatFitsWorksAndOneMoreIsRefused) {
  constexpr int64_t kContext = 37;
  const EngineOptions options = {.numeric = kFp32,
                                 .max_requests = 1,
                                 .max_context = kContext,
                                 .max_step_rows = 8,
                                 .prefill_chunk = 8,
                                 .copy_logits = true,
                                 .poison = true};
  const Request fits = {.prompt = Prompt(20), .max_new_tokens = kContext - 20 + 1, .ignore_eos = true};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation in_a_tight_cache, GenerateAlone(model_, options, fits));
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation in_a_wide_cache, Alone(fits));
  EXPECT_EQ(static_cast<int64_t>(in_a_tight_cache.tokens.size()), fits.max_new_tokens);
  EXPECT_TRUE(SameGeneration(in_a_tight_cache, in_a_wide_cache));

  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine(options));
  Request too_long = fits;
  too_long.max_new_tokens += 1;
  EXPECT_THAT(engine->Submit(too_long),
              StatusIs(absl::StatusCode::kInvalidArgument, "expected at most max_context = 37"));
  // The whole context as a prompt: its last token's output is still wanted.
  EXPECT_GE(Submit(*engine, {.prompt = Prompt(kContext), .max_new_tokens = 1}), 0);
  Drain(*engine);
  EXPECT_EQ(engine->outputs(0).size(), 1u);
}

// Contexts of less than one entry: nothing to select from, and no block to hold.
TEST_F(EngineTest, ContextsShorterThanTheRatioWork) {
  for (int64_t context : {1, 2, 3, 4}) {
    SCOPED_TRACE(context);
    const Request request = {.prompt = Prompt(1), .max_new_tokens = context, .ignore_eos = true};
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation tight, GenerateAlone(model_,
                                                                    {.numeric = kFp32,
                                                                     .max_requests = 1,
                                                                     .max_context = context,
                                                                     .max_step_rows = 1,
                                                                     .prefill_chunk = 1,
                                                                     .copy_logits = true,
                                                                     .poison = true},
                                                                    request));
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation wide, Alone(request));
    EXPECT_TRUE(SameGeneration(tight, wide));
  }
}

TEST_F(EngineTest, RequestsComeAndGoAndBlocksAreReused) {
  // Entry blocks for 512 tokens and one each for three requests, while the requests below need far more in all.
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32,
                                                     .max_requests = 3,
                                                     .max_context = 600,
                                                     .max_step_rows = 40,
                                                     .prefill_chunk = 33,
                                                     .cache_tokens = 512,
                                                     .copy_logits = true,
                                                     .poison = true,
                                                     .extra_pads = 1,
                                                     .shuffle_seed = 8}));
  const std::vector<int32_t> free_before = engine->free_blocks();
  std::vector<Arrival> arrivals;
  std::mt19937_64 random(33);
  int64_t tokens = 0;
  for (int64_t i = 0; i < 14; ++i) {
    const int64_t prompt_size = 1 + static_cast<int64_t>(random() % (i % 3 == 0 ? 400 : 60));
    arrivals.push_back({.request = {.prompt = Prompt(prompt_size, i),
                                    .max_new_tokens = 1 + static_cast<int64_t>(random() % 12),
                                    .temperature = i % 2 == 0 ? 0.0f : 1.5f,
                                    .seed = i},
                        .step = 3 * i});
    tokens += prompt_size;
  }
  ASSERT_GT(tokens, 2 * 512);
  DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<Generation> generations, Generate(*engine, arrivals));
  for (size_t i = 0; i < arrivals.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "request " << i);
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation alone, Alone(arrivals[i].request, generations[i].id));
    EXPECT_TRUE(SameGeneration(generations[i], alone));
    EXPECT_EQ(engine->phase(generations[i].id), RequestPhase::kFinished);
  }
  EXPECT_EQ(engine->free_blocks(), free_before);
  EXPECT_FALSE(engine->has_work());
}

TEST_F(EngineTest, ARequestThatDoesNotFitYetWaitsAndIsNotOvertaken) {
  // Four entry blocks of 256 tokens.
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32,
                                                     .max_requests = 3,
                                                     .max_context = 1024,
                                                     .max_step_rows = 512,
                                                     .prefill_chunk = 512,
                                                     .cache_tokens = 256,
                                                     .copy_logits = true}));
  const std::vector<int32_t> free_before = engine->free_blocks();
  const Request three_blocks = {.prompt = Prompt(700, 1), .max_new_tokens = 3, .ignore_eos = true};
  const Request two_blocks = {.prompt = Prompt(400, 2), .max_new_tokens = 2, .ignore_eos = true};
  const Request one_block = {.prompt = Prompt(20, 3), .max_new_tokens = 2, .ignore_eos = true};
  const int64_t a = Submit(*engine, three_blocks);
  const int64_t b = Submit(*engine, two_blocks);
  const int64_t c = Submit(*engine, one_block);

  // c would fit beside a, but b was first.
  while (engine->phase(a) != RequestPhase::kFinished && !HasFailure()) {
    EXPECT_EQ(engine->phase(b), RequestPhase::kWaiting);
    EXPECT_EQ(engine->phase(c), RequestPhase::kWaiting);
    Step(*engine);
  }
  Step(*engine);
  EXPECT_EQ(engine->phase(b), RequestPhase::kDecode);
  EXPECT_EQ(engine->phase(c), RequestPhase::kDecode);
  Drain(*engine);

  const std::pair<int64_t, Request> requests[] = {{a, three_blocks}, {b, two_blocks}, {c, one_block}};
  for (const auto& [id, request] : requests) {
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation alone, Alone(request));
    EXPECT_EQ(engine->outputs(id), alone.tokens);
  }
  EXPECT_EQ(engine->free_blocks(), free_before);
}

TEST_F(EngineTest, CancelWorksInEveryPhase) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine,
                            MakeEngine({.numeric = kFp32, .max_requests = 3, .max_step_rows = 16, .prefill_chunk = 8}));
  const std::vector<int32_t> free_before = engine->free_blocks();
  const Request survivor = {.prompt = Prompt(11, 1), .max_new_tokens = 14, .ignore_eos = true};
  const int64_t stays = Submit(*engine, survivor);
  const int64_t decoding = Submit(*engine, {.prompt = Prompt(3, 2), .max_new_tokens = 30, .ignore_eos = true});
  const int64_t prefilling = Submit(*engine, {.prompt = Prompt(90, 3), .max_new_tokens = 3, .ignore_eos = true});
  const int64_t waiting = Submit(*engine, {.prompt = Prompt(4, 4), .max_new_tokens = 3, .ignore_eos = true});
  const int64_t next = Submit(*engine, survivor);
  for (int i = 0; i < 3; ++i) Step(*engine);
  ASSERT_EQ(engine->phase(stays), RequestPhase::kDecode);
  ASSERT_EQ(engine->phase(decoding), RequestPhase::kDecode);
  ASSERT_EQ(engine->phase(prefilling), RequestPhase::kPrefill);
  ASSERT_EQ(engine->phase(waiting), RequestPhase::kWaiting);

  DSV4_EXPECT_OK(engine->Cancel(waiting));
  EXPECT_EQ(engine->phase(waiting), RequestPhase::kFinished);
  EXPECT_TRUE(engine->outputs(waiting).empty());
  DSV4_EXPECT_OK(engine->Cancel(prefilling));
  EXPECT_EQ(engine->phase(prefilling), RequestPhase::kFinished);
  EXPECT_TRUE(engine->outputs(prefilling).empty());
  DSV4_EXPECT_OK(engine->Cancel(decoding));
  EXPECT_EQ(engine->phase(decoding), RequestPhase::kFinished);
  EXPECT_EQ(engine->outputs(decoding).size(), 3u) << "its outputs so far stay";
  DSV4_EXPECT_OK(engine->Cancel(decoding));
  EXPECT_THAT(engine->Cancel(99), StatusIs(absl::StatusCode::kNotFound, "request 99"));
  EXPECT_THAT(engine->Cancel(-1), StatusIs(absl::StatusCode::kNotFound, "request -1"));

  // The others go on as if nothing had been; the last begins in the blocks that came free.
  Drain(*engine, [&](const StepReport& report) {
    for (const StepRow& row : report.live_rows) EXPECT_TRUE(row.request_id == stays || row.request_id == next);
  });
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation alone, Alone(survivor));
  EXPECT_EQ(engine->outputs(stays), alone.tokens);
  EXPECT_EQ(engine->outputs(next), alone.tokens);
  EXPECT_EQ(engine->outputs(decoding).size(), 3u);
  EXPECT_EQ(engine->free_blocks(), free_before);
}

TEST_F(EngineTest, CancellingTheOnlyRequestLeavesNoWork) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32}));
  const int64_t id = Submit(*engine, {.prompt = Prompt(3), .max_new_tokens = 5});
  DSV4_EXPECT_OK(engine->Cancel(id));
  EXPECT_FALSE(engine->has_work());
  EXPECT_THAT(engine->Step(), StatusIs(absl::StatusCode::kFailedPrecondition, "no request"));
}

TEST_F(EngineTest, ForgetsFinishedRequestsOnly) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32}));
  const int64_t id = Submit(*engine, {.prompt = Prompt(3), .max_new_tokens = 2, .ignore_eos = true});
  EXPECT_THAT(engine->Forget(id), StatusIs(absl::StatusCode::kFailedPrecondition, "not finished"));
  Step(*engine);
  EXPECT_THAT(engine->Forget(id), StatusIs(absl::StatusCode::kFailedPrecondition, "not finished"));
  Step(*engine);
  ASSERT_EQ(engine->phase(id), RequestPhase::kFinished);
  DSV4_EXPECT_OK(engine->Forget(id));
  EXPECT_THAT(engine->Forget(id), StatusIs(absl::StatusCode::kNotFound, "request 0"));
  EXPECT_THAT(engine->Cancel(id), StatusIs(absl::StatusCode::kNotFound, "request 0"));
  EXPECT_EQ(Submit(*engine, {.prompt = Prompt(3), .max_new_tokens = 1}), 1) << "ids are not given twice";
}

TEST_F(EngineTest, RefusesBadOptionsByName) {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const struct {
    EngineOptions options;
    const char* message;
  } cases[] = {
      {{.numeric = kFp32, .max_requests = 0}, "max_requests: expected 1 to 2147483647, got 0"},
      {{.numeric = kFp32, .max_requests = -3}, "max_requests: expected 1 to 2147483647, got -3"},
      {{.numeric = kFp32, .max_requests = kLargest, .max_step_rows = kLargest}, "max_requests: expected 1 to"},
      {{.numeric = kFp32, .max_context = 0}, "max_context: expected 1 to 2147483647, got 0"},
      {{.numeric = kFp32, .max_context = std::numeric_limits<int64_t>::min()}, "max_context: expected 1 to 2147483647"},
      {{.numeric = kFp32, .max_context = kLargest}, "max_context: expected 1 to 2147483647"},
      {{.numeric = kFp32, .max_context = 4097},
       "max_context: expected at most max_position_embeddings = 4096, got 4097"},
      {{.numeric = kFp32, .max_requests = 9, .max_step_rows = 8},
       "max_step_rows: expected at least max_requests = 9, got 8"},
      {{.numeric = kFp32, .prefill_chunk = 0}, "prefill_chunk: expected 1 to max_step_rows = 64, got 0"},
      {{.numeric = kFp32, .max_step_rows = 16, .prefill_chunk = 17},
       "prefill_chunk: expected 1 to max_step_rows = 16, got 17"},
      {{.numeric = kFp32, .max_step_rows = kLargest}, "max_step_rows: expected 1 to 2147483647"},
      {{.numeric = kFp32, .cache_tokens = -1}, "cache_tokens: expected at least 0, got -1"},
      {{.numeric = kFp32, .extra_pads = -1}, "extra_pads: expected 0 to 2147483647, got -1"},
      {{.numeric = kFp32, .extra_pads = std::numeric_limits<int32_t>::max()}, "max_rows: expected 1 to 2147483647"},
  };
  for (const auto& [options, message] : cases) {
    EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument, message));
  }
}

// Room for more tokens than the requests can have costs nothing.
TEST_F(EngineTest, CacheTokensAreBoundedByTheRequests) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto exact, MakeEngine({.numeric = kFp32, .max_requests = 2, .max_context = 600}));
  DSV4_ASSERT_OK_AND_ASSIGN(auto huge, MakeEngine({.numeric = kFp32,
                                                   .max_requests = 2,
                                                   .max_context = 600,
                                                   .cache_tokens = std::numeric_limits<int64_t>::max()}));
  EXPECT_EQ(huge->free_blocks(), exact->free_blocks());
}

TEST_F(EngineTest, RefusesMtpWithoutTheBlock) {
  ModelConfig config = SmallModelConfig({kWindowOnly});
  config.mtp_layers.clear();
  DSV4_ASSERT_OK_AND_ASSIGN(model_, LoadRandomModel(RandomModel(config, /*seed=*/34)));
  EXPECT_THAT(MakeEngine({.numeric = kFp32, .mtp = true}), StatusIs(absl::StatusCode::kInvalidArgument, "mtp"));
  DSV4_EXPECT_OK(MakeEngine({.numeric = kFp32}));
}

TEST_F(EngineTest, RefusesWeightsOfAnotherModel) {
  const struct {
    std::vector<LayerKind> layers;
    const char* message;
  } cases[] = {
      {{kWindowOnly}, "layers"},
      {{kWindowOnly, kRatio4, kRatio4}, "layers"},
      {{kRatio4, kRatio4}, "layers[0]"},
      {{kWindowOnly, {.ratio = 4, .overlap = true}}, "layers[1]"},
      {{kWindowOnly, kWindowOnly}, "layers[1]"},
  };
  for (const auto& [layers, message] : cases) {
    const ModelConfig config = SmallModelConfig(layers);
    EXPECT_THAT(Engine::Create(*model_.device, config, model_.weights, {.numeric = kFp32}),
                StatusIs(absl::StatusCode::kInvalidArgument, message));
  }
  ModelConfig no_mtp = model_.config;
  no_mtp.mtp_layers.clear();
  EXPECT_THAT(Engine::Create(*model_.device, no_mtp, model_.weights, {.numeric = kFp32, .mtp = true}),
              StatusIs(absl::StatusCode::kInvalidArgument, "mtp"));
}

// Sizes and formats that no cache can have are refused before the first step.
TEST_F(EngineTest, RefusesWhatThePrecisionsCachesCannotHold) {
  struct Case {
    Precision precision;
    RowFormat indexer_format;
    int64_t head_dim;
    int64_t index_head_dim;
    const char* message;  // null: fine
  };
  for (const Case& c : {
           Case{Precision::kFp32, RowFormat::kFp8Key, 72, 16, nullptr},
           Case{Precision::kBf16, RowFormat::kFp8Key, 80, 16, nullptr},
           Case{Precision::kBf16, RowFormat::kFp8Key, 72, 32, "window rows"},
           Case{Precision::kPublished, RowFormat::kFp8Key, 16, 32, "window rows"},
           Case{Precision::kBf16, RowFormat::kMxfp4Key, 80, 16, "indexer keys"},
           Case{Precision::kBf16, RowFormat::kFp8, 80, 32, "indexer_format"},
           Case{Precision::kPublished, RowFormat::kF32, 80, 32, "indexer_format"},
       }) {
    SCOPED_TRACE(testing::Message() << PrecisionName(c.precision) << ", " << c.head_dim << ", " << c.index_head_dim);
    ModelConfig config = SmallModelConfig({kRatio4});
    config.head_dim = c.head_dim;
    config.index_head_dim = c.index_head_dim;
    DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(config, /*seed=*/35)));
    const auto engine =
        Engine::Create(*model.device, model.config, model.weights,
                       {.numeric = {.precision = c.precision, .indexer_format = c.indexer_format}, .max_context = 64});
    if (c.message != nullptr) {
      EXPECT_THAT(engine, StatusIs(absl::StatusCode::kInvalidArgument, c.message));
      continue;
    }
    DSV4_ASSERT_OK(engine);
    Submit(**engine, {.prompt = Prompt(9), .max_new_tokens = 2, .ignore_eos = true});
    Drain(**engine);
  }
}

// A stream of another device than the one whose work it passes on.
class ForwardingStream final : public Stream {
 public:
  ForwardingStream(Device& device, std::unique_ptr<Stream> stream) : Stream(device), stream_(std::move(stream)) {}

  absl::Status CopyToDevice(void* destination, const void* source, int64_t bytes) override {
    return stream_->CopyToDevice(destination, source, bytes);
  }
  absl::Status CopyToHost(void* destination, const void* source, int64_t bytes) override {
    return stream_->CopyToHost(destination, source, bytes);
  }
  absl::Status Fill(void* destination, uint8_t value, int64_t bytes) override {
    return stream_->Fill(destination, value, bytes);
  }
  absl::Status Synchronize() override { return stream_->Synchronize(); }

 private:
  std::unique_ptr<Stream> stream_;
};

// A device that counts, and that can be told to have no memory left.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(Device& device) : device_(device) {}

  DeviceKind kind() const override { return device_.kind(); }
  std::string name() const override { return device_.name(); }
  absl::StatusOr<void*> Allocate(int64_t bytes) override {
    if (allocations_until_failure == 0) return absl::ResourceExhaustedError("no memory left");
    --allocations_until_failure;
    ++allocations;
    return device_.Allocate(bytes);
  }
  void Free(void* memory) override {
    ++frees;
    device_.Free(memory);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device_.CreateStream());
    return std::make_unique<ForwardingStream>(*this, std::move(stream));
  }

  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t allocations_until_failure = std::numeric_limits<int64_t>::max();

 private:
  Device& device_;
};

TEST_F(EngineTest, AllocatesNothingAfterCreate) {
  CountingDevice device(*model_.device);
  {
    DSV4_ASSERT_OK_AND_ASSIGN(auto engine, Engine::Create(device, model_.config, model_.weights,
                                                          {.numeric = kFp32, .mtp = true, .copy_logits = true}));
    const int64_t allocations = device.allocations;
    EXPECT_GT(allocations, 0);
    for (int64_t i = 0; i < 3; ++i) Submit(*engine, {.prompt = Prompt(40, i), .max_new_tokens = 4, .ignore_eos = true});
    Drain(*engine);
    EXPECT_EQ(device.allocations, allocations);
    EXPECT_EQ(device.frees, 0);
  }
  EXPECT_EQ(device.frees, device.allocations);
}

TEST_F(EngineTest, EveryFailedAllocationIsReportedAndNothingLeaks) {
  int64_t failures = 0;
  for (int64_t allowed = 0;; ++allowed) {
    CountingDevice device(*model_.device);
    device.allocations_until_failure = allowed;
    {
      const auto engine = Engine::Create(device, model_.config, model_.weights, {.numeric = kFp32});
      if (engine.ok()) break;
      EXPECT_THAT(engine, StatusIs(absl::StatusCode::kResourceExhausted, "no memory left"));
    }
    EXPECT_EQ(device.frees, device.allocations);
    ++failures;
    ASSERT_LT(failures, 100);
  }
  EXPECT_GE(failures, 3) << "inputs, caches and buffers at least";
}

TEST_F(EngineTest, EveryDecodingRequestGetsARowInEveryStep) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine,
                            MakeEngine({.numeric = kFp32, .max_requests = 5, .max_step_rows = 5, .prefill_chunk = 5}));
  for (int64_t i = 0; i < 4; ++i) Submit(*engine, {.prompt = Prompt(1, i), .max_new_tokens = 8, .ignore_eos = true});
  EXPECT_EQ(Step(*engine).prefill_rows, 4);
  // A long prompt has what is left of the steps, and no more.
  Submit(*engine, {.prompt = Prompt(40), .max_new_tokens = 1, .ignore_eos = true});
  for (int64_t step = 0; step < 7; ++step) {
    const StepReport report = Step(*engine);
    EXPECT_EQ(report.decode_rows, 4);
    EXPECT_EQ(report.prefill_rows, 1);
    EXPECT_EQ(report.outputs.size(), 4u);
    EXPECT_EQ(report.finished.size(), step == 6 ? 4u : 0u);
  }
  EXPECT_EQ(Step(*engine).prefill_rows, 5);
}

TEST_F(EngineTest, SelectionsAreKeptApartOnRequest) {
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model,
                            LoadRandomModel(RandomModel(SmallModelConfig({kRatio4, kRatio4}), /*seed=*/36)));
  for (bool keep : {false, true}) {
    DSV4_ASSERT_OK_AND_ASSIGN(auto engine, Engine::Create(*model.device, model.config, model.weights,
                                                          {.numeric = kFp32, .keep_selections = keep}));
    const bool shared = engine->decoder().selection(0).indices.data == engine->decoder().selection(1).indices.data;
    EXPECT_EQ(shared, !keep);
  }
}

// With fewer than index_topk entries all of them are listed; with more, index_topk different ones.
TEST_F(EngineTest, SelectionsAreOfVisibleEntriesEachOnce) {
  DSV4_ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine({.numeric = kFp32,
                                                     .max_requests = 2,
                                                     .max_step_rows = 32,
                                                     .prefill_chunk = 16,
                                                     .keep_selections = true,
                                                     .poison = true,
                                                     .extra_pads = 2,
                                                     .shuffle_seed = 9}));
  Submit(*engine, {.prompt = Prompt(50, 1), .max_new_tokens = 5, .ignore_eos = true});
  Submit(*engine, {.prompt = Prompt(9, 2), .max_new_tokens = 20, .ignore_eos = true});
  int64_t rows = 0;
  Drain(*engine, [&](const StepReport& report) {
    const std::vector<int64_t> indices = ToInts(engine->decoder().selection(1).indices);
    const int64_t k = model_.config.index_topk;
    std::set<int64_t> live;
    for (const StepRow& row : report.live_rows) {
      live.insert(row.row);
      const int64_t visible = (row.position + 1) / 4;
      std::set<int64_t> chosen;
      for (int64_t c = 0; c < k; ++c) {
        const int64_t index = indices[row.row * k + c];
        EXPECT_EQ(index >= 0, c < visible) << "position " << row.position << ", choice " << c;
        EXPECT_LT(index, visible);
        if (index < 0) continue;
        EXPECT_TRUE(chosen.insert(index).second) << "twice";
      }
      ++rows;
    }
    for (int64_t row = 0; row < report.rows; ++row) {
      if (live.count(row) > 0) continue;
      for (int64_t c = 0; c < k; ++c) EXPECT_EQ(indices[row * k + c], -1) << "a pad selects nothing";
    }
  });
  EXPECT_EQ(rows, 54 + 28);
}

}  // namespace
}  // namespace dsv4
