#include "model/config.h"

#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "model/json_fields.h"
#include "runtime/read_file.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

// Products of two sizes stay far below 64 bits.
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

// Some fields are in some configs only, and must then be what the arithmetic is.
enum class Presence { kRequired, kOptional };

bool IsAbsent(const JsonFields& fields, std::string_view name, Presence presence) {
  return presence == Presence::kOptional && !fields.Has(name);
}

absl::Status ExpectString(const JsonFields& fields, std::string_view name, std::string_view expected,
                          Presence presence = Presence::kRequired) {
  if (IsAbsent(fields, name, presence)) return absl::OkStatus();
  DSV4_ASSIGN_OR_RETURN(const std::string value, fields.String(name));
  if (value == expected) return absl::OkStatus();
  return fields.Error(name, StrCat("expected \"", expected, "\", got \"", value, "\""));
}

absl::Status ExpectBool(const JsonFields& fields, std::string_view name, bool expected,
                        Presence presence = Presence::kRequired) {
  if (IsAbsent(fields, name, presence)) return absl::OkStatus();
  DSV4_ASSIGN_OR_RETURN(const bool value, fields.Bool(name));
  if (value == expected) return absl::OkStatus();
  return fields.Error(name, expected ? "expected true, got false" : "expected false, got true");
}

absl::Status ExpectNumber(const JsonFields& fields, std::string_view name, double expected,
                          Presence presence = Presence::kRequired) {
  if (IsAbsent(fields, name, presence)) return absl::OkStatus();
  DSV4_ASSIGN_OR_RETURN(const double value, fields.Number(name));
  if (value == expected) return absl::OkStatus();
  return fields.Error(name, StrCat("expected ", expected, ", got ", value));
}

absl::Status CheckArithmetic(const JsonFields& fields) {
  DSV4_RETURN_IF_ERROR(ExpectString(fields, "model_type", "deepseek_v4"));
  DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "num_key_value_heads", 1.0));
  DSV4_RETURN_IF_ERROR(ExpectBool(fields, "attention_bias", false));
  DSV4_RETURN_IF_ERROR(ExpectString(fields, "hidden_act", "silu"));
  DSV4_RETURN_IF_ERROR(ExpectString(fields, "scoring_func", "sqrtsoftplus"));
  DSV4_RETURN_IF_ERROR(ExpectString(fields, "topk_method", "noaux_tc"));
  DSV4_RETURN_IF_ERROR(ExpectBool(fields, "norm_topk_prob", true));
  DSV4_RETURN_IF_ERROR(ExpectBool(fields, "tie_word_embeddings", false));

  DSV4_RETURN_IF_ERROR(ExpectBool(fields, "mlp_bias", false, Presence::kOptional));
  // Other models of the family choose experts within groups, or have dense layers.
  DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "n_group", 1.0, Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "topk_group", 1.0, Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "first_k_dense_replace", 0.0, Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "moe_layer_freq", 1.0, Presence::kOptional));
  if (fields.Has("expert_dtype")) {
    // Only a hint: the loader goes by the stored type.
    DSV4_ASSIGN_OR_RETURN(const std::string dtype, fields.String("expert_dtype"));
    if (dtype != "fp4" && dtype != "fp8") {
      return fields.Error("expert_dtype", StrCat("expected \"fp4\" or \"fp8\", got \"", dtype, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadSizes(const JsonFields& fields, ModelConfig* config) {
  DSV4_ASSIGN_OR_RETURN(config->hidden_size, fields.Integer("hidden_size"));
  DSV4_ASSIGN_OR_RETURN(config->num_attention_heads, fields.Integer("num_attention_heads"));
  DSV4_ASSIGN_OR_RETURN(config->head_dim, fields.Integer("head_dim"));
  DSV4_ASSIGN_OR_RETURN(config->q_lora_rank, fields.Integer("q_lora_rank"));
  DSV4_ASSIGN_OR_RETURN(config->o_groups, fields.Integer("o_groups"));
  DSV4_ASSIGN_OR_RETURN(config->o_lora_rank, fields.Integer("o_lora_rank"));
  DSV4_ASSIGN_OR_RETURN(config->sliding_window, fields.Integer("sliding_window"));
  DSV4_ASSIGN_OR_RETURN(config->index_n_heads, fields.Integer("index_n_heads"));
  DSV4_ASSIGN_OR_RETURN(config->index_head_dim, fields.Integer("index_head_dim"));
  DSV4_ASSIGN_OR_RETURN(config->index_topk, fields.Integer("index_topk"));
  DSV4_ASSIGN_OR_RETURN(config->max_position_embeddings, fields.Integer("max_position_embeddings"));
  DSV4_ASSIGN_OR_RETURN(config->rms_norm_eps, fields.Float("rms_norm_eps"));
  DSV4_ASSIGN_OR_RETURN(config->hc_mult, fields.Integer("hc_mult"));
  DSV4_ASSIGN_OR_RETURN(config->hc_sinkhorn_iters, fields.Integer("hc_sinkhorn_iters"));
  DSV4_ASSIGN_OR_RETURN(config->hc_eps, fields.Float("hc_eps"));
  DSV4_ASSIGN_OR_RETURN(config->n_routed_experts, fields.Integer("n_routed_experts"));
  DSV4_ASSIGN_OR_RETURN(config->n_shared_experts, fields.Integer("n_shared_experts"));
  DSV4_ASSIGN_OR_RETURN(config->num_experts_per_tok, fields.Integer("num_experts_per_tok"));
  DSV4_ASSIGN_OR_RETURN(config->moe_intermediate_size, fields.Integer("moe_intermediate_size"));
  DSV4_ASSIGN_OR_RETURN(config->routed_scaling_factor, fields.Float("routed_scaling_factor"));
  DSV4_ASSIGN_OR_RETURN(config->swiglu_limit, fields.Float("swiglu_limit"));
  DSV4_ASSIGN_OR_RETURN(config->vocab_size, fields.Integer("vocab_size"));
  struct TokenField {
    const char* name;
    int32_t* token;
  };
  for (const auto& [name, token] :
       {TokenField{"bos_token_id", &config->bos_token_id}, TokenField{"eos_token_id", &config->eos_token_id}}) {
    DSV4_ASSIGN_OR_RETURN(const int64_t value, fields.Integer(name));
    if (value < 0 || value > kMaxSize) return fields.Error(name, StrCat("expected 0 to ", kMaxSize, ", got ", value));
    *token = static_cast<int32_t>(value);
  }
  return absl::OkStatus();
}

// Both spellings of what rotary tables need. `scaling` holds the yarn fields.
absl::Status ReadYarn(const JsonFields& scaling, YarnConfig* yarn) {
  const std::string_view type_name = scaling.Has("type") ? "type" : "rope_type";
  DSV4_RETURN_IF_ERROR(ExpectString(scaling, type_name, "yarn"));
  DSV4_RETURN_IF_ERROR(ExpectString(scaling, "rope_type", "yarn", Presence::kOptional));
  DSV4_ASSIGN_OR_RETURN(yarn->factor, scaling.Number("factor"));
  DSV4_ASSIGN_OR_RETURN(yarn->beta_fast, scaling.Number("beta_fast"));
  DSV4_ASSIGN_OR_RETURN(yarn->beta_slow, scaling.Number("beta_slow"));
  DSV4_ASSIGN_OR_RETURN(yarn->original_max_position_embeddings, scaling.Integer("original_max_position_embeddings"));
  // The model has no amplitude factor, in the tables or in the softmax scale, and rounds the ramp's ends.
  DSV4_RETURN_IF_ERROR(ExpectNumber(scaling, "attention_factor", 1.0, Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectNumber(scaling, "mscale", 0.0, Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectNumber(scaling, "mscale_all_dim", 0.0, Presence::kOptional));
  return ExpectBool(scaling, "truncate", true, Presence::kOptional);
}

struct RopeBases {
  double rope_theta = 0.0;
  double compress_rope_theta = 0.0;
  YarnConfig yarn;
  bool operator==(const RopeBases&) const = default;
};

absl::Status ReadRopeBases(const JsonFields& fields, ModelConfig* config) {
  std::optional<RopeBases> flat;
  std::optional<RopeBases> nested;
  if (fields.Has("rope_parameters")) {
    nested.emplace();
    DSV4_ASSIGN_OR_RETURN(const JsonFields parameters, fields.Object("rope_parameters"));
    DSV4_ASSIGN_OR_RETURN(const JsonFields main, parameters.Object("main"));
    DSV4_ASSIGN_OR_RETURN(const JsonFields compress, parameters.Object("compress"));
    DSV4_RETURN_IF_ERROR(ExpectString(main, "rope_type", "default"));
    DSV4_ASSIGN_OR_RETURN(nested->rope_theta, main.Number("rope_theta"));
    DSV4_ASSIGN_OR_RETURN(nested->compress_rope_theta, compress.Number("rope_theta"));
    DSV4_RETURN_IF_ERROR(ReadYarn(compress, &nested->yarn));
  }
  // Without either form the missing field is reported as that of the flat one.
  if (!nested || fields.Has("rope_scaling")) {
    flat.emplace();
    DSV4_ASSIGN_OR_RETURN(flat->rope_theta, fields.Number("rope_theta"));
    DSV4_ASSIGN_OR_RETURN(flat->compress_rope_theta, fields.Number("compress_rope_theta"));
    DSV4_ASSIGN_OR_RETURN(const JsonFields scaling, fields.Object("rope_scaling"));
    DSV4_RETURN_IF_ERROR(ReadYarn(scaling, &flat->yarn));
  }
  if (flat && nested && *flat != *nested) {
    return fields.Error("rope_parameters",
                        "expected the values of rope_theta, compress_rope_theta and rope_scaling, got others");
  }
  const RopeBases& bases = flat ? *flat : *nested;
  if (!flat) {
    DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "rope_theta", bases.rope_theta, Presence::kOptional));
    DSV4_RETURN_IF_ERROR(ExpectNumber(fields, "compress_rope_theta", bases.compress_rope_theta, Presence::kOptional));
  }
  config->rope_theta = bases.rope_theta;
  config->compress_rope_theta = bases.compress_rope_theta;
  config->yarn = bases.yarn;
  return absl::OkStatus();
}

// Every statement of the rotary size, which must agree: qk_rope_head_dim, or the heads' share of it.
absl::Status ReadRopeSize(const JsonFields& fields, ModelConfig* config) {
  std::optional<int64_t> size;
  if (fields.Has("qk_rope_head_dim")) {
    DSV4_ASSIGN_OR_RETURN(size, fields.Integer("qk_rope_head_dim"));
  }
  auto read_share = [&](const JsonFields& holder) -> absl::Status {
    if (!holder.Has("partial_rotary_factor")) return absl::OkStatus();
    DSV4_ASSIGN_OR_RETURN(const double share, holder.Number("partial_rotary_factor"));
    const double product = share * static_cast<double>(config->head_dim);
    const double rounded = std::round(product);
    if (!(share > 0.0 && share <= 1.0) || std::abs(product - rounded) > 1e-6 ||
        rounded > static_cast<double>(kMaxSize)) {
      return holder.Error("partial_rotary_factor",
                          StrCat("expected a whole part of head_dim, ", config->head_dim, ", got ", share, " of it"));
    }
    const int64_t channels = static_cast<int64_t>(rounded);
    if (size && *size != channels) {
      return holder.Error("partial_rotary_factor", StrCat("expected ", *size, " of ", config->head_dim,
                                                          " channels as stated elsewhere, got ", channels));
    }
    size = channels;
    return absl::OkStatus();
  };
  DSV4_RETURN_IF_ERROR(read_share(fields));
  if (fields.Has("rope_parameters")) {
    DSV4_ASSIGN_OR_RETURN(const JsonFields parameters, fields.Object("rope_parameters"));
    for (const char* name : {"main", "compress"}) {
      DSV4_ASSIGN_OR_RETURN(const JsonFields table, parameters.Object(name));
      DSV4_RETURN_IF_ERROR(read_share(table));
    }
  }
  if (!size) return fields.Error("qk_rope_head_dim", "missing, and so is partial_rotary_factor");
  config->qk_rope_head_dim = *size;
  return absl::OkStatus();
}

LayerKind KindOfRatio(int64_t ratio) { return {.ratio = ratio, .overlap = ratio == 4, .indexer = ratio == 4}; }

// The ratios of the main layers and then of the MTP blocks.
absl::StatusOr<std::vector<LayerKind>> ReadCompressRatios(const JsonFields& fields, int64_t num_layers,
                                                          int64_t num_mtp_layers) {
  DSV4_ASSIGN_OR_RETURN(const std::vector<int64_t> ratios, fields.Integers("compress_ratios"));
  if (static_cast<int64_t>(ratios.size()) != num_layers + num_mtp_layers) {
    return fields.Error("compress_ratios",
                        StrCat("expected one ratio for each of the num_hidden_layers, ", num_layers,
                               ", and num_nextn_predict_layers, ", num_mtp_layers, ", got ", ratios.size()));
  }
  std::vector<LayerKind> kinds;
  for (size_t i = 0; i < ratios.size(); ++i) {
    const int64_t ratio = ratios[i] == 1 ? 0 : ratios[i];
    if (ratio != 0 && ratio != 4 && ratio != 128) {
      return fields.Error(StrCat("compress_ratios[", i, "]"), StrCat("expected 0, 1, 4 or 128, got ", ratio));
    }
    if (static_cast<int64_t>(i) >= num_layers && ratio != 0) {
      return fields.Error(StrCat("compress_ratios[", i, "]"), StrCat("expected 0 in an mtp block, got ", ratio));
    }
    kinds.push_back(KindOfRatio(ratio));
  }
  return kinds;
}

absl::StatusOr<std::vector<LayerKind>> ReadLayerTypes(const JsonFields& fields, int64_t num_layers,
                                                      int64_t num_mtp_layers) {
  DSV4_ASSIGN_OR_RETURN(const std::vector<std::string> types, fields.Strings("layer_types"));
  if (static_cast<int64_t>(types.size()) != num_layers) {
    return fields.Error("layer_types", StrCat("expected one type for each of the num_hidden_layers, ", num_layers,
                                              ", got ", types.size()));
  }
  DSV4_ASSIGN_OR_RETURN(const JsonFields rates, fields.Object("compress_rates"));
  std::vector<LayerKind> kinds;
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "sliding_attention") {
      kinds.push_back(KindOfRatio(0));
      continue;
    }
    int64_t expected_rate = 0;
    if (types[i] == "compressed_sparse_attention") expected_rate = 4;
    if (types[i] == "heavily_compressed_attention") expected_rate = 128;
    if (expected_rate == 0) {
      return fields.Error(StrCat("layer_types[", i, "]"),
                          StrCat("expected sliding_attention, compressed_sparse_attention or "
                                 "heavily_compressed_attention, got \"",
                                 types[i], "\""));
    }
    DSV4_ASSIGN_OR_RETURN(const int64_t rate, rates.Integer(types[i]));
    if (rate != expected_rate) {
      return rates.Error(types[i], StrCat("expected ", expected_rate, " (of layer ", i, "), got ", rate));
    }
    kinds.push_back(KindOfRatio(rate));
  }
  kinds.resize(types.size() + static_cast<size_t>(num_mtp_layers), KindOfRatio(0));
  return kinds;
}

absl::Status ReadHashLayers(const JsonFields& fields, int64_t num_layers, ModelConfig* config) {
  std::optional<int64_t> stated;
  if (fields.Has("num_hash_layers") || !fields.Has("mlp_layer_types")) {
    DSV4_ASSIGN_OR_RETURN(stated, fields.Integer("num_hash_layers"));
  }
  if (!fields.Has("mlp_layer_types")) {
    config->num_hash_layers = *stated;
    return absl::OkStatus();
  }
  DSV4_ASSIGN_OR_RETURN(const std::vector<std::string> types, fields.Strings("mlp_layer_types"));
  if (static_cast<int64_t>(types.size()) != num_layers) {
    return fields.Error("mlp_layer_types", StrCat("expected one type for each of the num_hidden_layers, ", num_layers,
                                                  ", got ", types.size()));
  }
  int64_t hash_layers = 0;
  for (size_t i = 0; i < types.size(); ++i) {
    const bool is_hash = types[i] == "hash_moe";
    if (!is_hash && types[i] != "moe") {
      return fields.Error(StrCat("mlp_layer_types[", i, "]"),
                          StrCat("expected hash_moe or moe, got \"", types[i], "\""));
    }
    if (is_hash && hash_layers != static_cast<int64_t>(i)) {
      return fields.Error(StrCat("mlp_layer_types[", i, "]"),
                          "expected hash_moe in the first layers only, got it after moe");
    }
    if (is_hash) ++hash_layers;
  }
  if (stated && *stated != hash_layers) {
    return fields.Error("num_hash_layers", StrCat("expected ", hash_layers, " as mlp_layer_types says, got ", *stated));
  }
  config->num_hash_layers = hash_layers;
  return absl::OkStatus();
}

absl::Status ReadLayers(const JsonFields& fields, ModelConfig* config) {
  DSV4_ASSIGN_OR_RETURN(const int64_t num_layers, fields.Integer("num_hidden_layers"));
  DSV4_ASSIGN_OR_RETURN(const int64_t num_mtp_layers, fields.Integer("num_nextn_predict_layers"));
  if (num_layers < 1 || num_layers > kMaxSize) {
    return fields.Error("num_hidden_layers", StrCat("expected 1 to ", kMaxSize, ", got ", num_layers));
  }
  if (num_mtp_layers != 0 && num_mtp_layers != 1) {
    return fields.Error("num_nextn_predict_layers", StrCat("expected 0 or 1, got ", num_mtp_layers));
  }
  const bool has_types = fields.Has("layer_types");
  const bool has_ratios = fields.Has("compress_ratios");
  if (!has_types && !has_ratios) return fields.Error("compress_ratios", "missing, and so is layer_types");
  std::vector<LayerKind> kinds;
  if (has_ratios) {
    DSV4_ASSIGN_OR_RETURN(kinds, ReadCompressRatios(fields, num_layers, num_mtp_layers));
  }
  if (has_types) {
    DSV4_ASSIGN_OR_RETURN(std::vector<LayerKind> typed, ReadLayerTypes(fields, num_layers, num_mtp_layers));
    for (size_t i = 0; has_ratios && i < kinds.size(); ++i) {
      if (kinds[i] == typed[i]) continue;
      return fields.Error(StrCat("layer_types[", i, "]"),
                          StrCat("expected the type of ratio ", kinds[i].ratio,
                                 " as compress_ratios says, got that of ", typed[i].ratio));
    }
    kinds = std::move(typed);
  }
  config->layers.assign(kinds.begin(), kinds.begin() + num_layers);
  config->mtp_layers.assign(kinds.begin() + num_layers, kinds.end());
  return ReadHashLayers(fields, num_layers, config);
}

absl::Status ReadQuantization(const JsonFields& fields, ModelConfig* config) {
  if (!fields.Has("quantization_config")) return absl::OkStatus();
  DSV4_ASSIGN_OR_RETURN(const JsonFields quantization, fields.Object("quantization_config"));
  DSV4_RETURN_IF_ERROR(ExpectString(quantization, "quant_method", "fp8"));
  DSV4_RETURN_IF_ERROR(ExpectString(quantization, "fmt", "e4m3", Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectString(quantization, "scale_fmt", "ue8m0", Presence::kOptional));
  DSV4_RETURN_IF_ERROR(ExpectString(quantization, "activation_scheme", "dynamic", Presence::kOptional));
  DSV4_ASSIGN_OR_RETURN(const std::vector<int64_t> block, quantization.Integers("weight_block_size"));
  if (block.size() != 2 || block[0] < 1 || block[1] < 1) {
    return quantization.Error("weight_block_size", "expected two sizes of at least 1, got something else");
  }
  config->weight_block_rows = block[0];
  config->weight_block_cols = block[1];
  return absl::OkStatus();
}

absl::Status CheckSize(std::string_view name, int64_t value, int64_t minimum, int64_t maximum) {
  if (value >= minimum && value <= maximum) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected ", minimum, " to ", maximum, ", got ", value));
}

absl::Status CheckPositive(std::string_view name, double value) {
  if (value > 0.0 && std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected a finite number above 0, got ", value));
}

absl::Status CheckMultiple(std::string_view name, int64_t value, std::string_view of_name, int64_t of) {
  if (value % of == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected a multiple of ", of_name, ", ", of, ", got ", value));
}

absl::Status CheckKind(std::string_view name, const LayerKind& kind) {
  DSV4_RETURN_IF_ERROR(CheckSize(StrCat(name, ".ratio"), kind.ratio, 0, kMaxSize));
  if (kind.compressed() || (!kind.overlap && !kind.indexer)) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected no overlap and no indexer at ratio 0, got one"));
}

}  // namespace

absl::Status ValidateModelConfig(const ModelConfig& config) {
  struct Size {
    std::string_view name;
    int64_t value;
  };
  for (const Size& size : {
           Size{"hidden_size", config.hidden_size},
           Size{"num_attention_heads", config.num_attention_heads},
           Size{"head_dim", config.head_dim},
           Size{"qk_rope_head_dim", config.qk_rope_head_dim},
           Size{"q_lora_rank", config.q_lora_rank},
           Size{"o_groups", config.o_groups},
           Size{"o_lora_rank", config.o_lora_rank},
           Size{"sliding_window", config.sliding_window},
           Size{"index_n_heads", config.index_n_heads},
           Size{"index_head_dim", config.index_head_dim},
           Size{"index_topk", config.index_topk},
           Size{"yarn.original_max_position_embeddings", config.yarn.original_max_position_embeddings},
           Size{"max_position_embeddings", config.max_position_embeddings},
           Size{"hc_mult", config.hc_mult},
           Size{"n_routed_experts", config.n_routed_experts},
           Size{"num_experts_per_tok", config.num_experts_per_tok},
           Size{"moe_intermediate_size", config.moe_intermediate_size},
           Size{"vocab_size", config.vocab_size},
           Size{"num_hidden_layers", config.num_layers()},
       }) {
    DSV4_RETURN_IF_ERROR(CheckSize(size.name, size.value, 1, kMaxSize));
  }
  // More have no effect on fp32, and a step would never end.
  DSV4_RETURN_IF_ERROR(CheckSize("hc_sinkhorn_iters", config.hc_sinkhorn_iters, 1, 1000));
  struct Real {
    std::string_view name;
    double value;
  };
  for (const Real& real : {
           Real{"rope_theta", config.rope_theta},
           Real{"compress_rope_theta", config.compress_rope_theta},
           Real{"yarn.factor", config.yarn.factor},
           Real{"yarn.beta_fast", config.yarn.beta_fast},
           Real{"yarn.beta_slow", config.yarn.beta_slow},
           Real{"rms_norm_eps", config.rms_norm_eps},
           Real{"hc_eps", config.hc_eps},
           Real{"routed_scaling_factor", config.routed_scaling_factor},
           Real{"swiglu_limit", config.swiglu_limit},
       }) {
    DSV4_RETURN_IF_ERROR(CheckPositive(real.name, real.value));
  }

  DSV4_RETURN_IF_ERROR(CheckMultiple("qk_rope_head_dim", config.qk_rope_head_dim, "a pair", 2));
  DSV4_RETURN_IF_ERROR(CheckSize("qk_rope_head_dim", config.qk_rope_head_dim, 2, config.head_dim));
  DSV4_RETURN_IF_ERROR(CheckSize("index_head_dim", config.index_head_dim, config.qk_rope_head_dim, kMaxSize));
  if ((config.index_head_dim & (config.index_head_dim - 1)) != 0) {
    return absl::InvalidArgumentError(
        StrCat("index_head_dim: expected a power of two (the Hadamard rotation's size), got ", config.index_head_dim));
  }
  DSV4_RETURN_IF_ERROR(CheckMultiple("num_attention_heads", config.num_attention_heads, "o_groups", config.o_groups));
  // The frequencies divide by the logarithm of the base and by the span of the ramp.
  for (const Real& base :
       {Real{"rope_theta", config.rope_theta}, Real{"compress_rope_theta", config.compress_rope_theta}}) {
    if (base.value <= 1.0) {
      return absl::InvalidArgumentError(StrCat(base.name, ": expected more than 1, got ", base.value));
    }
  }
  if (config.yarn.factor < 1.0) {
    return absl::InvalidArgumentError(StrCat("yarn.factor: expected at least 1, got ", config.yarn.factor));
  }
  if (config.yarn.beta_fast <= config.yarn.beta_slow) {
    return absl::InvalidArgumentError(StrCat("yarn.beta_fast: expected more than beta_slow, ", config.yarn.beta_slow,
                                             ", got ", config.yarn.beta_fast));
  }
  DSV4_RETURN_IF_ERROR(CheckSize("n_shared_experts", config.n_shared_experts, 1, 1));
  DSV4_RETURN_IF_ERROR(CheckSize("num_experts_per_tok", config.num_experts_per_tok, 1, config.n_routed_experts));
  DSV4_RETURN_IF_ERROR(CheckSize("num_hash_layers", config.num_hash_layers, 0, config.num_layers()));
  DSV4_RETURN_IF_ERROR(CheckSize("bos_token_id", config.bos_token_id, 0, config.vocab_size - 1));
  DSV4_RETURN_IF_ERROR(CheckSize("eos_token_id", config.eos_token_id, 0, config.vocab_size - 1));
  DSV4_RETURN_IF_ERROR(CheckSize("weight_block_rows", config.weight_block_rows, 0, kMaxSize));
  DSV4_RETURN_IF_ERROR(CheckSize("weight_block_cols", config.weight_block_cols, 0, kMaxSize));
  if ((config.weight_block_rows == 0) != (config.weight_block_cols == 0)) {
    return absl::InvalidArgumentError("weight_block_rows: expected 0 exactly if weight_block_cols is 0");
  }

  for (size_t i = 0; i < config.layers.size(); ++i) {
    DSV4_RETURN_IF_ERROR(CheckKind(StrCat("layers[", i, "]"), config.layers[i]));
  }
  DSV4_RETURN_IF_ERROR(CheckSize("mtp_layers", static_cast<int64_t>(config.mtp_layers.size()), 0, 1));
  for (size_t i = 0; i < config.mtp_layers.size(); ++i) {
    DSV4_RETURN_IF_ERROR(CheckKind(StrCat("mtp_layers[", i, "]"), config.mtp_layers[i]));
    DSV4_RETURN_IF_ERROR(CheckSize(StrCat("mtp_layers[", i, "].ratio"), config.mtp_layers[i].ratio, 0, 0));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin) {
  DSV4_ASSIGN_OR_RETURN(const JsonFields fields, JsonFields::Parse(json, origin));
  DSV4_RETURN_IF_ERROR(CheckArithmetic(fields));
  ModelConfig config;
  DSV4_RETURN_IF_ERROR(ReadSizes(fields, &config));
  DSV4_RETURN_IF_ERROR(ReadRopeBases(fields, &config));
  DSV4_RETURN_IF_ERROR(ReadRopeSize(fields, &config));
  DSV4_RETURN_IF_ERROR(ReadLayers(fields, &config));
  DSV4_RETURN_IF_ERROR(ReadQuantization(fields, &config));
  if (absl::Status status = ValidateModelConfig(config); !status.ok()) {
    return absl::InvalidArgumentError(StrCat(origin, ": ", status.message()));
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& path) {
  DSV4_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  return ParseModelConfig(text, path);
}

}  // namespace dsv4
