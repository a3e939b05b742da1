// A request's tokens and logits are its own: the same bits however its prompt is cut into chunks, whoever shares its steps, in
// whatever order and with however many pads, and whatever lies in memory that nothing has written.
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "model/engine.h"
#include "model/numeric_options.h"
#include "runtime/data_files.h"
#include "runtime/testing.h"
#include "tests/generate.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

// Between them the two quantised precisions have both formats of indexer keys.
constexpr NumericOptions kFp32 = {.precision = Precision::kFp32};
constexpr NumericOptions kBf16 = {.precision = Precision::kBf16, .indexer_format = RowFormat::kFp8Key};
constexpr NumericOptions kPublished = {.precision = Precision::kPublished, .indexer_format = RowFormat::kMxfp4Key};

std::string NameOf(const NumericOptions& numeric) { return std::string(PrecisionName(numeric.precision)); }

class PrecisionTest : public testing::TestWithParam<NumericOptions> {};
INSTANTIATE_TEST_SUITE_P(Invariance, PrecisionTest, testing::Values(kFp32, kBf16, kPublished),
                         [](const auto& info) { return NameOf(info.param); });

class VariedModelTest : public testing::TestWithParam<std::tuple<NamedConfig, NumericOptions>> {};
INSTANTIATE_TEST_SUITE_P(Invariance, VariedModelTest,
                         testing::Combine(testing::ValuesIn(VariedModelConfigs()), testing::Values(kFp32, kPublished)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + NameOf(std::get<1>(info.param));
                         });

// A model with every kind of layer that there is, and some that there are not.
ModelConfig MixedConfig() { return SmallModelConfig({kWindowOnly, kRatio4, kRatio128, {.ratio = 8, .overlap = true}}); }

void ExpectChunksDoNotMatter(const LoadedModel& model, const NumericOptions& numeric, const Request& request,
                             const std::vector<int64_t>& chunks) {
  const int64_t prompt_size = static_cast<int64_t>(request.prompt.size());
  const int64_t context = prompt_size + request.max_new_tokens - 1;
  Generation first;
  for (int64_t chunk : chunks) {
    SCOPED_TRACE(testing::Message() << "chunks of " << chunk);
    const EngineOptions options = {.numeric = numeric,
                                   .max_requests = 1,
                                   .max_context = context,
                                   .max_step_rows = chunk,
                                   .prefill_chunk = chunk,
                                   .mtp = !model.config.mtp_layers.empty(),
                                   .copy_logits = true};
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation generation, GenerateAlone(model, options, request));
    if (first.tokens.empty()) first = generation;
    EXPECT_TRUE(SameGeneration(generation, first));
  }
}

// Chunks of 1 are decoding from the first token on.
TEST_P(VariedModelTest, PromptsMayBeCutAnywhere) {
  const auto& [named, numeric] = GetParam();
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(named.config, /*seed=*/11)));
  const Request request = {
      .prompt = RandomTokens(139, named.config.vocab_size, 12), .max_new_tokens = 6, .ignore_eos = true};
  ExpectChunksDoNotMatter(model, numeric, request, {1, 7, 139});
}

TEST_P(PrecisionTest, PromptsMayBeCutAnywhere) {
  const ModelConfig config = SmallModelConfig({kWindowOnly, kRatio4, kRatio128});
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(config, /*seed=*/10)));
  const Request request = {.prompt = RandomTokens(259, config.vocab_size, 9), .max_new_tokens = 6, .ignore_eos = true};
  ExpectChunksDoNotMatter(model, GetParam(), request, {1, 2, 3, 4, 7, 31, 32, 33, 128, 259});
}

TEST_P(PrecisionTest, PromptsOfTheTinyCheckpointMayBeCutAnywhere) {
  DSV4_ASSERT_OK_AND_ASSIGN(const std::string directory, FindDataFile("tests/data/tiny"));
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadCheckpointModel(directory));
  const Request request = {
      .prompt = RandomTokens(259, model.config.vocab_size, 13), .max_new_tokens = 3, .ignore_eos = true};
  ExpectChunksDoNotMatter(model, GetParam(), request, {24, 259});
}

struct BatchCase {
  const char* name;
  EngineOptions options;
  std::vector<int64_t> arrival_steps;  // of requests 0, 1, ...
};

// Requests of different lengths, all of whose prompts and outputs cross boundaries of each kind, and which draw their tokens in
// different ways.
std::vector<Request> MixedRequests(int64_t vocab_size) {
  return {
      {.prompt = RandomTokens(1, vocab_size, 20), .max_new_tokens = 9, .ignore_eos = true},
      {.prompt = RandomTokens(130, vocab_size, 21), .max_new_tokens = 5, .ignore_eos = true},
      {.prompt = RandomTokens(8, vocab_size, 22), .max_new_tokens = 12, .temperature = 1.0f, .seed = 5, .ignore_eos = true},
      {.prompt = RandomTokens(37, vocab_size, 23),
       .max_new_tokens = 7,
       .forced = RandomTokens(4, vocab_size, 24),
       .temperature = 0.7f,
       .seed = -1,
       .ignore_eos = true},
      {.prompt = RandomTokens(3, vocab_size, 25), .max_new_tokens = 1, .ignore_eos = true},
      {.prompt = RandomTokens(64, vocab_size, 26), .max_new_tokens = 20, .temperature = 2.0f, .seed = 5, .ignore_eos = true},
  };
}

TEST_P(PrecisionTest, WhoSharesTheStepsDoesNotMatter) {
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(MixedConfig(), /*seed=*/14)));
  const std::vector<Request> requests = MixedRequests(model.config.vocab_size);
  EngineOptions base = {.numeric = GetParam(),
                        .max_requests = 6,
                        .max_context = 140,
                        .max_step_rows = 24,
                        .prefill_chunk = 10,
                        .mtp = true,
                        .copy_logits = true};
  std::vector<Generation> alone;
  for (size_t i = 0; i < requests.size(); ++i) {
    EngineOptions options = base;
    options.max_requests = 1;
    DSV4_ASSERT_OK_AND_ASSIGN(alone.emplace_back(),
                              GenerateAlone(model, options, requests[i], static_cast<int64_t>(i)));
  }

  auto vary = [&base](auto change) {
    EngineOptions options = base;
    change(options);
    return options;
  };
  const std::vector<BatchCase> cases = {
      {"all at once", base, {0, 0, 0, 0, 0, 0}},
      {"one after another", vary([](auto& o) { o.max_requests = 1; }), {0, 0, 0, 0, 0, 0}},
      {"two at a time", vary([](auto& o) { o.max_requests = 2; }), {0, 0, 0, 0, 0, 0}},
      {"arriving while others decode", base, {0, 2, 3, 5, 5, 9}},
      {"with pads", vary([](auto& o) { o.extra_pads = 5; }), {0, 0, 0, 0, 1, 1}},
      {"shuffled", vary([](auto& o) { o.shuffle_seed = 3; }), {0, 0, 0, 0, 0, 0}},
      {"shuffled among many pads", vary([](auto& o) { o.shuffle_seed = 4, o.extra_pads = 33; }), {0, 1, 2, 3, 4, 5}},
      {"in one wide step", vary([](auto& o) { o.max_step_rows = o.prefill_chunk = 300; }), {0, 0, 0, 0, 0, 0}},
      {"in narrow steps", vary([](auto& o) { o.max_step_rows = 6, o.prefill_chunk = 3; }), {0, 0, 0, 0, 0, 0}},
      {"in few blocks", vary([](auto& o) { o.cache_tokens = 256; }), {0, 0, 0, 0, 0, 0}},
      {"in poisoned memory",
       vary([](auto& o) { o.poison = true, o.extra_pads = 3, o.shuffle_seed = 6, o.max_requests = 3; }),
       {0, 0, 0, 2, 2, 2}},
  };
  for (const BatchCase& batch : cases) {
    SCOPED_TRACE(batch.name);
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Engine> engine,
                              Engine::Create(*model.device, model.config, model.weights, batch.options));
    std::vector<Arrival> arrivals;
    for (size_t i = 0; i < requests.size(); ++i) arrivals.push_back({requests[i], batch.arrival_steps[i]});
    DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<Generation> together, Generate(*engine, arrivals));
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << i);
      EXPECT_TRUE(SameGeneration(together[i], alone[i]));
    }
  }
}

// NaN wherever nothing was written shows in a logit at once if it is read.
TEST_P(VariedModelTest, NothingUnwrittenIsRead) {
  const auto& [named, numeric] = GetParam();
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(named.config, /*seed=*/15)));
  std::vector<Generation> clean;
  for (bool poison : {false, true}) {
    const EngineOptions options = {.numeric = numeric,
                                   .max_requests = 3,
                                   .max_context = 60,
                                   .max_step_rows = 16,
                                   .prefill_chunk = 6,
                                   .mtp = !named.config.mtp_layers.empty(),
                                   .copy_logits = true,
                                   .keep_selections = true,
                                   .poison = poison,
                                   .extra_pads = 2};
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Engine> engine,
                              Engine::Create(*model.device, model.config, model.weights, options));
    const int64_t vocab_size = named.config.vocab_size;
    DSV4_ASSERT_OK_AND_ASSIGN(
        const std::vector<Generation> generations,
        Generate(*engine, {{{.prompt = RandomTokens(50, vocab_size, 16), .max_new_tokens = 4, .ignore_eos = true}},
                           {{.prompt = RandomTokens(2, vocab_size, 17), .max_new_tokens = 30, .ignore_eos = true}},
                           {{.prompt = RandomTokens(13, vocab_size, 18), .max_new_tokens = 8, .ignore_eos = true}}}));
    if (!poison) clean = generations;
    for (size_t i = 0; i < generations.size(); ++i) EXPECT_TRUE(SameGeneration(generations[i], clean[i]));
  }
}

TEST_P(PrecisionTest, TheSameRunGivesTheSameBits) {
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(MixedConfig(), /*seed=*/19)));
  const Request request = {.prompt = RandomTokens(40, model.config.vocab_size, 20),
                           .max_new_tokens = 10,
                           .temperature = 1.0f,
                           .seed = 7,
                           .ignore_eos = true};
  const EngineOptions options = {.numeric = GetParam(), .max_context = 64, .mtp = true, .copy_logits = true};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation first, GenerateAlone(model, options, request));
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation second, GenerateAlone(model, options, request));
  EXPECT_TRUE(SameGeneration(second, first));
}

// A draw is keyed by seed, request and position, so these differ.
TEST(Sampling, SeedAndRequestMatter) {
  const ModelConfig config = SmallModelConfig({kWindowOnly, kRatio4});
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel model, LoadRandomModel(RandomModel(config, /*seed=*/21)));
  const EngineOptions options = {.numeric = kFp32, .max_context = 64};
  Request request = {.prompt = RandomTokens(5, model.config.vocab_size, 22),
                     .max_new_tokens = 40,
                     .temperature = 1.0f,
                     .seed = 7,
                     .ignore_eos = true};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation one, GenerateAlone(model, options, request, /*id=*/0));
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation other_request, GenerateAlone(model, options, request, /*id=*/1));
  EXPECT_NE(one.tokens, other_request.tokens);
  request.seed = 8;
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation other_seed, GenerateAlone(model, options, request, /*id=*/0));
  EXPECT_NE(one.tokens, other_seed.tokens);
}

}  // namespace
}  // namespace dsv4
