#include "ops/rope/rope_cpu.h"

#include <cmath>

namespace dsv4 {

void RotateCpu(float* values, int64_t channels, const float* cos_sin) {
  const int64_t pairs = channels / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const float cosine = cos_sin[i], sine = cos_sin[pairs + i];
    const float a = values[2 * i], b = values[2 * i + 1];
    values[2 * i] = a * cosine - b * sine;
    values[2 * i + 1] = a * sine + b * cosine;
  }
}

void RotateInverseCpu(float* values, int64_t channels, const float* cos_sin) {
  const int64_t pairs = channels / 2;
  for (int64_t i = 0; i < pairs; ++i) {
    const float cosine = cos_sin[i], sine = cos_sin[pairs + i];
    const float a = values[2 * i], b = values[2 * i + 1];
    values[2 * i] = a * cosine + b * sine;
    values[2 * i + 1] = b * cosine - a * sine;
  }
}

void HadamardCpu(float* values, int64_t channels) {
  // The matrix of order 2n is [[H, H], [H, -H]], so it factors into one pass of sums and differences per power of two.
  for (int64_t half = 1; half < channels; half *= 2) {
    for (int64_t begin = 0; begin < channels; begin += 2 * half) {
      for (int64_t i = begin; i < begin + half; ++i) {
        const float a = values[i], b = values[i + half];
        values[i] = a + b;
        values[i + half] = a - b;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(channels));
  for (int64_t i = 0; i < channels; ++i) values[i] *= scale;
}

}  // namespace dsv4
