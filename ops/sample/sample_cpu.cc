#include <array>
#include <cmath>
#include <cstdint>

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

uint32_t Low(int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x)); }
uint32_t High(int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); }

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

void RunCpu(const Params& params) {
  for (int64_t l = 0; l < params.rows.extents[0]; ++l) {
    const int32_t row = *params.rows.At<int32_t>(l);
    if (row < 0) continue;
    const int64_t seed = *params.seeds.At<int64_t>(l);
    const int64_t request = *params.request_ids.At<int64_t>(l);
    const int64_t position = *params.positions.At<int64_t>(row) + 1;
    const uint32_t word =
        Philox4x32({Low(request), High(request), Low(position), High(position)}, {Low(seed), High(seed)})[0];
    const float u = static_cast<float>(word >> 8) * 0x1p-24f;

    const int32_t token =
        Draw(params.logits.Row<float>(l), params.logits.extents[1], *params.temperatures.At<float>(l), u);
    *params.tokens.At<int32_t>(l) = token;
    int32_t& next_token = *params.next_tokens.At<int32_t>(row);
    if (next_token < 0) next_token = token;
  }
}

}  // namespace dsv4::sample
