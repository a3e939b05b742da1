#include "model/cache_plan.h"

#include <algorithm>

#include "runtime/paged_rows.h"

namespace dsv4 {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

CacheGroupPlan PlanRing(int64_t window, int64_t rows_per_block, const CacheSizes& sizes) {
  CacheGroupPlan plan;
  plan.rows_per_block = rows_per_block;
  plan.ring = true;
  // No longer than the context, where the ring would be more than an absolute table.
  plan.table_blocks = std::min(CeilDivide(window + sizes.max_rows_per_request, rows_per_block) + 1,
                               CeilDivide(sizes.max_context, rows_per_block));
  plan.num_blocks = plan.table_blocks * sizes.max_requests;
  return plan;
}

CacheGroupPlan PlanEntries(int64_t ratio, const CacheSizes& sizes) {
  CacheGroupPlan plan;
  plan.ratio = ratio;
  plan.rows_per_block = std::max<int64_t>(1, kTokensPerPage / ratio);
  const int64_t tokens_per_block = plan.rows_per_block * ratio;
  plan.table_blocks = CeilDivide(sizes.max_context, tokens_per_block);
  // Each request wastes less than one block.
  plan.num_blocks = std::min(CeilDivide(sizes.cache_tokens, tokens_per_block) + sizes.max_requests,
                             plan.table_blocks * sizes.max_requests);
  return plan;
}

// The published block sizes are 4 rows for ratio 4 and 8 for ratio 128; other ratios take what fits between.
int64_t StateRowsPerBlock(int64_t ratio) { return std::min<int64_t>(ratio, 8); }

int64_t StateWindow(const LayerKind& kind) { return kind.overlap ? 2 * kind.ratio : kind.ratio; }

}  // namespace

int64_t CacheGroupPlan::BlocksFor(int64_t tokens) const {
  return ring ? table_blocks : CeilDivide(tokens / ratio, rows_per_block);
}

int CachePlan::CompressedIndex(const LayerKind& kind) const {
  for (size_t i = 0; i < compressed.size(); ++i) {
    if (compressed[i].kind == kind) return static_cast<int>(i);
  }
  return -1;
}

std::vector<CacheGroupPlan> CachePlan::Groups() const {
  std::vector<CacheGroupPlan> groups = {window};
  for (const CompressedPlan& plan : compressed) {
    groups.push_back(plan.state);
    groups.push_back(plan.entries);
  }
  return groups;
}

CachePlan PlanCaches(const ModelConfig& config, const CacheSizes& sizes) {
  CachePlan plan;
  plan.window = PlanRing(config.sliding_window, kWindowRowsPerPage, sizes);
  for (const std::vector<LayerKind>* layers : {&config.layers, &config.mtp_layers}) {
    for (const LayerKind& kind : *layers) {
      if (!kind.compressed() || plan.CompressedIndex(kind) >= 0) continue;
      plan.compressed.push_back({kind, PlanRing(StateWindow(kind), StateRowsPerBlock(kind.ratio), sizes),
                                 PlanEntries(kind.ratio, sizes)});
    }
  }
  return plan;
}

CacheBytes CountCacheBytes(const ModelConfig& config, const NumericOptions& numeric) {
  CacheBytes bytes;
  const int64_t row = RowBytes(numeric.row_format(), config.head_dim, config.qk_rope_head_dim);
  const int64_t key = RowBytes(numeric.key_format(), config.index_head_dim, config.qk_rope_head_dim);
  for (const std::vector<LayerKind>* layers : {&config.layers, &config.mtp_layers}) {
    for (const LayerKind& kind : *layers) {
      bytes.window_per_request += config.sliding_window * row;
      if (!kind.compressed()) continue;
      const int64_t state_row = (kind.overlap ? 4 : 2) * static_cast<int64_t>(sizeof(float));
      const int64_t channels = config.head_dim + (kind.indexer ? config.index_head_dim : 0);
      bytes.state_per_request += StateWindow(kind) * state_row * channels;
      bytes.growing_per_token +=
          static_cast<double>(row + (kind.indexer ? key : 0)) / static_cast<double>(kind.ratio);
    }
  }
  return bytes;
}

}  // namespace dsv4
