// The model in fp32 against the reference, for sizes and layer kinds that no golden data has.
#include "tests/reference_model.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/engine.h"
#include "model/numeric_options.h"
#include "runtime/testing.h"
#include "tests/generate.h"
#include "tests/layer_probe.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

// fp32 sums of some hundred terms err by about 1e-6, and a layer has five of them in a row.
constexpr double kLayerTolerance = 1e-5;
// That of the golden data for logits: some layers more.
constexpr double kModelTolerance = 5e-5;
// Scores as close as this may change places in fp32.
constexpr double kScoreGap = 1e-5;

constexpr NumericOptions kFp32 = {.precision = Precision::kFp32};

std::vector<float> Flat(const Rows& rows) {
  std::vector<float> flat;
  for (const Row& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return flat;
}

Rows RandomRows(int64_t count, int64_t size, uint64_t seed) {
  const std::vector<float> values = RandomFloats(count * size, seed);
  Rows rows;
  for (int64_t i = 0; i < count; ++i) rows.emplace_back(values.begin() + i * size, values.begin() + (i + 1) * size);
  return rows;
}

// Runs a layer in steps of `chunk` positions and compares all that it computes, and all that is left in its caches.
void CheckLayer(const RandomModel& model, int64_t layer, int64_t positions, int64_t chunk,
                NumericOptions numeric = kFp32) {
  SCOPED_TRACE(testing::Message() << "layer " << layer << ", chunks of " << chunk);
  const ModelConfig& config = model.config();
  const Rows x = RandomRows(positions, config.hidden_size, /*seed=*/layer + 1);
  const ReferenceAttention expected = ReferenceModel(model).Attention(layer, x);

  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel loaded, LoadRandomModel(model));
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<LayerProbe> probe,
                            LayerProbe::Create(*loaded.device, config, loaded.weights, numeric, positions, chunk));
  DSV4_ASSERT_OK_AND_ASSIGN(const LayerResult actual, probe->Run(layer, Flat(x)));

  if (config.layers[layer].compressed() && !expected.entries.empty()) {
    EXPECT_TRUE(IsClose(actual.entries, Flat(expected.entries), config.head_dim, kLayerTolerance));
  } else {
    EXPECT_TRUE(actual.entries.empty());
  }
  std::vector<float> out = actual.attn_out;
  std::vector<float> expected_out = Flat(expected.out);
  if (config.layers[layer].indexer) {
    if (numeric.hadamard) {
      EXPECT_TRUE(IsClose(actual.indexer_keys, Flat(expected.indexer_keys), config.index_head_dim, kLayerTolerance));
    }
    int64_t close_calls = 0;
    for (int64_t p = 0; p < positions; ++p) {
      const Row& scores = expected.scores[p];
      ASSERT_EQ(actual.scores[p].size(), scores.size());
      for (size_t j = 0; j < scores.size(); ++j) {
        EXPECT_NEAR(actual.scores[p][j], scores[j], kLayerTolerance) << "position " << p << ", entry " << j;
      }
      if (actual.selection[p] == expected.selection[p]) continue;
      EXPECT_LT(ScoreGap(scores, config.index_topk), kScoreGap) << "position " << p;
      ++close_calls;
      // Another selection, another output.
      std::copy_n(expected_out.begin() + p * config.hidden_size, config.hidden_size,
                  out.begin() + p * config.hidden_size);
    }
    EXPECT_LE(close_calls, positions / 50);
  } else {
    EXPECT_TRUE(actual.selection.empty());
  }
  EXPECT_TRUE(IsClose(out, expected_out, config.hidden_size, kLayerTolerance));
}

class VariedModelTest : public testing::TestWithParam<NamedConfig> {};

INSTANTIATE_TEST_SUITE_P(Reference, VariedModelTest, testing::ValuesIn(VariedModelConfigs()),
                         [](const auto& info) { return info.param.name; });

TEST_P(VariedModelTest, EveryLayerEqualsTheReference) {
  const RandomModel model(GetParam().config, /*seed=*/1);
  for (size_t layer = 0; layer < model.config().layers.size(); ++layer) {
    // Two entries of the largest ratio, and off a boundary at the end.
    const int64_t positions = std::max<int64_t>(75, 2 * model.config().layers[layer].ratio + 1);
    CheckLayer(model, static_cast<int64_t>(layer), positions, /*chunk=*/19);
  }
}

// One request from its first token to its last, its tokens given, against the reference at every position.
TEST_P(VariedModelTest, LogitsEqualTheReference) {
  ModelConfig config = GetParam().config;
  const RandomModel model(config, /*seed=*/2);
  constexpr int64_t kPositions = 140;
  constexpr int64_t kPrompt = 21;
  const std::vector<int32_t> tokens = RandomTokens(kPositions + 1, config.vocab_size, /*seed=*/3, /*first=*/0);
  const ReferenceLogits expected = ReferenceModel(model).Run({tokens.begin(), tokens.end() - 1}, tokens.back());
  ASSERT_GT(expected.smallest_score_gap, kScoreGap) << "another seed is needed: an fp32 run may select other entries";

  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel loaded, LoadRandomModel(model));
  const bool mtp = !config.mtp_layers.empty();
  const EngineOptions options = {.numeric = kFp32,
                                 .max_requests = 2,
                                 .max_context = kPositions,
                                 .max_step_rows = 8,
                                 .prefill_chunk = 8,
                                 .mtp = mtp,
                                 .copy_logits = true,
                                 .poison = true};
  const Request request = {.prompt = {tokens.begin(), tokens.begin() + kPrompt},
                           .max_new_tokens = kPositions - kPrompt + 1,
                           .forced = {tokens.begin() + kPrompt, tokens.end()}};
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation actual, GenerateAlone(loaded, options, request));
  EXPECT_EQ(actual.tokens, request.forced);
  const auto from_prompt = [](const Rows& rows) { return Flat({rows.begin() + kPrompt - 1, rows.end()}); };
  EXPECT_TRUE(IsClose(actual.logits, from_prompt(expected.logits), config.vocab_size, kModelTolerance));
  if (!mtp) return;
  EXPECT_TRUE(IsClose(actual.mtp_logits, from_prompt(expected.mtp_logits), config.vocab_size, kModelTolerance));
}

TEST(LayerReference, TheProbeRefusesOtherSizes) {
  const RandomModel model(SmallModelConfig({kWindowOnly, kRatio4}), /*seed=*/3);
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel loaded, LoadRandomModel(model));
  DSV4_ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<LayerProbe> probe,
      LayerProbe::Create(*loaded.device, loaded.config, loaded.weights, kFp32, /*positions=*/4, /*chunk=*/2));
  const std::vector<float> inputs = RandomFloats(4 * loaded.config.hidden_size, 1);
  for (int64_t layer : {-1, 2}) {
    EXPECT_THAT(probe->Run(layer, inputs), StatusIs(absl::StatusCode::kInvalidArgument, "layer: expected 0 to 1, got"));
  }
  for (const std::vector<float>& other : {std::vector<float>(inputs.begin() + 1, inputs.end()), std::vector<float>()}) {
    EXPECT_THAT(probe->Run(1, other), StatusIs(absl::StatusCode::kInvalidArgument, "inputs: expected 4 rows of 96"));
  }
  DSV4_EXPECT_OK(probe->Run(1, inputs));
}

// The overlap is what a decode loses if it forgets the window before: the second entry pools rows of both.
TEST(LayerReference, NineTokensOneAtATimeKeepTheOverlap) {
  const RandomModel model(SmallModelConfig({kRatio4, {.ratio = 4, .overlap = true}}), /*seed=*/4);
  for (int64_t layer : {0, 1}) {
    CheckLayer(model, layer, /*positions=*/9, /*chunk=*/1);
    CheckLayer(model, layer, /*positions=*/9, /*chunk=*/9);
  }
}

TEST(LayerReference, EveryChunkGivesTheSame) {
  const RandomModel model(SmallModelConfig({kRatio4, kRatio128}), /*seed=*/5);
  for (int64_t chunk : {1, 2, 3, 4, 5, 7, 31, 32, 33, 260}) {
    for (int64_t layer : {0, 1}) CheckLayer(model, layer, /*positions=*/260, chunk);
  }
}

// Base and frequencies of the rotary embedding differ by kind, and the difference is in the far positions.
TEST(LayerReference, PositionsPastAThousand) {
  const RandomModel model(SmallModelConfig({kWindowOnly, kRatio4, kRatio128}), /*seed=*/6);
  for (int64_t layer : {0, 1, 2}) CheckLayer(model, layer, /*positions=*/1030, /*chunk=*/103);
}

// Without quantisation the rotation changes no score.
TEST(LayerReference, WithoutHadamardTheScoresAreTheSame) {
  const RandomModel model(SmallModelConfig({kRatio4}), /*seed=*/7);
  CheckLayer(model, 0, /*positions=*/75, /*chunk=*/10, {.precision = Precision::kFp32, .hadamard = false});
}

// All entries are selected up to index_topk of them, fewer than all from the next one on.
TEST(LayerReference, SelectionBeginsPastIndexTopK) {
  ModelConfig config = SmallModelConfig({kRatio4});
  config.index_topk = 6;
  const RandomModel model(config, /*seed=*/8);
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel loaded, LoadRandomModel(model));
  DSV4_ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<LayerProbe> probe,
      LayerProbe::Create(*loaded.device, config, loaded.weights, kFp32, /*positions=*/40, /*chunk=*/8));
  DSV4_ASSERT_OK_AND_ASSIGN(const LayerResult result, probe->Run(0, RandomFloats(40 * config.hidden_size, 9)));
  for (int32_t p = 0; p < 40; ++p) {
    std::vector<int32_t> row = result.selection[p];
    row.resize(6, -1);
    const int32_t visible = (p + 1) / 4;
    for (int32_t k = 0; k < 6; ++k) {
      SCOPED_TRACE(testing::Message() << "position " << p << ", choice " << k);
      if (visible <= 6) {
        EXPECT_EQ(row[k], k < visible ? k : -1);
      } else {
        EXPECT_GT(row[k], k == 0 ? -1 : row[k - 1]);
        EXPECT_LT(row[k], visible);
      }
    }
  }
}

}  // namespace
}  // namespace dsv4
