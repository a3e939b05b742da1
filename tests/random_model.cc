#include "tests/random_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>
#include <utility>

#include "nlohmann/json.hpp"
#include "runtime/arena.h"
#include "runtime/dtype.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr int64_t kFp4Block = 32;  // columns of FP4 weights that share a scale

int64_t NumBlocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// FNV-1a, so that a tensor's values do not depend on what else the model has.
uint64_t HashName(const std::string& name, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

template <typename T>
std::vector<uint8_t> ToBytes(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Fills the table of the specification's section 3.3.
class TensorMaker {
 public:
  TensorMaker(const ModelConfig& config, uint64_t seed, std::map<std::string, HostTensor>& tensors)
      : config_(config), seed_(seed), tensors_(tensors) {}

  void MakeModel() {
    AddBf16("embed.weight", {config_.vocab_size, config_.hidden_size}, 1.0f);
    AddBf16Matrix("head", config_.vocab_size, config_.hidden_size);
    AddNorm("norm", config_.hidden_size);
    AddMhcHead("");
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      AddBlock(StrCat("layers.", i, "."), config_.layers[i], static_cast<int64_t>(i) < config_.num_hash_layers);
    }
    for (size_t i = 0; i < config_.mtp_layers.size(); ++i) {
      const std::string prefix = StrCat("mtp.", i, ".");
      AddBlock(prefix, config_.mtp_layers[i], /*is_hash=*/false);
      for (const char* name : {"e_proj", "h_proj"}) {
        AddFp8Matrix(prefix + name, config_.hidden_size, config_.hidden_size);
      }
      for (const char* name : {"enorm", "hnorm", "norm"}) AddNorm(prefix + name, config_.hidden_size);
      AddMhcHead(prefix);
    }
  }

 private:
  void AddBlock(const std::string& prefix, const LayerKind& kind, bool is_hash) {
    AddNorm(prefix + "attn_norm", config_.hidden_size);
    AddNorm(prefix + "ffn_norm", config_.hidden_size);
    AddMhc(prefix + "hc_attn");
    AddMhc(prefix + "hc_ffn");
    AddAttention(prefix + "attn.", kind);
    AddMoe(prefix + "ffn.", is_hash);
  }

  void AddAttention(const std::string& prefix, const LayerKind& kind) {
    const int64_t query = config_.num_attention_heads * config_.head_dim;
    const int64_t low_rank = config_.o_groups * config_.o_lora_rank;
    AddFp8Matrix(prefix + "wq_a", config_.q_lora_rank, config_.hidden_size);
    AddNorm(prefix + "q_norm", config_.q_lora_rank);
    AddFp8Matrix(prefix + "wq_b", query, config_.q_lora_rank);
    AddFp8Matrix(prefix + "wkv", config_.head_dim, config_.hidden_size);
    AddNorm(prefix + "kv_norm", config_.head_dim);
    AddF32(prefix + "attn_sink", {config_.num_attention_heads}, 1.0f);
    AddFp8Matrix(prefix + "wo_a", low_rank, query / config_.o_groups);
    AddFp8Matrix(prefix + "wo_b", config_.hidden_size, low_rank);
    if (kind.compressed()) AddCompressor(prefix + "compressor.", kind, config_.head_dim);
    if (!kind.indexer) return;
    AddFp8Matrix(prefix + "indexer.wq_b", config_.index_n_heads * config_.index_head_dim, config_.q_lora_rank);
    AddBf16Matrix(prefix + "indexer.weights_proj", config_.index_n_heads, config_.hidden_size);
    AddCompressor(prefix + "indexer.compressor.", kind, config_.index_head_dim);
  }

  void AddCompressor(const std::string& prefix, const LayerKind& kind, int64_t channels) {
    const int64_t width = channels * (kind.overlap ? 2 : 1);
    AddF32(prefix + "ape", {kind.ratio, width}, 1.0f);
    AddBf16Matrix(prefix + "wkv", width, config_.hidden_size);
    AddBf16Matrix(prefix + "wgate", width, config_.hidden_size);
    AddNorm(prefix + "norm", channels);
  }

  void AddMoe(const std::string& prefix, bool is_hash) {
    const int64_t inner = config_.moe_intermediate_size;
    AddBf16Matrix(prefix + "gate", config_.n_routed_experts, config_.hidden_size);
    if (is_hash) {
      AddExpertTable(prefix + "gate.tid2eid");
    } else {
      AddF32(prefix + "gate.bias", {config_.n_routed_experts}, 0.5f);
    }
    for (int64_t e = 0; e < config_.n_routed_experts; ++e) {
      const std::string expert = StrCat(prefix, "experts.", e, ".");
      AddFp4Matrix(expert + "w1", inner, config_.hidden_size);
      AddFp4Matrix(expert + "w3", inner, config_.hidden_size);
      AddFp4Matrix(expert + "w2", config_.hidden_size, inner);
    }
    AddFp8Matrix(prefix + "shared_experts.w1", inner, config_.hidden_size);
    AddFp8Matrix(prefix + "shared_experts.w3", inner, config_.hidden_size);
    AddFp8Matrix(prefix + "shared_experts.w2", config_.hidden_size, inner);
  }

  void AddMhc(const std::string& name) {
    const int64_t mixes = 2 * config_.hc_mult + config_.hc_mult * config_.hc_mult;
    const int64_t size = config_.hc_mult * config_.hidden_size;
    AddF32(name + "_fn", {mixes, size}, 1.0f / std::sqrt(static_cast<float>(size)));
    AddF32(name + "_base", {mixes}, 0.5f);
    AddF32(name + "_scale", {3}, 0.5f);
  }

  void AddMhcHead(const std::string& prefix) {
    const int64_t size = config_.hc_mult * config_.hidden_size;
    AddF32(prefix + "hc_head_fn", {config_.hc_mult, size}, 1.0f / std::sqrt(static_cast<float>(size)));
    AddF32(prefix + "hc_head_base", {config_.hc_mult}, 0.5f);
    AddF32(prefix + "hc_head_scale", {1}, 0.5f);
  }

  // Different experts for each token, in any order.
  void AddExpertTable(const std::string& name) {
    std::mt19937_64 random(HashName(name, seed_));
    std::vector<int64_t> experts(config_.n_routed_experts);
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int64_t>(e);
    std::vector<int64_t> table;
    for (int64_t token = 0; token < config_.vocab_size; ++token) {
      std::shuffle(experts.begin(), experts.end(), random);
      table.insert(table.end(), experts.begin(), experts.begin() + config_.num_experts_per_tok);
    }
    tensors_[name] = {FileDType::kI64, {config_.vocab_size, config_.num_experts_per_tok}, ToBytes(table)};
  }

  std::vector<float> Normal(const std::string& name, const std::vector<int64_t>& shape, float deviation) const {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    return RandomFloats(count, HashName(name, seed_), deviation);
  }

  void AddF32(const std::string& name, const std::vector<int64_t>& shape, float deviation) {
    tensors_[name] = {FileDType::kF32, shape, ToBytes(Normal(name, shape, deviation))};
  }

  void AddBf16(const std::string& name, const std::vector<int64_t>& shape, float deviation, float mean = 0.0f) {
    std::vector<Bf16> values;
    for (float value : Normal(name, shape, deviation)) values.push_back(Bf16FromFloat(mean + value));
    tensors_[name] = {FileDType::kBf16, shape, ToBytes(values)};
  }

  void AddNorm(const std::string& name, int64_t channels) { AddBf16(name + ".weight", {channels}, 0.2f, 1.0f); }

  // Matrices keep the size of their input: the deviation is about columns^-1/2.
  void AddBf16Matrix(const std::string& name, int64_t rows, int64_t cols) {
    AddBf16(name + ".weight", {rows, cols}, 1.0f / std::sqrt(static_cast<float>(cols)));
  }

  void AddFp8Matrix(const std::string& name, int64_t rows, int64_t cols) {
    constexpr float kDeviation = 64.0f;
    std::vector<E4m3> values;
    for (float value : Normal(name, {rows, cols}, kDeviation)) values.push_back(E4m3FromFloat(value));
    tensors_[name + ".weight"] = {FileDType::kF8E4m3, {rows, cols}, ToBytes(values)};
    AddScales(name + ".scale", NumBlocks(rows, config_.weight_block_rows), NumBlocks(cols, config_.weight_block_cols),
              kDeviation * std::sqrt(static_cast<float>(cols)));
  }

  void AddFp4Matrix(const std::string& name, int64_t rows, int64_t cols) {
    constexpr float kDeviation = 2.93f;  // of a code drawn evenly
    std::mt19937_64 random(HashName(name, seed_));
    std::vector<uint8_t> pairs(static_cast<size_t>(rows * cols / 2));
    for (uint8_t& pair : pairs) pair = static_cast<uint8_t>(random() >> 56);
    tensors_[name + ".weight"] = {FileDType::kI8, {rows, cols / 2}, pairs};
    AddScales(name + ".scale", rows, NumBlocks(cols, kFp4Block), kDeviation * std::sqrt(static_cast<float>(cols)));
  }

  // Powers of two around 1 / magnitude, so that a scale taken from a neighbouring tile shows.
  void AddScales(const std::string& name, int64_t rows, int64_t cols, float magnitude) {
    std::mt19937_64 random(HashName(name, seed_));
    const int middle = 127 - static_cast<int>(std::lround(std::log2(magnitude)));
    std::vector<uint8_t> scales(static_cast<size_t>(rows * cols));
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(middle - 1 + static_cast<int>(random() % 3));
    tensors_[name] = {FileDType::kF8E8m0, {rows, cols}, scales};
  }

  const ModelConfig& config_;
  uint64_t seed_;
  std::map<std::string, HostTensor>& tensors_;
};

struct Placement {
  TensorView view;
  std::vector<uint8_t> bytes;
};

// Lays a model's tensors out in an arena and builds the structs of views.
class WeightPlacer {
 public:
  WeightPlacer(const RandomModel& model, Arena& arena) : model_(model), config_(model.config()), arena_(arena) {}

  const std::vector<Placement>& placements() const { return placements_; }
  const absl::Status& status() const { return status_; }

  void PlaceModel(ModelWeights& weights) {
    weights.embed = PlaceTensor("embed.weight");
    weights.head = PlaceMatrix("head");
    weights.norm = PlaceTensor("norm.weight");
    weights.hc_head = PlaceMhc("hc_head");
    weights.layers.clear();
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      const bool is_hash = static_cast<int64_t>(i) < config_.num_hash_layers;
      weights.layers.push_back(PlaceBlock(StrCat("layers.", i, "."), config_.layers[i], is_hash));
    }
    weights.mtp.clear();
    for (size_t i = 0; i < config_.mtp_layers.size(); ++i) {
      const std::string prefix = StrCat("mtp.", i, ".");
      MtpWeights& mtp = weights.mtp.emplace_back();
      mtp.block = PlaceBlock(prefix, config_.mtp_layers[i], /*is_hash=*/false);
      mtp.e_proj = PlaceMatrix(prefix + "e_proj");
      mtp.h_proj = PlaceMatrix(prefix + "h_proj");
      mtp.enorm = PlaceTensor(prefix + "enorm.weight");
      mtp.hnorm = PlaceTensor(prefix + "hnorm.weight");
      mtp.norm = PlaceTensor(prefix + "norm.weight");
      mtp.hc_head = PlaceMhc(prefix + "hc_head");
    }
  }

 private:
  BlockWeights PlaceBlock(const std::string& prefix, const LayerKind& kind, bool is_hash) {
    BlockWeights weights;
    weights.attn_norm = PlaceTensor(prefix + "attn_norm.weight");
    weights.ffn_norm = PlaceTensor(prefix + "ffn_norm.weight");
    weights.hc_attn = PlaceMhc(prefix + "hc_attn");
    weights.hc_ffn = PlaceMhc(prefix + "hc_ffn");
    weights.attention = PlaceAttention(prefix + "attn.", kind);

    const std::string ffn = prefix + "ffn.";
    weights.moe.gate = PlaceMatrix(ffn + "gate");
    if (is_hash) {
      weights.moe.expert_table = PlaceTensor(ffn + "gate.tid2eid");
    } else {
      weights.moe.bias = PlaceTensor(ffn + "gate.bias");
    }
    weights.moe.experts = {PlaceExperts(ffn, "w1"), PlaceExperts(ffn, "w3"), PlaceExperts(ffn, "w2")};
    weights.moe.shared = {PlaceMatrix(ffn + "shared_experts.w1"), PlaceMatrix(ffn + "shared_experts.w3"),
                          PlaceMatrix(ffn + "shared_experts.w2")};
    return weights;
  }

  AttentionWeights PlaceAttention(const std::string& prefix, const LayerKind& kind) {
    AttentionWeights weights;
    weights.wq_a = PlaceMatrix(prefix + "wq_a");
    weights.q_norm = PlaceTensor(prefix + "q_norm.weight");
    weights.wq_b = PlaceMatrix(prefix + "wq_b");
    weights.wkv = PlaceMatrix(prefix + "wkv");
    weights.kv_norm = PlaceTensor(prefix + "kv_norm.weight");
    weights.sink = PlaceTensor(prefix + "attn_sink");
    weights.wo_a = PlaceMatrix(prefix + "wo_a");
    weights.wo_b = PlaceMatrix(prefix + "wo_b");
    if (kind.compressed()) weights.compressor = PlaceCompressor(prefix + "compressor.");
    if (kind.indexer) {
      weights.indexer = IndexerWeights{.wq_b = PlaceMatrix(prefix + "indexer.wq_b"),
                                       .weights_proj = PlaceMatrix(prefix + "indexer.weights_proj"),
                                       .compressor = PlaceCompressor(prefix + "indexer.compressor.")};
    }
    return weights;
  }

  CompressorWeights PlaceCompressor(const std::string& prefix) {
    const std::vector<std::string> names = {prefix + "wkv.weight", prefix + "wgate.weight"};
    std::vector<int64_t> extents = Find(names[0]).shape;
    if (!extents.empty()) extents[0] *= 2;
    return {.wkv_gate = {.values = Place(names, extents)},
            .ape = PlaceTensor(prefix + "ape"),
            .norm = PlaceTensor(prefix + "norm.weight")};
  }

  MhcWeights PlaceMhc(const std::string& name) {
    return {.fn = PlaceTensor(name + "_fn"), .base = PlaceTensor(name + "_base"), .scale = PlaceTensor(name + "_scale")};
  }

  WeightView PlaceTensor(const std::string& name) { return Place({name}, Find(name).shape); }

  QuantizedWeight PlaceMatrix(const std::string& name) {
    QuantizedWeight weight = {.values = PlaceTensor(name + ".weight")};
    PlaceScales({name}, {}, weight);
    return weight;
  }

  QuantizedWeight PlaceExperts(const std::string& prefix, const std::string& matrix) {
    const int64_t count = config_.n_routed_experts;
    std::vector<std::string> names;
    std::vector<std::string> value_names;
    for (int64_t e = 0; e < count; ++e) {
      names.push_back(StrCat(prefix, "experts.", e, ".", matrix));
      value_names.push_back(names.back() + ".weight");
    }
    std::vector<int64_t> extents = Find(value_names[0]).shape;
    extents.insert(extents.begin(), count);
    QuantizedWeight weight = {.values = Place(value_names, extents)};
    PlaceScales(names, {count}, weight);
    return weight;
  }

  void PlaceScales(const std::vector<std::string>& names, std::vector<int64_t> extents, QuantizedWeight& weight) {
    if (!weight.is_low_precision()) return;
    std::vector<std::string> scale_names;
    for (const std::string& name : names) scale_names.push_back(name + ".scale");
    for (int64_t extent : Find(scale_names[0]).shape) extents.push_back(extent);
    weight.scales = Place(scale_names, extents);
    const bool is_fp8 = weight.values.dtype() == DType::kE4m3;
    weight.block_rows = is_fp8 ? config_.weight_block_rows : 1;
    weight.block_cols = is_fp8 ? config_.weight_block_cols : kFp4Block;
  }

  const HostTensor& Find(const std::string& name) {
    static const HostTensor missing;
    const auto found = model_.tensors().find(name);
    if (found != model_.tensors().end()) return found->second;
    if (status_.ok()) status_ = absl::InternalError(StrCat(name, ": not among the tensors made"));
    return missing;
  }

  // The tensors one after another, as one view.
  WeightView Place(const std::vector<std::string>& names, const std::vector<int64_t>& extents) {
    std::vector<uint8_t> bytes;
    for (const std::string& name : names) {
      const HostTensor& tensor = Find(name);
      if (tensor.dtype == FileDType::kI64) {
        std::vector<int32_t> narrow(tensor.bytes.size() / sizeof(int64_t));
        for (size_t i = 0; i < narrow.size(); ++i) {
          int64_t wide;
          std::memcpy(&wide, tensor.bytes.data() + i * sizeof(wide), sizeof(wide));
          narrow[i] = static_cast<int32_t>(wide);
        }
        bytes = ToBytes(narrow);
      } else {
        bytes.insert(bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
      }
    }
    const DType dtype = ViewType(Find(names[0]).dtype);
    TensorView view;
    if (extents.size() == 1) view = arena_.Add(dtype, {extents[0]});
    if (extents.size() == 2) view = arena_.Add(dtype, {extents[0], extents[1]});
    if (extents.size() == 3) view = arena_.Add(dtype, {extents[0], extents[1], extents[2]});
    placements_.push_back({view, std::move(bytes)});
    return WeightView(view);
  }

  static DType ViewType(FileDType dtype) {
    switch (dtype) {
      case FileDType::kBf16:
        return DType::kBf16;
      case FileDType::kF8E4m3:
        return DType::kE4m3;
      case FileDType::kF8E8m0:
        return DType::kE8m0;
      case FileDType::kI8:
        return DType::kE2m1x2;
      case FileDType::kI64:
        return DType::kI32;
      default:
        return DType::kF32;
    }
  }

  const RandomModel& model_;
  const ModelConfig& config_;
  Arena& arena_;
  std::vector<Placement> placements_;
  absl::Status status_;
};

// A config.json states ratios only; overlap and indexer follow from them.
absl::Status CheckPublishedKinds(const ModelConfig& config) {
  for (const LayerKind& kind : config.layers) {
    if (kind == kWindowOnly || kind == kRatio4 || kind == kRatio128) continue;
    return absl::FailedPreconditionError(StrCat("layers: a config.json has no layer of ratio ", kind.ratio,
                                                kind.overlap ? " with" : " without", " overlap and",
                                                kind.indexer ? " with" : " without", " indexer"));
  }
  return absl::OkStatus();
}

void AddRatios(const ModelConfig& config, nlohmann::json& json) {
  nlohmann::json ratios = nlohmann::json::array();
  for (const std::vector<LayerKind>* layers : {&config.layers, &config.mtp_layers}) {
    for (const LayerKind& kind : *layers) ratios.push_back(kind.ratio);
  }
  json["compress_ratios"] = ratios;
  json["num_hash_layers"] = config.num_hash_layers;
  json["qk_rope_head_dim"] = config.qk_rope_head_dim;
  json["rope_theta"] = config.rope_theta;
  json["compress_rope_theta"] = config.compress_rope_theta;
  json["rope_scaling"] = {{"type", "yarn"},
                          {"factor", config.yarn.factor},
                          {"beta_fast", config.yarn.beta_fast},
                          {"beta_slow", config.yarn.beta_slow},
                          {"original_max_position_embeddings", config.yarn.original_max_position_embeddings}};
}

void AddLayerTypes(const ModelConfig& config, nlohmann::json& json) {
  nlohmann::json types = nlohmann::json::array();
  nlohmann::json mlp_types = nlohmann::json::array();
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerKind& kind = config.layers[i];
    types.push_back(kind == kWindowOnly ? "sliding_attention"
                    : kind == kRatio4   ? "compressed_sparse_attention"
                                        : "heavily_compressed_attention");
    mlp_types.push_back(static_cast<int64_t>(i) < config.num_hash_layers ? "hash_moe" : "moe");
  }
  json["layer_types"] = types;
  json["mlp_layer_types"] = mlp_types;
  json["compress_rates"] = {{"compressed_sparse_attention", 4}, {"heavily_compressed_attention", 128}};
  const double share = static_cast<double>(config.qk_rope_head_dim) / static_cast<double>(config.head_dim);
  json["partial_rotary_factor"] = share;
  json["rope_parameters"] = {
      {"main", {{"rope_type", "default"}, {"rope_theta", config.rope_theta}, {"partial_rotary_factor", share}}},
      {"compress",
       {{"rope_type", "yarn"},
        {"rope_theta", config.compress_rope_theta},
        {"partial_rotary_factor", share},
        {"factor", config.yarn.factor},
        {"beta_fast", config.yarn.beta_fast},
        {"beta_slow", config.yarn.beta_slow},
        {"original_max_position_embeddings", config.yarn.original_max_position_embeddings}}}};
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (file.fail()) return absl::DataLossError(StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

}  // namespace

ModelConfig SmallModelConfig(std::vector<LayerKind> layers) {
  ModelConfig config;
  config.hidden_size = 96;
  config.num_attention_heads = 4;
  config.head_dim = 80;
  config.qk_rope_head_dim = 16;
  config.q_lora_rank = 40;
  config.o_groups = 2;
  config.o_lora_rank = 24;
  config.sliding_window = 8;
  config.index_n_heads = 4;
  config.index_head_dim = 32;
  config.index_topk = 4;
  config.rope_theta = 10000.0;
  config.compress_rope_theta = 160000.0;
  config.yarn = {.factor = 16.0, .beta_fast = 32.0, .beta_slow = 1.0, .original_max_position_embeddings = 128};
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6f;
  config.hc_mult = 4;
  config.hc_sinkhorn_iters = 20;
  config.hc_eps = 1e-6f;
  config.n_routed_experts = 4;
  config.n_shared_experts = 1;
  config.num_experts_per_tok = 2;
  config.moe_intermediate_size = 48;
  config.num_hash_layers = 1;
  config.routed_scaling_factor = 1.5f;
  config.swiglu_limit = 10.0f;
  config.vocab_size = 64;
  config.bos_token_id = 0;
  config.eos_token_id = 1;
  config.weight_block_rows = 16;
  config.weight_block_cols = 32;
  config.layers = std::move(layers);
  config.mtp_layers = {kWindowOnly};
  return config;
}

std::vector<NamedConfig> VariedModelConfigs() {
  const std::vector<LayerKind> published = {kWindowOnly, kRatio4, kRatio128};
  std::vector<NamedConfig> configs;
  auto add = [&configs](const std::string& name, const std::vector<LayerKind>& layers) -> ModelConfig& {
    return configs.emplace_back(NamedConfig{name, SmallModelConfig(layers)}).config;
  };
  add("PublishedKinds", published);
  {
    ModelConfig& config = add("Heads64Plus64", published);
    config.hidden_size = 100;
    config.head_dim = 128;
    config.qk_rope_head_dim = 64;
    config.index_head_dim = 64;
    config.q_lora_rank = 36;
  }
  {
    ModelConfig& config = add("OddCounts", published);
    config.num_attention_heads = 3;
    config.o_groups = 3;
    config.o_lora_rank = 7;
    config.index_n_heads = 5;
    config.index_topk = 3;
    config.n_routed_experts = 5;
    config.num_experts_per_tok = 3;
    config.hc_mult = 3;
    config.vocab_size = 61;
  }
  {
    ModelConfig& config = add("TwoStreamsNoHashLayers", published);
    config.hc_mult = 2;
    config.hc_sinkhorn_iters = 3;
    config.num_hash_layers = 0;
  }
  {
    ModelConfig& config = add("AllHashLayersNoMtp", published);
    config.num_hash_layers = 3;
    config.mtp_layers.clear();
  }
  add("TopKPastTheContext", published).index_topk = 1000;
  add("WindowOfMoreThanAPage", published).sliding_window = 70;
  {
    ModelConfig& config = add("WindowOfOneOneStreamAllExperts", published);
    config.sliding_window = 1;
    config.hc_mult = 1;
    config.n_routed_experts = 2;
  }
  add("OtherRatios", {{.ratio = 2},
                      {.ratio = 8, .overlap = true},
                      {.ratio = 3, .overlap = true, .indexer = true},
                      {.ratio = 5, .indexer = true}});
  add("OneRatioInThreeKinds", {{.ratio = 4}, {.ratio = 4, .overlap = true}, kRatio4});
  // Entries of more tokens than a page spans, and entries of one token.
  add("ExtremeRatios", {{.ratio = 1}, {.ratio = 300}, {.ratio = 1, .overlap = true, .indexer = true}});
  return configs;
}

RandomModel::RandomModel(const ModelConfig& config, uint64_t seed) : config_(config) {
  TensorMaker(config_, seed, tensors_).MakeModel();
}

std::vector<double> RandomModel::Values(const std::string& name) const {
  auto found = tensors_.find(name);
  if (found == tensors_.end()) found = tensors_.find(name + ".weight");
  if (found == tensors_.end()) return {};
  const HostTensor& tensor = found->second;
  std::vector<double> values;
  auto element = [&tensor](size_t i, auto type) {
    std::memcpy(&type, tensor.bytes.data() + i * sizeof(type), sizeof(type));
    return type;
  };
  const size_t stored = tensor.bytes.size() / static_cast<size_t>(FileDTypeBytes(tensor.dtype));
  for (size_t i = 0; i < stored; ++i) {
    switch (tensor.dtype) {
      case FileDType::kBf16:
        values.push_back(ToFloat(element(i, Bf16{})));
        break;
      case FileDType::kF8E4m3:
        values.push_back(ToFloat(element(i, E4m3{})));
        break;
      case FileDType::kI8:
        values.push_back(ToFloat(E2m1{static_cast<uint8_t>(tensor.bytes[i] & 0xf)}));
        values.push_back(ToFloat(E2m1{static_cast<uint8_t>(tensor.bytes[i] >> 4)}));
        break;
      case FileDType::kI64:
        values.push_back(static_cast<double>(element(i, int64_t{})));
        break;
      default:
        values.push_back(element(i, float{}));
    }
  }
  const auto scales = tensors_.find(name + ".scale");
  if (scales == tensors_.end()) return values;
  const bool is_fp8 = tensor.dtype == FileDType::kF8E4m3;
  const int64_t block_rows = is_fp8 ? config_.weight_block_rows : 1;
  const int64_t block_cols = is_fp8 ? config_.weight_block_cols : kFp4Block;
  const int64_t cols = static_cast<int64_t>(values.size()) / tensor.shape[0];
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const int64_t block = i / cols / block_rows * scales->second.shape[1] + i % cols / block_cols;
    values[i] *= std::exp2(scales->second.bytes[block] - 127);
  }
  return values;
}

absl::StatusOr<ModelWeights> RandomModel::Upload(Device& device, Stream& stream) const {
  ModelWeights weights;
  std::vector<Placement> placements;
  absl::Status status;
  DSV4_ASSIGN_OR_RETURN(weights.arena, Arena::Create(device, [&](Arena& arena) {
                          WeightPlacer placer(*this, arena);
                          placer.PlaceModel(weights);
                          placements = placer.placements();
                          status = placer.status();
                        }));
  DSV4_RETURN_IF_ERROR(status);
  for (const Placement& placement : placements) {
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(placement.view.data, placement.bytes.data(), placement.view.num_bytes()));
  }
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  return weights;
}

absl::StatusOr<std::string> RandomModel::ConfigJson(ConfigSpelling spelling) const {
  DSV4_RETURN_IF_ERROR(CheckPublishedKinds(config_));
  nlohmann::json json = {
      {"model_type", "deepseek_v4"},
      {"architectures", {"DeepseekV4ForCausalLM"}},
      {"hidden_size", config_.hidden_size},
      {"num_hidden_layers", config_.layers.size()},
      {"num_attention_heads", config_.num_attention_heads},
      {"num_key_value_heads", 1},
      {"head_dim", config_.head_dim},
      {"q_lora_rank", config_.q_lora_rank},
      {"o_groups", config_.o_groups},
      {"o_lora_rank", config_.o_lora_rank},
      {"sliding_window", config_.sliding_window},
      {"index_n_heads", config_.index_n_heads},
      {"index_head_dim", config_.index_head_dim},
      {"index_topk", config_.index_topk},
      {"max_position_embeddings", config_.max_position_embeddings},
      {"rms_norm_eps", config_.rms_norm_eps},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"hc_mult", config_.hc_mult},
      {"hc_sinkhorn_iters", config_.hc_sinkhorn_iters},
      {"hc_eps", config_.hc_eps},
      {"n_routed_experts", config_.n_routed_experts},
      {"n_shared_experts", config_.n_shared_experts},
      {"num_experts_per_tok", config_.num_experts_per_tok},
      {"moe_intermediate_size", config_.moe_intermediate_size},
      {"scoring_func", "sqrtsoftplus"},
      {"topk_method", "noaux_tc"},
      {"norm_topk_prob", true},
      {"routed_scaling_factor", config_.routed_scaling_factor},
      {"swiglu_limit", config_.swiglu_limit},
      {"hidden_act", "silu"},
      {"num_nextn_predict_layers", config_.mtp_layers.size()},
      {"vocab_size", config_.vocab_size},
      {"tie_word_embeddings", false},
      {"bos_token_id", config_.bos_token_id},
      {"eos_token_id", config_.eos_token_id},
      {"torch_dtype", "bfloat16"},
      {"quantization_config",
       {{"quant_method", "fp8"},
        {"fmt", "e4m3"},
        {"scale_fmt", "ue8m0"},
        {"weight_block_size", {config_.weight_block_rows, config_.weight_block_cols}},
        {"activation_scheme", "dynamic"}}},
      {"expert_dtype", "fp4"},
  };
  if (spelling == ConfigSpelling::kCompressRatios) {
    AddRatios(config_, json);
  } else {
    AddLayerTypes(config_, json);
  }
  return json.dump(2);
}

absl::Status RandomModel::WriteCheckpoint(const std::string& directory, const CheckpointForm& form) const {
  DSV4_ASSIGN_OR_RETURN(const std::string config, ConfigJson(form.spelling));
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return absl::NotFoundError(StrCat(directory, ": cannot be made: ", error.message()));
  DSV4_RETURN_IF_ERROR(WriteText(directory + "/config.json", config));

  std::vector<SafetensorsWriter> writers(static_cast<size_t>(form.shards));
  std::vector<std::string> files;
  for (int shard = 0; shard < form.shards; ++shard) {
    files.push_back(form.shards == 1 ? "model.safetensors"
                                     : StrCat("model-0000", shard + 1, "-of-0000", form.shards, ".safetensors"));
  }
  nlohmann::json weight_map;
  size_t next = 0;  // in turn, so that the parts of one weight are in different files
  for (const auto& [name, tensor] : tensors_) {
    DSV4_RETURN_IF_ERROR(writers[next].Add(name, tensor.dtype, tensor.shape, tensor.bytes));
    weight_map[name] = files[next];
    next = (next + 1) % writers.size();
  }
  for (size_t shard = 0; shard < writers.size(); ++shard) {
    DSV4_RETURN_IF_ERROR(writers[shard].Write(StrCat(directory, "/", files[shard])));
  }
  if (form.shards == 1) return absl::OkStatus();
  return WriteText(directory + "/model.safetensors.index.json", nlohmann::json{{"weight_map", weight_map}}.dump(2));
}

}  // namespace dsv4
