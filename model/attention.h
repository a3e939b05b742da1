// The attention of one layer, of any kind: window only, with an indexer that selects compressed entries, or with all
// compressed entries. It owns the layer's window cache and, through its compressor and indexer, the others.
// Source: specification, sections 2 to 8.
#ifndef DSV4_MODEL_ATTENTION_H_
#define DSV4_MODEL_ATTENTION_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "model/cache_plan.h"
#include "model/compressor.h"
#include "model/config.h"
#include "model/indexer.h"
#include "model/numeric_options.h"
#include "model/step_state.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"

namespace dsv4 {

// Buffers that all layers share. "act" is the activation type.
struct AttentionScratch {
  TensorView q_latent_raw;  // act [N, Rq]
  TensorView q_latent;      // act [N, Rq], normed
  TensorView q;             // act [N, H * d]
  TensorView kv_raw;        // act [N, d]
  TensorView kv;            // act [N, d], normed
  TensorView kv_score;      // f32 [N, 2 * widest state width]
  TensorView out;           // act [N, H, d]
  TensorView lse;           // f32 [N, H]
  TensorView split_out;     // f32 [all rows' splits, H, d]; empty if no list is ever split
  TensorView split_sums;    // f32 [all rows' splits, H, 2]
  TensorView rotated;       // act [N, H, d]
  TensorView low_rank;      // act [N, G * Ro]
  IndexerScratch indexer;   // empty if no layer has an indexer

  // `max_context` bounds the lists of entries.
  static AttentionScratch LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric, int64_t rows,
                                 int64_t max_context);
  AttentionScratch FirstRows(int64_t rows) const;
};

class Attention {
 public:
  // `plan` must outlive nothing: it is copied. `cos_sin` is the table of this layer's kind.
  Attention(const ModelConfig& config, const NumericOptions& numeric, const CachePlan& plan, const LayerKind& kind,
            const AttentionWeights& weights, const WeightView& cos_sin);

  void LayOutCaches(Arena& arena);

  // x: act [N, D], the normed layer input. y: act [N, D]. `selection` is used by layers with an indexer.
  absl::Status Record(Stream& stream, const StepContext& context, const TensorView& x,
                      const AttentionScratch& scratch, const Selection& selection, const TensorView& y) const;

  const LayerKind& kind() const { return kind_; }
  int compressed_index() const { return compressed_index_; }
  const PagedRows& window() const { return window_; }
  const std::optional<Compressor>& compressor() const { return compressor_; }
  const std::optional<Indexer>& indexer() const { return indexer_; }

 private:
  absl::Status RecordLinear(Stream& stream, const TensorView& x, const QuantizedWeight& weight,
                            const TensorView& out) const;

  ModelConfig config_;
  NumericOptions numeric_;
  LayerKind kind_;
  CacheGroupPlan window_plan_;
  int compressed_index_;  // into the plan's compressed kinds; -1: window only
  AttentionWeights weights_;
  WeightView cos_sin_;
  std::optional<Compressor> compressor_;
  std::optional<Indexer> indexer_;
  PagedRows window_;
};

}  // namespace dsv4

#endif  // DSV4_MODEL_ATTENTION_H_
