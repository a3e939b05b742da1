#include <cmath>
#include <cstdint>

#include "ops/sample/philox.h"
#include "ops/sample/sample.h"

namespace dsv4::sample {
namespace {

// The token of the largest logit, of equal ones the lowest; 0 if all are NaN.
int32_t LargestLogit(const float* logits, int64_t vocabulary) {
  int64_t best = -1;
  for (int64_t t = 0; t < vocabulary; ++t) {
    if (std::isnan(logits[t])) continue;
    if (best < 0 || logits[t] > logits[best]) best = t;
  }
  return best < 0 ? 0 : static_cast<int32_t>(best);
}

// exp((logit - largest) / temperature), and 0 for NaN. Infinite logits are settled before infinity - infinity arises.
float Weight(float logit, float largest, float temperature) {
  if (std::isnan(logit)) return 0.0f;
  if (logit == largest) return 1.0f;
  if (std::isinf(logit)) return 0.0f;
  return std::exp((logit - largest) / temperature);
}

int32_t Draw(const float* logits, int64_t vocabulary, float temperature, float u) {
  const int32_t best = LargestLogit(logits, vocabulary);
  const float largest = logits[best];
  if (temperature == 0.0f || std::isnan(largest)) return best;

  // Summed in double: a running fp32 sum over a whole vocabulary would lose the small weights at its end.
  double total = 0.0;
  for (int64_t t = 0; t < vocabulary; ++t) total += Weight(logits[t], largest, temperature);
  const double target = u * total;
  double sum = 0.0;
  for (int64_t t = 0; t < vocabulary; ++t) {
    sum += Weight(logits[t], largest, temperature);
    if (sum > target) return static_cast<int32_t>(t);
  }
  return best;  // not reached: u < 1, so target < total, which the same sum reaches
}

}  // namespace

void RunCpu(const Params& params) {
  for (int64_t l = 0; l < params.rows.extents[0]; ++l) {
    const int32_t row = *params.rows.At<int32_t>(l);
    if (row < 0) continue;
    const float u = UniformAt(*params.seeds.At<int64_t>(l), *params.request_ids.At<int64_t>(l),
                              *params.positions.At<int64_t>(row) + 1);
    const int32_t token =
        Draw(params.logits.Row<float>(l), params.logits.extents[1], *params.temperatures.At<float>(l), u);
    *params.tokens.At<int32_t>(l) = token;
    int32_t& next_token = *params.next_tokens.At<int32_t>(row);
    if (next_token < 0) next_token = token;
  }
}

}  // namespace dsv4::sample
