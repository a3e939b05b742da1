// The model's weights as views into one arena, in their stored types. Source: specification, section 3.3.
#ifndef DSV4_MODEL_WEIGHTS_H_
#define DSV4_MODEL_WEIGHTS_H_

#include <optional>
#include <vector>

#include "ops/moe/moe.h"
#include "runtime/arena.h"
#include "runtime/weight_view.h"

namespace dsv4 {

// W = d, or 2d with overlap.
struct CompressorWeights {
  QuantizedWeight wkv_gate;  // bf16 (f32 if the checkpoint's is not bf16) [2W, D]: wkv's rows, then wgate's
  WeightView ape;            // f32 [ratio, W]
  WeightView norm;           // bf16 [d]
};

struct IndexerWeights {
  QuantizedWeight wq_b;          // [Hi * di, Rq]
  QuantizedWeight weights_proj;  // [Hi, D]
  CompressorWeights compressor;  // of di channels
};

struct AttentionWeights {
  QuantizedWeight wq_a;  // [Rq, D]
  WeightView q_norm;     // [Rq]
  QuantizedWeight wq_b;  // [H * d, Rq]
  QuantizedWeight wkv;   // [d, D]
  WeightView kv_norm;    // [d]
  WeightView sink;       // f32 [H]
  QuantizedWeight wo_a;  // [G * Ro, (H/G) * d]
  QuantizedWeight wo_b;  // [D, G * Ro]
  std::optional<CompressorWeights> compressor;
  std::optional<IndexerWeights> indexer;
};

struct MoeWeights {
  QuantizedWeight gate;     // [E, D]
  WeightView bias;          // f32 [E], or empty: hash routing
  WeightView expert_table;  // i32 [V, k], or empty: scored routing
  moe::ExpertWeights experts;  // stacked
  moe::ExpertWeights shared;
};

struct MhcWeights {
  WeightView fn;     // f32 [2M + M*M, M*D]; of a head [M, M*D]
  WeightView base;   // f32
  WeightView scale;  // f32
};

struct BlockWeights {
  WeightView attn_norm;  // [D]
  WeightView ffn_norm;   // [D]
  MhcWeights hc_attn;
  MhcWeights hc_ffn;
  AttentionWeights attention;
  MoeWeights moe;
};

struct MtpWeights {
  BlockWeights block;
  QuantizedWeight e_proj;  // [D, D]
  QuantizedWeight h_proj;  // [D, D]
  WeightView enorm;        // [D]
  WeightView hnorm;        // [D]
  WeightView norm;         // [D]
  MhcWeights hc_head;
};

struct ModelWeights {
  WeightView embed;      // [V, D]
  QuantizedWeight head;  // [V, D]
  WeightView norm;       // [D]
  MhcWeights hc_head;
  std::vector<BlockWeights> layers;
  std::vector<MtpWeights> mtp;

  Arena arena;  // what the views point into
};

}  // namespace dsv4

#endif  // DSV4_MODEL_WEIGHTS_H_
