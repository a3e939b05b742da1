#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/linear/matrix_product_cpu.h"
#include "ops/mhc/mhc.h"
#include "runtime/element_access.h"

namespace dsv4::mhc {
namespace {

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The streams of the rows `rows` of `streams`, each row flattened.
std::vector<float> LoadStreams(const TensorView& streams, const std::vector<int64_t>& rows) {
  const int64_t count = streams.extents[1];
  const int64_t channels = streams.extents[2];
  std::vector<float> flat(rows.size() * count * channels);
  float* out = flat.data();
  for (const int64_t row : rows) {
    for (int64_t a = 0; a < count; ++a, out += channels) LoadRow(streams, out, row, a);
  }
  return flat;
}

// m = (fn v) * rsqrt(mean(v^2) + eps) for each flattened row v of `flat`.
std::vector<float> Mixes(const std::vector<float>& flat, int64_t rows, const WeightView& fn, float eps) {
  const int64_t mixes = fn.extent(0);
  const int64_t size = fn.extent(1);
  QuantizedWeight matrix;
  matrix.values = fn;
  std::vector<float> m(rows * mixes);
  MatrixProductCpu(flat.data(), rows, matrix, m.data());
  for (int64_t i = 0; i < rows; ++i) {
    const float* v = flat.data() + i * size;
    const float factor = 1.0f / std::sqrt(DotCpu(v, v, size) / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < mixes; ++k) m[i * mixes + k] *= factor;
  }
  return m;
}

// sum_a coefficients[a] * v[a][k], stored as row `out_row` of `out`.
void StoreWeightedStreams(const float* v, const std::vector<float>& coefficients, const TensorView& out,
                          int64_t out_row) {
  const int64_t channels = out.extents[1];
  for (int64_t k = 0; k < channels; ++k) {
    float sum = 0.0f;
    for (size_t a = 0; a < coefficients.size(); ++a) sum += coefficients[a] * v[a * channels + k];
    StoreFloat(out, sum, out_row, k);
  }
}

// Divides the elements i * stride, 0 <= i < count, by their sum + eps.
void Normalize(float* values, int64_t count, int64_t stride, float eps) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += values[i * stride];
  for (int64_t i = 0; i < count; ++i) values[i * stride] /= sum + eps;
}

// Turns the M x M logits C[a][b] into the mixing matrix, in place.
void Sinkhorn(float* c, int64_t streams, int64_t iterations, float eps) {
  for (int64_t a = 0; a < streams; ++a) {
    float* row = c + a * streams;
    const float largest = *std::max_element(row, row + streams);
    float sum = 0.0f;
    for (int64_t b = 0; b < streams; ++b) sum += row[b] = std::exp(row[b] - largest);
    for (int64_t b = 0; b < streams; ++b) row[b] = row[b] / sum + eps;
  }
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    if (iteration > 0) {
      for (int64_t a = 0; a < streams; ++a) Normalize(c + a * streams, streams, 1, eps);
    }
    for (int64_t b = 0; b < streams; ++b) Normalize(c + b, streams, streams, eps);
  }
}

std::vector<int64_t> AllRows(int64_t rows) {
  std::vector<int64_t> all(rows);
  for (int64_t i = 0; i < rows; ++i) all[i] = i;
  return all;
}

}  // namespace

void RunCpu(const PreParams& params) {
  const int64_t rows = params.streams.extents[0];
  const int64_t streams = params.streams.extents[1];
  const int64_t size = params.fn.extent(1);
  const int64_t mixes = params.fn.extent(0);
  const float* scale = params.scale.As<float>();
  const float* base = params.base.As<float>();
  const std::vector<float> flat = LoadStreams(params.streams, AllRows(rows));
  const std::vector<float> all_mixes = Mixes(flat, rows, params.fn, params.rms_eps);

  std::vector<float> in(streams);
  std::vector<float> comb(streams * streams);
  for (int64_t i = 0; i < rows; ++i) {
    const float* m = all_mixes.data() + i * mixes;
    for (int64_t a = 0; a < streams; ++a) in[a] = Sigmoid(m[a] * scale[0] + base[a]) + params.hc_eps;
    StoreWeightedStreams(flat.data() + i * size, in, params.out, i);
    for (int64_t a = 0; a < streams; ++a) {
      StoreFloat(params.post, 2.0f * Sigmoid(m[streams + a] * scale[1] + base[streams + a]), i, a);
    }
    for (int64_t k = 0; k < streams * streams; ++k) comb[k] = m[2 * streams + k] * scale[2] + base[2 * streams + k];
    Sinkhorn(comb.data(), streams, params.sinkhorn_iters, params.hc_eps);
    for (int64_t a = 0; a < streams; ++a) StoreRow(params.comb, comb.data() + a * streams, i, a);
  }
}

void RunCpu(const PostParams& params) {
  const int64_t rows = params.streams.extents[0];
  const int64_t streams = params.streams.extents[1];
  const int64_t channels = params.streams.extents[2];
  for (int64_t i = 0; i < rows; ++i) {
    const std::vector<float> x = LoadStreams(params.streams, {i});  // a copy: out may be the same memory
    for (int64_t b = 0; b < streams; ++b) {
      for (int64_t k = 0; k < channels; ++k) {
        float sum = LoadFloat(params.post, i, b) * LoadFloat(params.y, i, k);
        for (int64_t a = 0; a < streams; ++a) sum += LoadFloat(params.comb, i, a, b) * x[a * channels + k];
        StoreFloat(params.out, sum, i, b, k);
      }
    }
  }
}

void RunCpu(const HeadParams& params) {
  const int64_t streams = params.streams.extents[1];
  const int64_t size = params.fn.extent(1);
  const float* scale = params.scale.As<float>();
  const float* base = params.base.As<float>();

  std::vector<int64_t> stream_rows;
  std::vector<int64_t> out_rows;
  for (int64_t l = 0; l < params.out.extents[0]; ++l) {
    const int64_t row = params.rows.empty() ? l : *params.rows.At<int32_t>(l);
    if (row < 0) continue;
    stream_rows.push_back(row);
    out_rows.push_back(l);
  }
  const int64_t count = static_cast<int64_t>(out_rows.size());
  const std::vector<float> flat = LoadStreams(params.streams, stream_rows);
  const std::vector<float> all_mixes = Mixes(flat, count, params.fn, params.rms_eps);
  std::vector<float> in(streams);
  for (int64_t l = 0; l < count; ++l) {
    const float* m = all_mixes.data() + l * streams;
    for (int64_t a = 0; a < streams; ++a) in[a] = Sigmoid(m[a] * scale[0] + base[a]) + params.hc_eps;
    StoreWeightedStreams(flat.data() + l * size, in, params.out, out_rows[l]);
  }
}

}  // namespace dsv4::mhc
