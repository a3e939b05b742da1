// The same model in every form that a checkpoint comes in: both spellings of the config, one file or several, and no files at
// all.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/engine.h"
#include "nlohmann/json.hpp"
#include "runtime/data_files.h"
#include "runtime/safetensors.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"
#include "tests/generate.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

// Every weight, in one order.
class ViewList {
 public:
  static std::vector<std::pair<std::string, WeightView>> Of(const ModelWeights& weights) {
    ViewList list;
    list.Add("embed", weights.embed);
    list.Add("head", weights.head);
    list.Add("norm", weights.norm);
    list.Add("hc_head", weights.hc_head);
    for (size_t i = 0; i < weights.layers.size(); ++i) list.Add(StrCat("layers.", i, "."), weights.layers[i]);
    for (const MtpWeights& mtp : weights.mtp) {
      list.Add("mtp.", mtp.block);
      list.Add("mtp.e_proj", mtp.e_proj);
      list.Add("mtp.h_proj", mtp.h_proj);
      list.Add("mtp.enorm", mtp.enorm);
      list.Add("mtp.hnorm", mtp.hnorm);
      list.Add("mtp.norm", mtp.norm);
      list.Add("mtp.hc_head", mtp.hc_head);
    }
    return std::move(list.views_);
  }

 private:
  void Add(const std::string& name, const WeightView& view) { views_.emplace_back(name, view); }
  void Add(const std::string& name, const QuantizedWeight& weight) {
    Add(name, weight.values);
    Add(StrCat(name, " scales of ", weight.block_rows, " x ", weight.block_cols), weight.scales);
  }
  void Add(const std::string& name, const MhcWeights& weights) {
    Add(name + "_fn", weights.fn);
    Add(name + "_base", weights.base);
    Add(name + "_scale", weights.scale);
  }
  void Add(const std::string& name, const CompressorWeights& weights) {
    Add(name + "wkv_gate", weights.wkv_gate);
    Add(name + "ape", weights.ape);
    Add(name + "norm", weights.norm);
  }
  void Add(const std::string& name, const moe::ExpertWeights& weights) {
    Add(name + "w1", weights.w1);
    Add(name + "w3", weights.w3);
    Add(name + "w2", weights.w2);
  }
  void Add(const std::string& name, const BlockWeights& weights) {
    Add(name + "attn_norm", weights.attn_norm);
    Add(name + "ffn_norm", weights.ffn_norm);
    Add(name + "hc_attn", weights.hc_attn);
    Add(name + "hc_ffn", weights.hc_ffn);
    const AttentionWeights& attention = weights.attention;
    Add(name + "wq_a", attention.wq_a);
    Add(name + "q_norm", attention.q_norm);
    Add(name + "wq_b", attention.wq_b);
    Add(name + "wkv", attention.wkv);
    Add(name + "kv_norm", attention.kv_norm);
    Add(name + "sink", attention.sink);
    Add(name + "wo_a", attention.wo_a);
    Add(name + "wo_b", attention.wo_b);
    if (attention.compressor.has_value()) Add(name + "compressor.", *attention.compressor);
    if (attention.indexer.has_value()) {
      Add(name + "indexer.wq_b", attention.indexer->wq_b);
      Add(name + "indexer.weights_proj", attention.indexer->weights_proj);
      Add(name + "indexer.compressor.", attention.indexer->compressor);
    }
    Add(name + "gate", weights.moe.gate);
    Add(name + "gate.bias", weights.moe.bias);
    Add(name + "gate.tid2eid", weights.moe.expert_table);
    Add(name + "experts.", weights.moe.experts);
    Add(name + "shared.", weights.moe.shared);
  }

  std::vector<std::pair<std::string, WeightView>> views_;
};

void ExpectSameWeights(const ModelWeights& actual, const ModelWeights& expected) {
  const auto actual_views = ViewList::Of(actual);
  const auto expected_views = ViewList::Of(expected);
  ASSERT_EQ(actual_views.size(), expected_views.size());
  for (size_t i = 0; i < expected_views.size(); ++i) {
    EXPECT_EQ(actual_views[i].first, expected_views[i].first);
    EXPECT_EQ(actual_views[i].second.empty(), expected_views[i].second.empty()) << expected_views[i].first;
    EXPECT_TRUE(BitwiseEqual(actual_views[i].second.view(), expected_views[i].second.view()))
        << expected_views[i].first;
  }
}

absl::StatusOr<Generation> GenerateSome(const LoadedModel& model, Precision precision) {
  return GenerateAlone(model,
                       {.numeric = {.precision = precision},
                        .max_requests = 1,
                        .max_context = 160,
                        .max_step_rows = 32,
                        .prefill_chunk = 32,
                        .mtp = true,
                        .copy_logits = true},
                       {.prompt = RandomTokens(130, model.config.vocab_size, 61), .max_new_tokens = 4, .ignore_eos = true});
}

std::string TemporaryDirectory(const std::string& name) { return StrCat(testing::TempDir(), "/", name); }

TEST(CheckpointForms, AWrittenModelIsLoadedAsItWas) {
  const RandomModel model(SmallModelConfig({kRatio4, kWindowOnly, kRatio128, kRatio4}), /*seed=*/62);
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel expected, LoadRandomModel(model));
  const CheckpointForm forms[] = {{ConfigSpelling::kCompressRatios, 1},
                                  {ConfigSpelling::kLayerTypes, 1},
                                  {ConfigSpelling::kCompressRatios, 3},
                                  {ConfigSpelling::kLayerTypes, 2}};
  for (const CheckpointForm& form : forms) {
    const std::string directory = TemporaryDirectory(
        StrCat("written_", form.spelling == ConfigSpelling::kLayerTypes ? "types_" : "ratios_", form.shards));
    SCOPED_TRACE(directory);
    DSV4_ASSERT_OK(model.WriteCheckpoint(directory, form));
    DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel actual, LoadCheckpointModel(directory));
    EXPECT_EQ(actual.config, model.config());
    ExpectSameWeights(actual.weights, expected.weights);
    for (Precision precision : {Precision::kFp32, Precision::kPublished}) {
      DSV4_ASSERT_OK_AND_ASSIGN(const Generation actual_output, GenerateSome(actual, precision));
      DSV4_ASSERT_OK_AND_ASSIGN(const Generation expected_output, GenerateSome(expected, precision));
      EXPECT_TRUE(SameGeneration(actual_output, expected_output));
    }
  }
}

TEST(CheckpointForms, WithoutMtpOrHashLayersToo) {
  ModelConfig config = SmallModelConfig({kRatio128, kRatio4});
  config.mtp_layers.clear();
  for (int64_t hash_layers : {0, 2}) {
    config.num_hash_layers = hash_layers;
    const RandomModel model(config, /*seed=*/63);
    DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel expected, LoadRandomModel(model));
    for (ConfigSpelling spelling : {ConfigSpelling::kCompressRatios, ConfigSpelling::kLayerTypes}) {
      const std::string directory = TemporaryDirectory(StrCat("hash_", hash_layers));
      DSV4_ASSERT_OK(model.WriteCheckpoint(directory, {.spelling = spelling}));
      DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel actual, LoadCheckpointModel(directory));
      EXPECT_EQ(actual.config, config);
      ExpectSameWeights(actual.weights, expected.weights);
    }
  }
}

// The tiny checkpoint with the other config that comes with it, and cut into files.
TEST(CheckpointForms, TheTinyCheckpointInOtherFormsGivesTheSameLogits) {
  namespace fs = std::filesystem;
  DSV4_ASSERT_OK_AND_ASSIGN(const std::string original, FindDataFile("tests/data/tiny"));
  DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel expected, LoadCheckpointModel(original));
  DSV4_ASSERT_OK_AND_ASSIGN(const Generation expected_output, GenerateSome(expected, Precision::kPublished));

  const std::string other = TemporaryDirectory("tiny_layer_types");
  const std::string sharded = TemporaryDirectory("tiny_sharded");
  for (const std::string& directory : {other, sharded}) {
    fs::remove_all(directory);
    fs::create_directories(directory);
  }
  fs::copy_file(original + "/config_transformers.json", other + "/config.json");
  fs::copy_file(original + "/model.safetensors", other + "/model.safetensors");

  fs::copy_file(original + "/config.json", sharded + "/config.json");
  DSV4_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(original + "/model.safetensors"));
  SafetensorsWriter writers[2];
  nlohmann::json weight_map;
  for (const auto& [name, tensor] : file.tensors()) {
    const int shard = name.size() % 3 == 0 ? 1 : 0;
    DSV4_ASSERT_OK(writers[shard].Add(name, tensor.dtype, tensor.shape, tensor.bytes));
    weight_map[name] = StrCat("part", shard, ".safetensors");
  }
  for (int shard : {0, 1}) DSV4_ASSERT_OK(writers[shard].Write(StrCat(sharded, "/part", shard, ".safetensors")));
  std::ofstream(sharded + "/model.safetensors.index.json") << nlohmann::json{{"weight_map", weight_map}};

  for (const std::string& directory : {other, sharded}) {
    SCOPED_TRACE(directory);
    DSV4_ASSERT_OK_AND_ASSIGN(const LoadedModel actual, LoadCheckpointModel(directory));
    EXPECT_EQ(actual.config, expected.config);
    ExpectSameWeights(actual.weights, expected.weights);
    DSV4_ASSERT_OK_AND_ASSIGN(const Generation output, GenerateSome(actual, Precision::kPublished));
    EXPECT_TRUE(SameGeneration(output, expected_output));
  }
}

TEST(RandomModel, KindsThatNoConfigNamesAreNotWritten) {
  for (const LayerKind& kind : {LayerKind{.ratio = 2}, LayerKind{.ratio = 4}, LayerKind{.ratio = 128, .overlap = true}}) {
    const RandomModel model(SmallModelConfig({kind}), /*seed=*/64);
    EXPECT_THAT(model.WriteCheckpoint(TemporaryDirectory("unnamed"), {}),
                StatusIs(absl::StatusCode::kFailedPrecondition, StrCat("no layer of ratio ", kind.ratio)));
  }
}

TEST(RandomModel, ValuesDependOnSeedAndNameAlone) {
  const RandomModel one(SmallModelConfig({kRatio4}), /*seed=*/65);
  const RandomModel same(SmallModelConfig({kRatio4, kRatio128}), /*seed=*/65);
  const RandomModel other(SmallModelConfig({kRatio4}), /*seed=*/66);
  for (const char* name : {"embed", "layers.0.attn.wq_a", "layers.0.attn.compressor.ape", "layers.0.ffn.experts.3.w2",
                           "layers.0.ffn.gate.tid2eid"}) {
    EXPECT_FALSE(one.Values(name).empty()) << name;
    EXPECT_EQ(one.Values(name), same.Values(name)) << name;
    EXPECT_NE(one.Values(name), other.Values(name)) << name;
  }
  EXPECT_TRUE(one.Values("layers.1.attn.wq_a").empty());
}

}  // namespace
}  // namespace dsv4
