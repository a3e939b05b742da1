#include <algorithm>
#include <cstdint>

#include "ops/step_metadata/step_metadata.h"

namespace dsv4::step_metadata {
namespace {

int64_t EntrySlot(const TensorView& block_table, int64_t rows_per_block, int32_t request, int64_t entry) {
  const int64_t block = *block_table.At<int32_t>(request, (entry / rows_per_block) % block_table.extents[1]);
  return block * rows_per_block + entry % rows_per_block;
}

}  // namespace

void RunCpu(const Params& params) {
  for (int64_t i = 0; i < params.requests.extents[0]; ++i) {
    const int32_t request = *params.requests.At<int32_t>(i);
    const bool live = request >= 0;
    const int64_t position = live ? *params.positions.At<int64_t>(i) : 0;
    *params.row_tokens.At<int32_t>(i) = live ? *params.token_ids.At<int32_t>(i) : 0;
    *params.row_requests.At<int32_t>(i) = live ? request : 0;
    *params.row_positions.At<int64_t>(i) = position;

    for (const CacheGroup& group : params.groups) {
      const bool writes = live && (position + 1) % group.ratio == 0;
      *group.slots.At<int64_t>(i) =
          writes ? EntrySlot(group.block_table, group.rows_per_block, request, position / group.ratio) : -1;
    }

    for (const VisibleRows& visible : params.visible) {
      const int64_t existing = live ? (position + 1) / visible.ratio : 0;
      const int64_t count = visible.limit > 0 ? std::min(existing, visible.limit) : existing;
      *visible.counts.At<int32_t>(i) = static_cast<int32_t>(count);
      if (visible.slots.empty()) continue;
      const int64_t first = existing - count;
      for (int64_t k = 0; k < visible.slots.extents[1]; ++k) {
        const int64_t slot =
            k < count ? EntrySlot(visible.block_table, visible.rows_per_block, request, first + k) : -1;
        *visible.slots.At<int32_t>(i, k) = static_cast<int32_t>(slot);
      }
    }
  }
}

}  // namespace dsv4::step_metadata
