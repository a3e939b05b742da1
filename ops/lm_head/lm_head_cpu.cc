#include <vector>

#include "ops/linear/matrix_product_cpu.h"
#include "ops/lm_head/lm_head.h"
#include "runtime/element_access.h"

namespace dsv4::lm_head {

void RunCpu(const Params& params) {
  const int64_t channels = params.weight.cols();
  const int64_t vocabulary = params.weight.rows();
  std::vector<int64_t> live;
  for (int64_t i = 0; i < params.rows.extents[0]; ++i) {
    if (*params.rows.At<int32_t>(i) >= 0) live.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(live.size());
  std::vector<float> x(count * channels);
  std::vector<float> logits(count * vocabulary);
  for (int64_t l = 0; l < count; ++l) LoadRow(params.x, x.data() + l * channels, live[l]);
  MatrixProductCpu(x.data(), count, params.weight, logits.data());
  for (int64_t l = 0; l < count; ++l) StoreRow(params.logits, logits.data() + l * vocabulary, live[l]);
}

}  // namespace dsv4::lm_head
