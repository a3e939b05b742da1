#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert.h"
#include "ops/rope/rope_cpu.h"
#include "runtime/element_access.h"

namespace dsv4::qnorm_rope_window_insert {

void RunCpu(const Params& params) {
  const int64_t heads = params.q.extents[1];
  const int64_t head_size = params.q.extents[2];
  const int64_t rope_size = params.window.rope_size;
  std::vector<float> row(head_size);
  float* const rotary = row.data() + head_size - rope_size;

  for (int64_t i = 0; i < params.q.extents[0]; ++i) {
    const int64_t slot = *params.slots.At<int64_t>(i);
    if (slot < 0) continue;  // a pad
    const float* cos_sin = params.cos_sin.Row<float>(*params.positions.At<int64_t>(i));

    for (int64_t h = 0; h < heads; ++h) {
      LoadRow(params.q, row.data(), i, h);
      float square_sum = 0.0f;
      for (const float x : row) square_sum += x * x;
      const float norm = 1.0f / std::sqrt(square_sum / static_cast<float>(head_size) + params.eps);
      for (float& x : row) x *= norm;
      RotateCpu(rotary, rope_size, cos_sin);
      StoreRow(params.q, row.data(), i, h);
    }

    LoadRow(params.kv, row.data(), i);
    RotateCpu(rotary, rope_size, cos_sin);
    EncodeRow(params.window, slot, row.data());
  }
}

}  // namespace dsv4::qnorm_rope_window_insert
