// Which paged caches a model needs and how large they are. Caches come in groups; all layers of a group share one block
// table and one set of slots, each layer has its own pages.
//
//   window                  one row a token; a ring of blocks, for the last `sliding_window` tokens
//   per compressed kind:
//     state                 one row a token; a ring, for the compression window (main and indexer compressor alike)
//     entries               one row per `ratio` tokens, by absolute position (entries and indexer keys alike)
//
// A ring has blocks for its window, the widest step of one request, and one block more, so that no row is overwritten while
// a step may still read it. Source: specification, sections 9.1 and 9.3.
#ifndef DSV4_MODEL_CACHE_PLAN_H_
#define DSV4_MODEL_CACHE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "model/config.h"
#include "model/numeric_options.h"

namespace dsv4 {

inline constexpr int64_t kTokensPerPage = 256;  // of an entry page, whatever the ratio
inline constexpr int64_t kWindowRowsPerPage = 64;

struct CacheSizes {
  int64_t max_requests = 0;          // at a time
  int64_t max_context = 0;           // tokens of one request, prompt and output
  int64_t max_rows_per_request = 0;  // the widest step of one request
  int64_t cache_tokens = 0;          // tokens of all requests together that entry caches have room for
};

struct CacheGroupPlan {
  int64_t ratio = 1;           // tokens per row
  int64_t rows_per_block = 0;
  int64_t table_blocks = 0;    // width of the block table
  bool ring = false;           // a request holds all table_blocks, whatever its length
  int64_t num_blocks = 0;      // of the pool

  // Blocks that a request of `tokens` tokens holds.
  int64_t BlocksFor(int64_t tokens) const;
};

struct CompressedPlan {
  LayerKind kind;
  CacheGroupPlan state;
  CacheGroupPlan entries;
};

struct CachePlan {
  CacheGroupPlan window;
  std::vector<CompressedPlan> compressed;  // the distinct compressed kinds of the model's layers

  // Index into `compressed` of a layer's kind; -1 for a layer without compression.
  int CompressedIndex(const LayerKind& kind) const;
  // All groups, in a fixed order: the window, then state and entries of each compressed kind.
  std::vector<CacheGroupPlan> Groups() const;
};

CachePlan PlanCaches(const ModelConfig& config, const CacheSizes& sizes);

// Bytes of cache rows, all layers (MTP included) together, without page padding.
struct CacheBytes {
  double growing_per_token = 0.0;   // entries and indexer keys
  int64_t window_per_request = 0;   // the last sliding_window rows
  int64_t state_per_request = 0;    // the rows of one compression window
};
CacheBytes CountCacheBytes(const ModelConfig& config, const NumericOptions& numeric);

}  // namespace dsv4

#endif  // DSV4_MODEL_CACHE_PLAN_H_
