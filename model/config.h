// The model's dimensions, from a published config.json.
//
//   DSV4_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig("DIR/config.json"));
//
// Both spellings in circulation are accepted: `compress_ratios` with `rope_scaling`, and `layer_types` with
// `compress_rates`, `mlp_layer_types` and `rope_parameters`. No field has a default: a missing or inconsistent one is
// an InvalidArgument that names the file, the field, what was expected and what came. So is a field that asks for
// arithmetic other than this project's (another activation, another rope scaling, a bias). A config with both spellings
// of something must mean the same by them. Source: specification, section 1.2.
#ifndef DSV4_MODEL_CONFIG_H_
#define DSV4_MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace dsv4 {

// What one layer keeps and attends to. Ratio and overlap are independent; the loader sets overlap and the indexer for
// ratio 4 and accepts ratios 0 (1 is another spelling of it), 4 and 128, modules built in code take any.
struct LayerKind {
  int64_t ratio = 0;  // tokens per compressed entry; 0: window only
  bool overlap = false;
  bool indexer = false;

  bool compressed() const { return ratio > 0; }
  bool operator==(const LayerKind&) const = default;
};

struct YarnConfig {
  double factor = 1.0;
  double beta_fast = 0.0;
  double beta_slow = 0.0;
  int64_t original_max_position_embeddings = 0;
  bool operator==(const YarnConfig&) const = default;
};

struct ModelConfig {
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t q_lora_rank = 0;
  int64_t o_groups = 0;
  int64_t o_lora_rank = 0;
  int64_t sliding_window = 0;
  int64_t index_n_heads = 0;
  int64_t index_head_dim = 0;
  int64_t index_topk = 0;
  double rope_theta = 0.0;           // of layers without compression
  double compress_rope_theta = 0.0;  // of compressed layers, with yarn
  YarnConfig yarn;
  int64_t max_position_embeddings = 0;
  float rms_norm_eps = 0.0f;
  int64_t hc_mult = 0;
  int64_t hc_sinkhorn_iters = 0;
  float hc_eps = 0.0f;
  int64_t n_routed_experts = 0;
  int64_t n_shared_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t moe_intermediate_size = 0;
  int64_t num_hash_layers = 0;
  float routed_scaling_factor = 0.0f;
  float swiglu_limit = 0.0f;
  int64_t vocab_size = 0;
  int32_t bos_token_id = -1;
  int32_t eos_token_id = -1;
  // Rows and columns that share a scale in the checkpoint's e4m3 weights (quantization_config.weight_block_size); 0 and
  // 0 for a config without quantization_config, whose checkpoint may have no such weight.
  int64_t weight_block_rows = 0;
  int64_t weight_block_cols = 0;

  std::vector<LayerKind> layers;      // main layers
  std::vector<LayerKind> mtp_layers;  // multi-token-prediction blocks; 0 or 1

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  bool operator==(const ModelConfig&) const = default;
};

// NotFound if there is no such file.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& path);
// `origin` names the text in messages.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin);

// Cross-checks that the parser makes, for configs built in code too: positive sizes, an even rotary size no larger than
// the heads, heads divisible by groups, and so on.
absl::Status ValidateModelConfig(const ModelConfig& config);

}  // namespace dsv4

#endif  // DSV4_MODEL_CONFIG_H_
