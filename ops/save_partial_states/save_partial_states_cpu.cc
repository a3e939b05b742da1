#include <cstdint>

#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/element_access.h"

namespace dsv4::save_partial_states {

void RunCpu(const Params& params, const SlotCheck& check) {
  const int64_t tokens = params.kv.extents[0];
  const int64_t head_size = params.kv.extents[1];
  const int64_t ratio = params.ape.extent(0);
  const int64_t block_size = params.state_cache.extents[1];
  const int64_t state_width = params.state_cache.extents[2] / 2;

  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t slot = *params.slots.At<int64_t>(i);
    if (slot < 0) continue;  // a pad: its position, kv and score may be anything
    if (!AcceptsSlot(check, i)) continue;
    const int64_t block = slot / block_size;
    const int64_t row = slot % block_size;
    const int64_t phase = *params.positions.At<int64_t>(i) % ratio;
    for (int64_t c = 0; c < head_size; ++c) {
      StoreFloat(params.state_cache, LoadFloat(params.kv, i, c), block, row, c);
      const float score = LoadFloat(params.score, i, c) + LoadFloat(params.ape, phase, c);
      StoreFloat(params.state_cache, score, block, row, state_width + c);
    }
  }
}

}  // namespace dsv4::save_partial_states
