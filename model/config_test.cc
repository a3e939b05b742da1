#include "model/config.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/data_files.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using Json = nlohmann::json;
using Pointer = Json::json_pointer;
constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;

// The published values of both models (specification, section 1.2).
constexpr char kFlash[] = R"json({
  "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"],
  "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
  "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
  "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
  "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
                      4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0],
  "rope_theta": 10000, "compress_rope_theta": 160000,
  "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                   "original_max_position_embeddings": 65536},
  "max_position_embeddings": 1048576, "rms_norm_eps": 1e-06, "attention_bias": false, "attention_dropout": 0.0,
  "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "n_routed_experts": 256, "n_shared_experts": 1,
  "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
  "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
  "hidden_act": "silu", "num_nextn_predict_layers": 1, "vocab_size": 129280, "tie_word_embeddings": false,
  "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                          "activation_scheme": "dynamic"}
})json";

constexpr char kPro[] = R"json({
  "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"],
  "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 1,
  "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "o_groups": 16, "o_lora_rank": 1024,
  "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 1024,
  "compress_ratios": [128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
                      4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
                      4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 0],
  "rope_theta": 10000, "compress_rope_theta": 160000,
  "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                   "original_max_position_embeddings": 65536},
  "max_position_embeddings": 1048576, "rms_norm_eps": 1e-06, "attention_bias": false, "attention_dropout": 0.0,
  "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06, "n_routed_experts": 384, "n_shared_experts": 1,
  "num_experts_per_tok": 6, "moe_intermediate_size": 3072, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
  "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
  "hidden_act": "silu", "num_nextn_predict_layers": 1, "vocab_size": 129280, "tie_word_embeddings": false,
  "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                          "activation_scheme": "dynamic"},
  "expert_dtype": "fp4"
})json";

std::string DataPath(const std::string& name) {
  absl::StatusOr<std::string> path = FindDataFile("tests/data/tiny/" + name);
  EXPECT_TRUE(path.ok()) << path.status();
  return path.value_or("");
}

Json ReadJson(const std::string& name) {
  std::ifstream file(DataPath(name));
  return Json::parse(file);
}

// The tiny model's config in both spellings.
Json Flat() { return ReadJson("config.json"); }
Json Nested() { return ReadJson("config_transformers.json"); }

absl::StatusOr<ModelConfig> Parse(const Json& json) { return ParseModelConfig(json.dump(), "test.json"); }

// `json` with the value at `pointer` replaced, or removed.
Json With(Json json, const std::string& pointer, const Json& value) {
  json[Pointer(pointer)] = value;
  return json;
}
Json Without(Json json, const std::string& pointer) {
  const Pointer place(pointer);
  json.at(place.parent_pointer()).erase(place.back());
  return json;
}

// "/rope_scaling/factor" as messages name it.
std::string FieldOf(std::string pointer) {
  std::string field = pointer.substr(1);
  std::replace(field.begin(), field.end(), '/', '.');
  return field;
}

int64_t CountOf(const std::vector<LayerKind>& layers, const LayerKind& kind) {
  return std::count(layers.begin(), layers.end(), kind);
}

constexpr LayerKind kWindowOnly = {.ratio = 0, .overlap = false, .indexer = false};
constexpr LayerKind kSparse = {.ratio = 4, .overlap = true, .indexer = true};
constexpr LayerKind kHeavy = {.ratio = 128, .overlap = false, .indexer = false};

TEST(LoadModelConfig, ReadsEveryFieldOfTheTinyModel) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, LoadModelConfig(DataPath("config.json")));
  const ModelConfig expected = {
      .hidden_size = 256,
      .num_attention_heads = 4,
      .head_dim = 128,
      .qk_rope_head_dim = 64,
      .q_lora_rank = 128,
      .o_groups = 2,
      .o_lora_rank = 64,
      .sliding_window = 32,
      .index_n_heads = 16,
      .index_head_dim = 128,
      .index_topk = 16,
      .rope_theta = 10000.0,
      .compress_rope_theta = 160000.0,
      .yarn = {.factor = 16.0, .beta_fast = 32.0, .beta_slow = 1.0, .original_max_position_embeddings = 128},
      .max_position_embeddings = 1024,
      .rms_norm_eps = 1e-6f,
      .hc_mult = 4,
      .hc_sinkhorn_iters = 20,
      .hc_eps = 1e-6f,
      .n_routed_experts = 4,
      .n_shared_experts = 1,
      .num_experts_per_tok = 2,
      .moe_intermediate_size = 128,
      .num_hash_layers = 1,
      .routed_scaling_factor = 1.5f,
      .swiglu_limit = 10.0f,
      .vocab_size = 256,
      .bos_token_id = 0,
      .eos_token_id = 1,
      .weight_block_rows = 128,
      .weight_block_cols = 128,
      .layers = {kWindowOnly, kSparse, kHeavy, kSparse, kHeavy},
      .mtp_layers = {kWindowOnly},
  };
  EXPECT_EQ(config, expected);
}

TEST(LoadModelConfig, BothSpellingsAreEqual) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig flat, LoadModelConfig(DataPath("config.json")));
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig nested, LoadModelConfig(DataPath("config_transformers.json")));
  EXPECT_EQ(flat, nested);
}

TEST(LoadModelConfig, MissingFileIsNotFound) {
  EXPECT_THAT(LoadModelConfig("/nonexistent/config.json"),
              StatusIs(absl::StatusCode::kNotFound, "/nonexistent/config.json"));
}

TEST(ParseModelConfig, FlashHasTheLayersOfTheSpecification) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(kFlash, "flash"));
  ASSERT_EQ(config.num_layers(), 43);
  EXPECT_EQ(CountOf(config.layers, kWindowOnly), 2);
  EXPECT_EQ(CountOf(config.layers, kSparse), 21);
  EXPECT_EQ(CountOf(config.layers, kHeavy), 20);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    EXPECT_EQ(config.layers[i], i < 2 ? kWindowOnly : i % 2 == 0 ? kSparse : kHeavy) << "layer " << i;
  }
  EXPECT_EQ(config.mtp_layers, std::vector<LayerKind>{kWindowOnly});
  EXPECT_EQ(config.num_hash_layers, 3);
  EXPECT_EQ(config.n_routed_experts, 256);
  EXPECT_EQ(config.index_topk, 512);
}

TEST(ParseModelConfig, ProHasTheLayersOfTheSpecification) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(kPro, "pro"));
  ASSERT_EQ(config.num_layers(), 61);
  EXPECT_EQ(CountOf(config.layers, kWindowOnly), 0);
  EXPECT_EQ(CountOf(config.layers, kSparse), 30);
  EXPECT_EQ(CountOf(config.layers, kHeavy), 31);
  for (size_t i = 0; i < config.layers.size(); ++i) {
    EXPECT_EQ(config.layers[i], i < 2 || i % 2 == 1 ? kHeavy : kSparse) << "layer " << i;
  }
  EXPECT_EQ(config.mtp_layers, std::vector<LayerKind>{kWindowOnly});
  EXPECT_EQ(config.num_attention_heads, 128);
  EXPECT_EQ(config.o_groups, 16);
  EXPECT_FLOAT_EQ(config.routed_scaling_factor, 2.5f);
}

TEST(ParseModelConfig, ReadsRatioOneAsZero) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                            Parse(With(With(Flat(), "/compress_ratios/0", 1), "/compress_ratios/5", 1)));
  EXPECT_EQ(config, Parse(Flat()).value());
}

TEST(ParseModelConfig, WithoutMtpThereIsNoRatioForIt) {
  const Json flat = With(With(Flat(), "/compress_ratios", {0, 4, 128, 4, 128}), "/num_nextn_predict_layers", 0);
  const Json nested = With(Nested(), "/num_nextn_predict_layers", 0);
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(flat));
  EXPECT_TRUE(config.mtp_layers.empty());
  EXPECT_EQ(config.layers, Parse(Flat())->layers);
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig same, Parse(nested));
  EXPECT_EQ(config, same);
}

TEST(ParseModelConfig, TakesBothSpellingsTogetherIfTheyAgree) {
  Json both = Flat();
  both.update(Nested());
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(both));
  EXPECT_EQ(config, Parse(Flat()).value());
}

TEST(ParseModelConfig, RefusesSpellingsThatDisagree) {
  Json both = Flat();
  both.update(Nested());
  const struct {
    std::string pointer;
    Json value;
    std::string named;
  } cases[] = {
      {"/layer_types/3", "heavily_compressed_attention", "layer_types[3]"},
      {"/compress_ratios/2", 4, "layer_types[2]"},
      {"/num_hash_layers", 2, "num_hash_layers"},
      {"/mlp_layer_types/1", "hash_moe", "num_hash_layers"},
      {"/rope_theta", 20000, "rope_parameters"},
      {"/rope_parameters/compress/rope_theta", 10000, "rope_parameters"},
      {"/rope_parameters/compress/factor", 4, "rope_parameters"},
      {"/qk_rope_head_dim", 32, "partial_rotary_factor"},
      {"/partial_rotary_factor", 0.25, "partial_rotary_factor"},
      {"/rope_parameters/main/partial_rotary_factor", 0.25, "rope_parameters.main.partial_rotary_factor"},
      {"/rope_parameters/compress/partial_rotary_factor", 0.25, "rope_parameters.compress.partial_rotary_factor"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Parse(With(both, c.pointer, c.value)), StatusIs(kInvalidArgument, "test.json: " + c.named))
        << c.pointer;
  }
  // The tables' bases are repeated at the top in some files of the nested spelling.
  EXPECT_THAT(Parse(With(Nested(), "/rope_theta", 20000)), StatusIs(kInvalidArgument, "test.json: rope_theta"));
  DSV4_EXPECT_OK(Parse(With(Nested(), "/rope_theta", 10000)));
}

TEST(ParseModelConfig, NamesEachMissingField) {
  const std::vector<std::string> shared = {
      "/model_type",
      "/hidden_size",
      "/num_hidden_layers",
      "/num_attention_heads",
      "/num_key_value_heads",
      "/head_dim",
      "/q_lora_rank",
      "/o_groups",
      "/o_lora_rank",
      "/sliding_window",
      "/index_n_heads",
      "/index_head_dim",
      "/index_topk",
      "/max_position_embeddings",
      "/rms_norm_eps",
      "/attention_bias",
      "/hc_mult",
      "/hc_sinkhorn_iters",
      "/hc_eps",
      "/n_routed_experts",
      "/n_shared_experts",
      "/num_experts_per_tok",
      "/moe_intermediate_size",
      "/scoring_func",
      "/topk_method",
      "/norm_topk_prob",
      "/routed_scaling_factor",
      "/swiglu_limit",
      "/hidden_act",
      "/num_nextn_predict_layers",
      "/vocab_size",
      "/tie_word_embeddings",
      "/bos_token_id",
      "/eos_token_id",
      "/quantization_config/quant_method",
      "/quantization_config/weight_block_size",
  };
  std::vector<std::string> flat = {
      "/qk_rope_head_dim",       "/compress_ratios",        "/rope_theta",
      "/compress_rope_theta",    "/rope_scaling",           "/rope_scaling/factor",
      "/rope_scaling/beta_fast", "/rope_scaling/beta_slow", "/rope_scaling/original_max_position_embeddings",
      "/num_hash_layers"};
  std::vector<std::string> nested = {"/compress_rates",
                                     "/compress_rates/compressed_sparse_attention",
                                     "/compress_rates/heavily_compressed_attention",
                                     "/rope_parameters/main",
                                     "/rope_parameters/compress",
                                     "/rope_parameters/main/rope_type",
                                     "/rope_parameters/main/rope_theta",
                                     "/rope_parameters/compress/rope_type",
                                     "/rope_parameters/compress/rope_theta",
                                     "/rope_parameters/compress/factor",
                                     "/rope_parameters/compress/beta_fast",
                                     "/rope_parameters/compress/beta_slow",
                                     "/rope_parameters/compress/original_max_position_embeddings"};
  flat.insert(flat.end(), shared.begin(), shared.end());
  nested.insert(nested.end(), shared.begin(), shared.end());
  for (const auto& [json, pointers] : {std::pair{Flat(), flat}, std::pair{Nested(), nested}}) {
    for (const std::string& pointer : pointers) {
      const std::string expected = StrCat("test.json: ", FieldOf(pointer), ": missing");
      EXPECT_THAT(Parse(Without(json, pointer)), StatusIs(kInvalidArgument, expected));
      EXPECT_THAT(Parse(With(json, pointer, nullptr)), StatusIs(kInvalidArgument, expected));
    }
  }
  EXPECT_THAT(Parse(Without(Flat(), "/rope_scaling/type")),
              StatusIs(kInvalidArgument, "test.json: rope_scaling.rope_type: missing"));
}

TEST(ParseModelConfig, NeedsOneSpellingOfEachThing) {
  EXPECT_THAT(Parse(Without(Nested(), "/layer_types")), StatusIs(kInvalidArgument, "compress_ratios"));
  EXPECT_THAT(Parse(Without(Nested(), "/mlp_layer_types")), StatusIs(kInvalidArgument, "num_hash_layers"));
  EXPECT_THAT(Parse(Without(Nested(), "/rope_parameters")), StatusIs(kInvalidArgument, "rope_theta"));
  Json no_share = Without(Nested(), "/partial_rotary_factor");
  DSV4_EXPECT_OK(Parse(no_share));  // the tables have it too
  no_share = Without(Without(no_share, "/rope_parameters/main/partial_rotary_factor"),
                     "/rope_parameters/compress/partial_rotary_factor");
  EXPECT_THAT(Parse(no_share), StatusIs(kInvalidArgument, "qk_rope_head_dim"));
}

// Fields that are nothing but statements about the arithmetic.
TEST(ParseModelConfig, RefusesOtherArithmeticByName) {
  const struct {
    std::string pointer;
    Json value;
  } cases[] = {
      {"/model_type", "deepseek_v3"},
      {"/num_key_value_heads", 2},
      {"/attention_bias", true},
      {"/hidden_act", "gelu"},
      {"/scoring_func", "sigmoid"},
      {"/topk_method", "greedy"},
      {"/norm_topk_prob", false},
      {"/tie_word_embeddings", true},
      {"/mlp_bias", true},
      {"/n_group", 8},
      {"/topk_group", 4},
      {"/first_k_dense_replace", 1},
      {"/moe_layer_freq", 2},
      {"/expert_dtype", "int4"},
      {"/expert_dtype", 4},
      {"/rope_scaling/type", "linear"},
      {"/rope_scaling/rope_type", "linear"},
      {"/rope_scaling/attention_factor", 1.2772588722239782},
      {"/rope_scaling/mscale", 1.0},
      {"/rope_scaling/mscale_all_dim", 1.0},
      {"/rope_scaling/truncate", false},
      {"/quantization_config/quant_method", "awq"},
      {"/quantization_config/fmt", "e5m2"},
      {"/quantization_config/scale_fmt", "fp32"},
      {"/quantization_config/activation_scheme", "static"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Parse(With(Flat(), c.pointer, c.value)),
                StatusIs(kInvalidArgument, StrCat("test.json: ", FieldOf(c.pointer), ": expected")));
  }
  EXPECT_THAT(Parse(With(Nested(), "/rope_parameters/main/rope_type", "yarn")),
              StatusIs(kInvalidArgument, "test.json: rope_parameters.main.rope_type: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/rope_parameters/compress/rope_type", "default")),
              StatusIs(kInvalidArgument, "test.json: rope_parameters.compress.rope_type: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/rope_parameters/compress/attention_factor", 1.5)),
              StatusIs(kInvalidArgument, "test.json: rope_parameters.compress.attention_factor: expected"));
}

TEST(ParseModelConfig, StatementsThatOnlySomeConfigsMakeMayBeAbsent) {
  Json json = Flat();
  for (const char* pointer :
       {"/expert_dtype", "/torch_dtype", "/attention_dropout", "/architectures", "/quantization_config/fmt",
        "/quantization_config/scale_fmt", "/quantization_config/activation_scheme"}) {
    json = Without(json, pointer);
  }
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(json));
  EXPECT_EQ(config, Parse(Flat()).value());
}

TEST(ParseModelConfig, WithoutQuantizationThereAreNoBlocks) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(Without(Flat(), "/quantization_config")));
  EXPECT_EQ(config.weight_block_rows, 0);
  EXPECT_EQ(config.weight_block_cols, 0);
}

TEST(ParseModelConfig, ReadsBlocksAsRowsAndColumns) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                            Parse(With(Flat(), "/quantization_config/weight_block_size", {64, 32})));
  EXPECT_EQ(config.weight_block_rows, 64);
  EXPECT_EQ(config.weight_block_cols, 32);
  for (const Json& size : {Json{128}, Json{128, 128, 128}, Json{0, 128}, Json{128, -1}, Json("128")}) {
    EXPECT_THAT(Parse(With(Flat(), "/quantization_config/weight_block_size", size)),
                StatusIs(kInvalidArgument, "quantization_config.weight_block_size: expected"))
        << size;
  }
}

TEST(ParseModelConfig, RefusesIntegersOfTheWrongKindByName) {
  const std::vector<std::string> pointers = {
      "/hidden_size",
      "/num_hidden_layers",
      "/num_attention_heads",
      "/head_dim",
      "/q_lora_rank",
      "/o_groups",
      "/o_lora_rank",
      "/sliding_window",
      "/index_n_heads",
      "/index_head_dim",
      "/index_topk",
      "/max_position_embeddings",
      "/hc_mult",
      "/hc_sinkhorn_iters",
      "/n_routed_experts",
      "/n_shared_experts",
      "/vocab_size",
      "/qk_rope_head_dim",
      "/num_experts_per_tok",
      "/moe_intermediate_size",
      "/num_hash_layers",
      "/bos_token_id",
      "/num_nextn_predict_layers",
      "/eos_token_id",
  };
  for (const std::string& pointer : pointers) {
    for (const char* value : {"1.5", "4.0", "1e3", "\"4\"", "true", "[4]", "{}", "-1", "-9223372036854775808",
                              "9223372036854775807", "9223372036854775808", "18446744073709551616", "1e30"}) {
      EXPECT_THAT(Parse(With(Flat(), pointer, Json::parse(value))),
                  StatusIs(kInvalidArgument, StrCat("test.json: ", FieldOf(pointer), ": expected")))
          << pointer << " = " << value;
    }
  }
}

TEST(ParseModelConfig, RefusesZeroSizesByName) {
  for (const char* pointer :
       {"/hidden_size", "/num_attention_heads", "/head_dim", "/q_lora_rank", "/o_groups", "/o_lora_rank",
        "/sliding_window", "/index_n_heads", "/index_head_dim", "/index_topk", "/max_position_embeddings", "/hc_mult",
        "/hc_sinkhorn_iters", "/n_routed_experts", "/n_shared_experts", "/num_experts_per_tok",
        "/moe_intermediate_size", "/qk_rope_head_dim", "/num_hidden_layers"}) {
    EXPECT_THAT(Parse(With(Flat(), pointer, 0)),
                StatusIs(kInvalidArgument, StrCat("test.json: ", FieldOf(pointer), ": expected")));
  }
  EXPECT_THAT(Parse(With(Flat(), "/vocab_size", 0)), StatusIs(kInvalidArgument, "vocab_size"));
  EXPECT_THAT(Parse(With(Flat(), "/rope_scaling/original_max_position_embeddings", 0)),
              StatusIs(kInvalidArgument, "original_max_position_embeddings: expected"));
}

TEST(ParseModelConfig, RefusesNumbersOfTheWrongKindByName) {
  // The yarn fields are checked as members of ModelConfig and named so where their type is right.
  const std::vector<std::pair<std::string, std::string>> fields = {
      {"/rope_theta", "rope_theta"},
      {"/compress_rope_theta", "compress_rope_theta"},
      {"/rope_scaling/factor", "factor"},
      {"/rope_scaling/beta_fast", "beta_fast"},
      {"/rope_scaling/beta_slow", "beta_slow"},
      {"/rms_norm_eps", "rms_norm_eps"},
      {"/hc_eps", "hc_eps"},
      {"/routed_scaling_factor", "routed_scaling_factor"},
      {"/swiglu_limit", "swiglu_limit"},
  };
  for (const auto& [pointer, name] : fields) {
    for (const char* value : {"\"10\"", "true", "[10]", "{}", "0", "0.0", "-1", "-1e-6"}) {
      EXPECT_THAT(Parse(With(Flat(), pointer, Json::parse(value))), StatusIs(kInvalidArgument, name + ": expected"))
          << pointer << " = " << value;
    }
  }
  // Past fp32, and so small that it is 0 in fp32.
  for (const char* pointer : {"/rms_norm_eps", "/hc_eps", "/routed_scaling_factor", "/swiglu_limit"}) {
    EXPECT_THAT(Parse(With(Flat(), pointer, 1e300)), StatusIs(kInvalidArgument, FieldOf(pointer) + ": expected"));
    EXPECT_THAT(Parse(With(Flat(), pointer, 1e-300)), StatusIs(kInvalidArgument, FieldOf(pointer) + ": expected"));
  }
}

TEST(ParseModelConfig, RefusesRatiosByLayer) {
  for (const Json& ratio : {Json(2), Json(3), Json(-4), Json(64), Json(256), Json(4.0), Json("4"), Json(nullptr)}) {
    EXPECT_THAT(Parse(With(Flat(), "/compress_ratios/3", ratio)),
                StatusIs(kInvalidArgument, "test.json: compress_ratios[3]: expected"))
        << ratio;
  }
  EXPECT_THAT(Parse(With(Flat(), "/compress_ratios/5", 4)),
              StatusIs(kInvalidArgument, "test.json: compress_ratios[5]: expected 0 in an mtp block, got 4"));
  for (const Json& ratios : {Json{0, 4, 128, 4, 128}, Json{0, 4, 128, 4, 128, 0, 0}, Json::array(), Json(4)}) {
    EXPECT_THAT(Parse(With(Flat(), "/compress_ratios", ratios)),
                StatusIs(kInvalidArgument, "test.json: compress_ratios: expected"))
        << ratios;
  }
  EXPECT_THAT(Parse(With(Flat(), "/num_nextn_predict_layers", 2)),
              StatusIs(kInvalidArgument, "test.json: num_nextn_predict_layers: expected 0 or 1, got 2"));
}

TEST(ParseModelConfig, RefusesLayerTypesByLayer) {
  EXPECT_THAT(Parse(With(Nested(), "/layer_types/2", "full_attention")),
              StatusIs(kInvalidArgument, "test.json: layer_types[2]: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/layer_types/2", 128)),
              StatusIs(kInvalidArgument, "test.json: layer_types[2]: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/layer_types/5", "sliding_attention")),
              StatusIs(kInvalidArgument, "test.json: layer_types: expected"));
  EXPECT_THAT(
      Parse(With(Nested(), "/compress_rates/compressed_sparse_attention", 2)),
      StatusIs(kInvalidArgument, "test.json: compress_rates.compressed_sparse_attention: expected 4 (of layer 1)"));
  EXPECT_THAT(Parse(With(Nested(), "/compress_rates/heavily_compressed_attention", 64)),
              StatusIs(kInvalidArgument, "test.json: compress_rates.heavily_compressed_attention: expected 128"));
}

TEST(ParseModelConfig, HashLayersComeFirst) {
  EXPECT_THAT(Parse(With(Nested(), "/mlp_layer_types/3", "hash_moe")),
              StatusIs(kInvalidArgument, "test.json: mlp_layer_types[3]: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/mlp_layer_types/3", "dense")),
              StatusIs(kInvalidArgument, "test.json: mlp_layer_types[3]: expected"));
  EXPECT_THAT(Parse(With(Nested(), "/mlp_layer_types", {"hash_moe", "moe"})),
              StatusIs(kInvalidArgument, "test.json: mlp_layer_types: expected"));
  for (int64_t count = 0; count <= 5; ++count) {
    Json json = Nested();
    for (int64_t i = 0; i < 5; ++i) json["mlp_layer_types"][static_cast<size_t>(i)] = i < count ? "hash_moe" : "moe";
    DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(json));
    EXPECT_EQ(config.num_hash_layers, count);
  }
  EXPECT_THAT(Parse(With(Flat(), "/num_hash_layers", 6)),
              StatusIs(kInvalidArgument, "test.json: num_hash_layers: expected 0 to 5, got 6"));
}

TEST(ParseModelConfig, TheRotarySizeIsAWholePartOfTheHead) {
  Json json = Without(Without(Nested(), "/rope_parameters/main/partial_rotary_factor"),
                      "/rope_parameters/compress/partial_rotary_factor");
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig config, Parse(With(json, "/partial_rotary_factor", 0.25)));
  EXPECT_EQ(config.qk_rope_head_dim, 32);
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig published,
                            Parse(With(With(json, "/head_dim", 512), "/partial_rotary_factor", 0.125)));
  EXPECT_EQ(published.qk_rope_head_dim, 64);
  for (const Json& share : {Json(0.501), Json(0), Json(-0.5), Json(1.5), Json("0.5")}) {
    EXPECT_THAT(Parse(With(json, "/partial_rotary_factor", share)),
                StatusIs(kInvalidArgument, "test.json: partial_rotary_factor: expected"))
        << share;
  }
}

TEST(ParseModelConfig, RefusesBrokenText) {
  const std::string text = Flat().dump();
  EXPECT_THAT(ParseModelConfig("", "x.json"), StatusIs(kInvalidArgument, "x.json: expected JSON"));
  EXPECT_THAT(ParseModelConfig("[]", "x.json"), StatusIs(kInvalidArgument, "x.json: expected a JSON object"));
  EXPECT_THAT(ParseModelConfig("null", "x.json"), StatusIs(kInvalidArgument, "x.json: expected a JSON object"));
  EXPECT_THAT(ParseModelConfig(text + "}", "x.json"), StatusIs(kInvalidArgument, "x.json: expected JSON"));
  for (size_t length = 1; length < text.size(); length += 17) {
    EXPECT_THAT(ParseModelConfig(text.substr(0, length), "x.json"),
                StatusIs(kInvalidArgument, "x.json: expected JSON"));
  }
  EXPECT_THAT(ParseModelConfig("{\"rms_norm_eps\": 1e999}", "x.json"), StatusIs(kInvalidArgument, "x.json: "));
  EXPECT_THAT(ParseModelConfig("{\"head_dim\": NaN}", "x.json"), StatusIs(kInvalidArgument, "x.json: expected JSON"));
}

TEST(ValidateModelConfig, RefusesSizesThatDoNotFitTogether) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelConfig good, Parse(Flat()));
  DSV4_ASSERT_OK(ValidateModelConfig(good));
  const struct {
    std::string named;
    std::function<void(ModelConfig&)> change;
  } cases[] = {
      {"qk_rope_head_dim", [](ModelConfig& c) { c.qk_rope_head_dim = 63; }},
      {"qk_rope_head_dim", [](ModelConfig& c) { c.qk_rope_head_dim = 130; }},
      {"index_head_dim", [](ModelConfig& c) { c.index_head_dim = 32; }},
      {"index_head_dim", [](ModelConfig& c) { c.index_head_dim = 96; }},
      {"num_attention_heads", [](ModelConfig& c) { c.o_groups = 3; }},
      {"num_experts_per_tok", [](ModelConfig& c) { c.num_experts_per_tok = 5; }},
      {"n_shared_experts", [](ModelConfig& c) { c.n_shared_experts = 2; }},
      {"num_hash_layers", [](ModelConfig& c) { c.num_hash_layers = 6; }},
      {"num_hash_layers", [](ModelConfig& c) { c.num_hash_layers = -1; }},
      {"bos_token_id", [](ModelConfig& c) { c.bos_token_id = 256; }},
      {"eos_token_id", [](ModelConfig& c) { c.eos_token_id = -1; }},
      {"rope_theta", [](ModelConfig& c) { c.rope_theta = 1.0; }},
      {"compress_rope_theta", [](ModelConfig& c) { c.compress_rope_theta = 0.5; }},
      {"yarn.factor", [](ModelConfig& c) { c.yarn.factor = 0.5; }},
      {"yarn.beta_fast", [](ModelConfig& c) { c.yarn.beta_fast = 1.0; }},
      {"rms_norm_eps", [](ModelConfig& c) { c.rms_norm_eps = std::numeric_limits<float>::quiet_NaN(); }},
      {"swiglu_limit", [](ModelConfig& c) { c.swiglu_limit = std::numeric_limits<float>::infinity(); }},
      {"num_hidden_layers", [](ModelConfig& c) { c.layers.clear(); }},
      {"layers[2].ratio", [](ModelConfig& c) { c.layers[2].ratio = -1; }},
      {"layers[0]", [](ModelConfig& c) { c.layers[0].overlap = true; }},
      {"layers[0]", [](ModelConfig& c) { c.layers[0].indexer = true; }},
      {"mtp_layers", [](ModelConfig& c) { c.mtp_layers.resize(2); }},
      {"mtp_layers[0].ratio", [](ModelConfig& c) { c.mtp_layers[0].ratio = 4; }},
      {"weight_block_rows", [](ModelConfig& c) { c.weight_block_rows = 0; }},
      {"weight_block_cols", [](ModelConfig& c) { c.weight_block_cols = -128; }},
      {"vocab_size", [](ModelConfig& c) { c.vocab_size = int64_t{1} << 31; }},
  };
  for (const auto& c : cases) {
    ModelConfig config = good;
    c.change(config);
    EXPECT_THAT(ValidateModelConfig(config), StatusIs(kInvalidArgument, c.named + ": expected")) << c.named;
  }
}

TEST(ValidateModelConfig, TakesKindsThatNoPublishedConfigHas) {
  DSV4_ASSERT_OK_AND_ASSIGN(ModelConfig config, Parse(Flat()));
  config.layers[1] = {.ratio = 2, .overlap = false, .indexer = true};
  config.layers[2] = {.ratio = 8, .overlap = true, .indexer = false};
  DSV4_EXPECT_OK(ValidateModelConfig(config));
}

}  // namespace
}  // namespace dsv4
