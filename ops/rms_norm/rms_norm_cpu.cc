#include <cmath>
#include <vector>

#include "ops/linear/matrix_product_cpu.h"
#include "ops/rms_norm/rms_norm.h"
#include "runtime/element_access.h"

namespace dsv4::rms_norm {

void RunCpu(const Params& params) {
  const int64_t rows = params.x.extents[0];
  const int64_t channels = params.x.extents[1];
  std::vector<float> row(channels);
  for (int64_t i = 0; i < rows; ++i) {
    LoadRow(params.x, row.data(), i);
    const float mean_square = DotCpu(row.data(), row.data(), channels) / static_cast<float>(channels);
    const float factor = 1.0f / std::sqrt(mean_square + params.eps);
    for (int64_t k = 0; k < channels; ++k) {
      StoreFloat(params.out, row[k] * factor * LoadFloat(params.weight, k), i, k);
    }
  }
}

}  // namespace dsv4::rms_norm
