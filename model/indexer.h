// The indexer of a ratio-4 layer: chooses which compressed entries a token attends to. It owns the indexer's compressor
// and, through it, the key cache. Source: specification, section 6.
#ifndef DSV4_MODEL_INDEXER_H_
#define DSV4_MODEL_INDEXER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "model/compressor.h"
#include "model/config.h"
#include "model/numeric_options.h"
#include "model/step_state.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/stream.h"

namespace dsv4 {

// What the indexer chose, and the scores it chose by.
struct Selection {
  TensorView scores;   // f32 [N, entries of a context]; columns past a row's count hold garbage
  TensorView indices;  // i32 [N, K], ascending, -1 past the end; K is index_topk, or all entries if they are fewer
  TensorView slots;    // i32 [N, K], the same entries as cache slots

  static Selection LayOut(Arena& arena, int64_t rows, int64_t max_entries, int64_t k);
  Selection FirstRows(int64_t rows) const;
};

struct IndexerScratch {
  TensorView kv_score;  // f32 [N, 2 * state width]
  TensorView q;         // activation type [N, Hi * di]
  TensorView weights;   // f32 [N, Hi]
  TensorView q_values;  // in the key format [N, Hi, ...]
  TensorView q_scales;  // e8m0 [N, Hi, di / 32], MXFP4 only
  TensorView q_weights;  // f32 [N, Hi]

  static IndexerScratch LayOut(Arena& arena, const ModelConfig& config, const NumericOptions& numeric, int64_t rows,
                               int64_t state_width);
  IndexerScratch FirstRows(int64_t rows) const;
};

class Indexer {
 public:
  Indexer(const ModelConfig& config, const NumericOptions& numeric, const CompressedPlan& plan,
          const IndexerWeights& weights, const WeightView& cos_sin);

  void LayOutCaches(Arena& arena) { compressor_.LayOutCaches(arena); }

  // x: the layer input [N, D]; q_latent: the normed query latent [N, Rq].
  absl::Status Record(Stream& stream, const StepContext& context, const CompressedStep& step, const TensorView& x,
                      const TensorView& q_latent, const IndexerScratch& scratch, const Selection& selection) const;

  const PagedRows& keys() const { return compressor_.entries(); }
  const Compressor& compressor() const { return compressor_; }

 private:
  int64_t heads_;
  int64_t head_dim_;
  NumericOptions numeric_;
  IndexerWeights weights_;
  WeightView cos_sin_;
  Compressor compressor_;
};

}  // namespace dsv4

#endif  // DSV4_MODEL_INDEXER_H_
