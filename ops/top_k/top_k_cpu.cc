#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/top_k/top_k.h"

namespace dsv4::top_k {

void RunCpu(const Params& params) {
  const int64_t rows = params.logits.extents[0];
  const int64_t width = params.indices.extents[1];
  const int64_t blocks = params.block_table.extents[1];
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < rows; ++i) {
    const float* logits = params.logits.Row<float>(i);
    const int64_t count = *params.counts.At<int32_t>(i);
    chosen.clear();
    for (int64_t j = 0; j < count; ++j) {
      if (!std::isnan(logits[j])) chosen.push_back(j);
    }
    if (static_cast<int64_t>(chosen.size()) > width) {
      std::nth_element(chosen.begin(), chosen.begin() + width, chosen.end(), [logits](int64_t a, int64_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
      });
      chosen.resize(width);
      std::sort(chosen.begin(), chosen.end());
    }
    for (int64_t c = 0; c < width; ++c) {
      int64_t index = -1;
      int64_t slot = -1;
      if (c < static_cast<int64_t>(chosen.size())) {
        index = chosen[c];
        const int32_t* table = params.block_table.Row<int32_t>(*params.requests.At<int32_t>(i));
        const int64_t block = table[index / params.rows_per_block % blocks];
        slot = block * params.rows_per_block + index % params.rows_per_block;
      }
      *params.indices.At<int32_t>(i, c) = static_cast<int32_t>(index);
      *params.slots.At<int32_t>(i, c) = static_cast<int32_t>(slot);
    }
  }
}

}  // namespace dsv4::top_k
