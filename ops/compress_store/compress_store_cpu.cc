#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/compress_store/compress_store.h"
#include "ops/rope/rope_cpu.h"
#include "runtime/element_access.h"

namespace dsv4::compress_store {
namespace {

// One state row that an entry pools: where it lies, and which of its column halves it contributes.
struct WindowRow {
  int64_t block;
  int64_t row;
  int64_t value_column;
  int64_t score_column;
};

// The rows of 5.2 for the entry that ends at `position`.
std::vector<WindowRow> FindWindowRows(const Params& params, int32_t request, int64_t position) {
  const int64_t head_size = params.entries.row_size;
  const int64_t state_width = params.state_cache.extents[2] / 2;
  const int64_t block_size = params.state_cache.extents[1];
  const int64_t table_blocks = params.state_block_table.extents[1];
  const int64_t window_begin = position - params.ratio + 1;
  const int64_t first = params.overlap ? window_begin - params.ratio : window_begin;

  std::vector<WindowRow> rows;
  for (int64_t t = std::max<int64_t>(first, 0); t <= position; ++t) {
    const int64_t column = params.overlap && t >= window_begin ? head_size : 0;
    rows.push_back({.block = *params.state_block_table.At<int32_t>(request, (t / block_size) % table_blocks),
                    .row = t % block_size,
                    .value_column = column,
                    .score_column = state_width + column});
  }
  return rows;
}

float PoolChannel(const TensorView& state_cache, const std::vector<WindowRow>& rows, int64_t channel) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const WindowRow& row : rows) {
    largest = std::max(largest, LoadFloat(state_cache, row.block, row.row, row.score_column + channel));
  }
  float weight_sum = 0.0f, weighted_sum = 0.0f;
  for (const WindowRow& row : rows) {
    const float weight = std::exp(LoadFloat(state_cache, row.block, row.row, row.score_column + channel) - largest);
    weight_sum += weight;
    weighted_sum += weight * LoadFloat(state_cache, row.block, row.row, row.value_column + channel);
  }
  return weighted_sum / weight_sum;
}

}  // namespace

void RunCpu(const Params& params) {
  const int64_t head_size = params.entries.row_size;
  const int64_t rope_size = params.entries.rope_size;
  std::vector<float> entry(head_size);

  for (int64_t i = 0; i < params.state_slots.extents[0]; ++i) {
    if (*params.state_slots.At<int64_t>(i) < 0) continue;
    const int64_t position = *params.positions.At<int64_t>(i);
    if ((position + 1) % params.ratio != 0) continue;
    const int64_t entry_slot = *params.entry_slots.At<int64_t>(i);
    if (entry_slot < 0) continue;

    const std::vector<WindowRow> rows = FindWindowRows(params, *params.requests.At<int32_t>(i), position);
    for (int64_t c = 0; c < head_size; ++c) entry[c] = PoolChannel(params.state_cache, rows, c);

    float square_sum = 0.0f;
    for (int64_t c = 0; c < head_size; ++c) square_sum += entry[c] * entry[c];
    const float norm = 1.0f / std::sqrt(square_sum / static_cast<float>(head_size) + params.eps);
    for (int64_t c = 0; c < head_size; ++c) entry[c] = entry[c] * norm * LoadFloat(params.norm_weight, c);

    // The entry's position is that of the first token of its own window, with overlap too.
    const int64_t entry_position = params.ratio * (position / params.ratio);
    RotateCpu(entry.data() + head_size - rope_size, rope_size, params.cos_sin.Row<float>(entry_position));
    if (params.hadamard) HadamardCpu(entry.data(), head_size);
    EncodeRow(params.entries, entry_slot, entry.data());
  }
}

}  // namespace dsv4::compress_store
