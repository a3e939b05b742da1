#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "Eigen/Core"
#include "ops/linear/matrix_product_cpu.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "runtime/dtype.h"
#include "runtime/element_access.h"

namespace dsv4::sparse_attention {
namespace {

// Appends the rows that list i names, decoded, to `keys`.
void AppendKeys(const PagedRows& rows, const TensorView& slots, const TensorView& lengths, int64_t i,
                std::vector<float>& keys) {
  if (slots.empty()) return;
  int64_t length = slots.extents[1];
  if (!lengths.empty()) length = std::min<int64_t>(length, *lengths.At<int32_t>(i));
  for (int64_t t = 0; t < length; ++t) {
    const int64_t slot = *slots.At<int32_t>(i, t);
    if (slot < 0) continue;
    keys.resize(keys.size() + rows.row_size);
    DecodeRow(rows, slot, keys.data() + keys.size() - rows.row_size);
  }
}

}  // namespace

void RunCpu(const Params& params) {
  const int64_t rows = params.q.extents[0];
  const int64_t heads = params.q.extents[1];
  const int64_t channels = params.q.extents[2];
  const bool bf16 = params.q.dtype == DType::kBf16;
  // Scores are logarithms to base 2.
  const float scale = static_cast<float>(params.scale * std::numbers::log2e);
  std::vector<float> keys;
  std::vector<float> scores;
  std::vector<float> q(channels);
  Eigen::VectorXf sum_of_values(channels);
  for (int64_t i = 0; i < rows; ++i) {
    keys.clear();
    AppendKeys(params.window, params.window_slots, params.window_lengths, i, keys);
    AppendKeys(params.entries, params.entry_slots, params.entry_lengths, i, keys);
    const int64_t count = static_cast<int64_t>(keys.size()) / channels;
    scores.resize(count);
    for (int64_t h = 0; h < heads; ++h) {
      sum_of_values.setZero();
      if (count == 0) {
        StoreRow(params.out, sum_of_values.data(), i, h);
        *params.lse.At<float>(i, h) = std::numeric_limits<float>::infinity();
        continue;
      }
      LoadRow(params.q, q.data(), i, h);
      float largest = -std::numeric_limits<float>::infinity();
      for (int64_t t = 0; t < count; ++t) {
        scores[t] = scale * DotCpu(q.data(), keys.data() + t * channels, channels);
        largest = std::max(largest, scores[t]);
      }
      largest = std::ceil(largest);
      float sum = 0.0f;
      for (int64_t t = 0; t < count; ++t) {
        const float p = std::exp2(scores[t] - largest);
        sum += p;
        sum_of_values +=
            (bf16 ? RoundToBf16(p) : p) * Eigen::Map<const Eigen::VectorXf>(keys.data() + t * channels, channels);
      }
      sum_of_values /= sum + std::exp2(params.sink.As<float>()[h] * std::numbers::log2e_v<float> - largest);
      StoreRow(params.out, sum_of_values.data(), i, h);
      *params.lse.At<float>(i, h) = (largest + std::log2(sum)) * std::numbers::ln2_v<float>;
    }
  }
}

}  // namespace dsv4::sparse_attention
