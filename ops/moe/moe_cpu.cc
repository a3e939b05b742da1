#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/linear/linear.h"
#include "ops/linear/matrix_product_cpu.h"
#include "ops/moe/moe.h"
#include "runtime/dtype.h"
#include "runtime/element_access.h"

namespace dsv4::moe {
namespace {

float Softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

float Silu(float x) { return x / (1.0f + std::exp(-x)); }

// The `count` experts with the largest score + bias, in descending order; of equal ones the lower index first. A NaN
// ranks with -inf, so that every row gets `count` different experts.
std::vector<int64_t> LargestScores(const float* scores, const WeightView& bias, int64_t count) {
  std::vector<float> keys(bias.extent(0));
  std::vector<int64_t> order(keys.size());
  for (size_t e = 0; e < keys.size(); ++e) {
    const float key = scores[e] + bias.As<float>()[e];
    keys[e] = std::isnan(key) ? -std::numeric_limits<float>::infinity() : key;
    order[e] = static_cast<int64_t>(e);
  }
  std::stable_sort(order.begin(), order.end(), [&keys](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  order.resize(count);
  return order;
}

// Chooses each row's experts and their weights.
void Route(const Params& params, const std::vector<float>& x) {
  const int64_t rows = params.x.extents[0];
  const int64_t experts = params.gate.rows();
  const int64_t chosen = params.expert_ids.extents[1];
  std::vector<float> scores(rows * experts);
  MatrixProductCpu(x.data(), rows, params.gate, scores.data());
  for (float& score : scores) score = std::sqrt(Softplus(score));

  for (int64_t i = 0; i < rows; ++i) {
    const float* s = scores.data() + i * experts;
    std::vector<int64_t> ids;
    if (params.expert_table.empty()) {
      ids = LargestScores(s, params.bias, chosen);
    } else {
      const int32_t* of_token = params.expert_table.Row<int32_t>(*params.row_tokens.At<int32_t>(i));
      ids.assign(of_token, of_token + chosen);
    }
    float sum = 0.0f;
    for (const int64_t e : ids) sum += s[e];
    for (int64_t c = 0; c < chosen; ++c) {
      *params.expert_ids.At<int32_t>(i, c) = static_cast<int32_t>(ids[c]);
      *params.expert_weights.At<float>(i, c) = s[ids[c]] / sum * params.routed_scaling_factor;
    }
  }
}

// out[r] = w2 (silu(min(w1 x[r], limit)) * clamp(w3 x[r], -limit, limit) * weights[r]), for rows x that are already
// quantised where that is asked for.
std::vector<float> RunExpert(const Params& params, const ExpertWeights& expert, const std::vector<float>& x,
                             const std::vector<float>& weights) {
  const int64_t rows = static_cast<int64_t>(weights.size());
  const int64_t inner = expert.w1.rows();
  const bool bf16 = params.x.dtype == DType::kBf16;
  const auto round = [bf16](float value) { return bf16 ? RoundToBf16(value) : value; };
  const float limit = params.swiglu_limit;

  std::vector<float> gate(rows * inner);
  std::vector<float> up(rows * inner);
  MatrixProductCpu(x.data(), rows, expert.w1, gate.data());
  MatrixProductCpu(x.data(), rows, expert.w3, up.data());
  std::vector<float> hidden(rows * inner);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = r * inner; k < (r + 1) * inner; ++k) {
      const float g = std::min(round(gate[k]), limit);
      const float u = std::clamp(round(up[k]), -limit, limit);
      hidden[k] = round(Silu(g) * u * weights[r]);
    }
    if (params.quantize_activations) {
      QuantizeActivationRowCpu(hidden.data() + r * inner, inner, linear::kActivationBlock);
    }
  }
  std::vector<float> out(rows * expert.w2.rows());
  MatrixProductCpu(hidden.data(), rows, expert.w2, out.data());
  for (float& value : out) value = round(value);
  return out;
}

}  // namespace

void RunCpu(const Params& params) {
  const int64_t rows = params.x.extents[0];
  const int64_t channels = params.x.extents[1];
  const int64_t experts = params.gate.rows();
  const int64_t chosen = params.expert_ids.extents[1];

  std::vector<float> x(rows * channels);
  for (int64_t i = 0; i < rows; ++i) LoadRow(params.x, x.data() + i * channels, i);
  Route(params, x);
  if (params.quantize_activations) {
    for (int64_t i = 0; i < rows; ++i) {
      QuantizeActivationRowCpu(x.data() + i * channels, channels, linear::kActivationBlock);
    }
  }

  // What the expert of choice c of row i gives is row i * chosen + c. An expert works on all rows that chose it.
  std::vector<std::vector<int64_t>> choices(experts);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < chosen; ++c) choices[*params.expert_ids.At<int32_t>(i, c)].push_back(i * chosen + c);
  }
  std::vector<float> expert_out(rows * chosen * channels);
  for (int64_t e = 0; e < experts; ++e) {
    if (choices[e].empty()) continue;
    std::vector<float> expert_x;
    std::vector<float> weights;
    for (const int64_t choice : choices[e]) {
      const float* row = x.data() + choice / chosen * channels;
      expert_x.insert(expert_x.end(), row, row + channels);
      weights.push_back(*params.expert_weights.At<float>(choice / chosen, choice % chosen));
    }
    const ExpertWeights expert = {params.experts.w1.Index(e), params.experts.w3.Index(e), params.experts.w2.Index(e)};
    const std::vector<float> out = RunExpert(params, expert, expert_x, weights);
    for (size_t r = 0; r < choices[e].size(); ++r) {
      std::copy_n(out.data() + r * channels, channels, expert_out.data() + choices[e][r] * channels);
    }
  }

  const std::vector<float> shared = RunExpert(params, params.shared, x, std::vector<float>(rows, 1.0f));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < channels; ++k) {
      float sum = 0.0f;
      for (int64_t c = 0; c < chosen; ++c) sum += expert_out[(i * chosen + c) * channels + k];
      StoreFloat(params.out, sum + shared[i * channels + k], i, k);
    }
  }
}

}  // namespace dsv4::moe
