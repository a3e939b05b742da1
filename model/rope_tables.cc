#include "model/rope_tables.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace dsv4 {
namespace {

// The pair, a real number, that turns `rotations` times over the original context.
double PairOfRotations(const ModelConfig& config, double base, double rotations) {
  const double turns = static_cast<double>(config.yarn.original_max_position_embeddings) / rotations;
  return static_cast<double>(config.qk_rope_head_dim) * std::log(turns / (2.0 * std::numbers::pi)) /
         (2.0 * std::log(base));
}

}  // namespace

std::vector<float> RopeFrequencies(const ModelConfig& config, bool compressed) {
  const int64_t size = config.qk_rope_head_dim;
  const double base = compressed ? config.compress_rope_theta : config.rope_theta;
  double low = 0.0;
  double high = 0.0;
  if (compressed) {
    low = std::max(std::floor(PairOfRotations(config, base, config.yarn.beta_fast)), 0.0);
    high = std::min(std::ceil(PairOfRotations(config, base, config.yarn.beta_slow)), static_cast<double>(size - 1));
    if (low == high) high += 0.001;
  }
  std::vector<float> frequencies;
  for (int64_t pair = 0; pair < size / 2; ++pair) {
    double frequency = std::pow(base, -2.0 * static_cast<double>(pair) / static_cast<double>(size));
    if (compressed) {
      // Fast pairs keep their frequency, slow ones are stretched by the factor, those between are blended.
      const double ramp = std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
      frequency = frequency * (1.0 - ramp) + frequency / config.yarn.factor * ramp;
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

void FillRopeRow(const std::vector<float>& frequencies, int64_t position, float* row) {
  const size_t pairs = frequencies.size();
  for (size_t pair = 0; pair < pairs; ++pair) {
    // The published model multiplies in fp32, which is far from the exact product at large positions: keep that, and
    // take accurate functions of it.
    const float angle = static_cast<float>(position) * frequencies[pair];
    row[pair] = static_cast<float>(std::cos(static_cast<double>(angle)));
    row[pairs + pair] = static_cast<float>(std::sin(static_cast<double>(angle)));
  }
}

std::vector<float> RopeTable(const ModelConfig& config, bool compressed, int64_t positions) {
  const std::vector<float> frequencies = RopeFrequencies(config, compressed);
  const int64_t row_size = 2 * static_cast<int64_t>(frequencies.size());
  std::vector<float> table(static_cast<size_t>(std::max<int64_t>(positions, 0) * row_size));
  for (int64_t position = 0; position < positions; ++position) {
    FillRopeRow(frequencies, position, table.data() + position * row_size);
  }
  return table;
}

}  // namespace dsv4
