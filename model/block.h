// One transformer block: attention, then mixture of experts, each between the mixing ops of the residual streams.
// Source: specification, section 10.1.
#ifndef DSV4_MODEL_BLOCK_H_
#define DSV4_MODEL_BLOCK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "model/attention.h"
#include "model/config.h"
#include "model/numeric_options.h"
#include "model/step_state.h"
#include "model/weights.h"
#include "ops/moe/moe.h"
#include "runtime/arena.h"
#include "runtime/stream.h"

namespace dsv4 {

struct BlockScratch {
  TensorView mixed;           // act [N, D], the sublayer's input before its norm
  TensorView x;               // act [N, D], the normed sublayer input
  TensorView y;               // act [N, D], the sublayer's output
  TensorView post;            // f32 [N, M]
  TensorView comb;            // f32 [N, M, M]
  TensorView expert_ids;      // i32 [N, k]
  TensorView expert_weights;  // f32 [N, k]
  moe::Scratch moe_scratch;
  AttentionScratch attention;

  static BlockScratch LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric, int64_t rows,
                             int64_t max_context);
  BlockScratch FirstRows(int64_t rows) const;
};

class Block {
 public:
  Block(const ModelConfig& config, const NumericOptions& numeric, const CachePlan& plan, const LayerKind& kind,
        const BlockWeights& weights, const WeightView& cos_sin)
      : config_(config),
        numeric_(numeric),
        weights_(weights),
        attention_(config, numeric, plan, kind, weights.attention, cos_sin) {}

  void LayOutCaches(Arena& arena) { attention_.LayOutCaches(arena); }

  // streams: act [N, M, D], updated in place.
  absl::Status Record(Stream& stream, const StepContext& context, const TensorView& streams,
                      const BlockScratch& scratch, const Selection& selection) const;

  const Attention& attention() const { return attention_; }

 private:
  absl::Status RecordMix(Stream& stream, const TensorView& streams, const MhcWeights& weights, const WeightView& norm,
                         const BlockScratch& scratch) const;
  absl::Status RecordUnmix(Stream& stream, const TensorView& streams, const BlockScratch& scratch) const;

  ModelConfig config_;
  NumericOptions numeric_;
  BlockWeights weights_;
  Attention attention_;
};

}  // namespace dsv4

#endif  // DSV4_MODEL_BLOCK_H_
