// The compressor-cache module: projects the layer input to partial states, saves them into the paged state cache, and
// at boundaries pools them into entries. It owns the state cache and the entry cache of one layer; a ratio-4 layer has
// two (main and indexer). Source: specification, section 5.
#ifndef DSV4_MODEL_COMPRESSOR_H_
#define DSV4_MODEL_COMPRESSOR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "model/cache_plan.h"
#include "model/step_state.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/paged_rows.h"
#include "runtime/stream.h"

namespace dsv4 {

struct CompressorOptions {
  int64_t ratio = 0;
  bool overlap = false;
  int64_t head_dim = 0;
  int64_t rope_dim = 0;
  float eps = 0.0f;
  bool hadamard = false;  // indexer only
  RowFormat entry_format = RowFormat::kF32;
  CacheGroupPlan state;
  CacheGroupPlan entries;

  // Columns of the projections: a token's contributions to the next and to its own window, with overlap.
  int64_t state_width() const { return (overlap ? 2 : 1) * head_dim; }
};

class Compressor {
 public:
  Compressor(const CompressorOptions& options, const CompressorWeights& weights, const WeightView& cos_sin)
      : options_(options), weights_(weights), cos_sin_(cos_sin) {}

  // Places the two caches; called by Arena::Create twice.
  void LayOutCaches(Arena& arena);

  // x: f32|bf16 [N, D]. kv_score: scratch, f32 [N, at least 2 * state_width].
  absl::Status Record(Stream& stream, const StepContext& context, const CompressedStep& step, const TensorView& x,
                      const TensorView& kv_score) const;

  const CompressorOptions& options() const { return options_; }
  const TensorView& state_cache() const { return state_cache_; }
  const PagedRows& entries() const { return entries_; }

 private:
  CompressorOptions options_;
  CompressorWeights weights_;
  WeightView cos_sin_;
  TensorView state_cache_;  // f32 [blocks, block_size, 2 * state_width]
  PagedRows entries_;
};

}  // namespace dsv4

#endif  // DSV4_MODEL_COMPRESSOR_H_
