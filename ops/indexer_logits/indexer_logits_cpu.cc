#include <algorithm>
#include <vector>

#include "ops/indexer_logits/indexer_logits.h"
#include "ops/linear/matrix_product_cpu.h"
#include "runtime/dtype.h"
#include "runtime/element_access.h"

namespace dsv4::indexer_logits {
namespace {

constexpr int64_t kMxfp4Block = 32;

// Head h of row i as fp32. The scale of an e4m3 head is in the weights.
void LoadQuery(const Params& params, int64_t i, int64_t h, float* out) {
  const int64_t channels = params.keys.row_size;
  switch (params.q_values.dtype) {
    case DType::kE4m3:
      for (int64_t k = 0; k < channels; ++k) out[k] = ToFloat(*params.q_values.At<E4m3>(i, h, k));
      break;
    case DType::kE2m1x2:
      for (int64_t k = 0; k < channels; ++k) {
        const int pair = *params.q_values.At<uint8_t>(i, h, k / 2);
        const E2m1 value = {static_cast<uint8_t>(k % 2 == 0 ? pair & 0xf : pair >> 4)};
        out[k] = ToFloat(value) * ToFloat(*params.q_scales.At<E8m0>(i, h, k / kMxfp4Block));
      }
      break;
    default:
      LoadRow(params.q_values, out, i, h);
  }
}

}  // namespace

void RunCpu(const Params& params) {
  const int64_t rows = params.q_values.extents[0];
  const int64_t heads = params.q_values.extents[1];
  const int64_t channels = params.keys.row_size;
  const int64_t blocks = params.block_table.extents[1];
  const int64_t rows_per_page = params.keys.rows_per_page;
  std::vector<float> query(heads * channels);
  std::vector<float> key(channels);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t count = *params.counts.At<int32_t>(i);
    if (count <= 0) continue;
    const int32_t* table = params.block_table.Row<int32_t>(*params.requests.At<int32_t>(i));
    for (int64_t h = 0; h < heads; ++h) LoadQuery(params, i, h, query.data() + h * channels);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t block = table[j / rows_per_page % blocks];
      DecodeRow(params.keys, block * rows_per_page + j % rows_per_page, key.data());
      float score = 0.0f;
      for (int64_t h = 0; h < heads; ++h) {
        const float product = DotCpu(query.data() + h * channels, key.data(), channels);
        score += *params.weights.At<float>(i, h) * std::max(product, 0.0f);
      }
      *params.logits.At<float>(i, j) = score;
    }
  }
}

}  // namespace dsv4::indexer_logits
