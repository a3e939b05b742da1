#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/indexer_query/indexer_query.h"
#include "ops/rope/rope_cpu.h"
#include "runtime/block_scale.h"
#include "runtime/dtype.h"
#include "runtime/element_access.h"

namespace dsv4::indexer_query {
namespace {

constexpr int64_t kMxfp4Block = 32;

void RoundRow(std::vector<float>& row, DType dtype) {
  if (dtype != DType::kBf16) return;
  for (float& value : row) value = RoundToBf16(value);
}

float LargestMagnitude(const float* values, int64_t count) {
  float largest = 0.0f;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::abs(values[k]));
  return largest;
}

// Stores head h of row i as e4m3 and returns its scale.
float StoreFp8(const Params& params, const std::vector<float>& row, int64_t i, int64_t h) {
  const int64_t channels = static_cast<int64_t>(row.size());
  const int exponent = Fp8ScaleExponent(LargestMagnitude(row.data(), channels));
  for (int64_t k = 0; k < channels; ++k) {
    *params.out_values.At<E4m3>(i, h, k) = E4m3FromFloat(row[k] * PowerOfTwo(-exponent));
  }
  return PowerOfTwo(exponent);
}

void StoreMxfp4(const Params& params, const std::vector<float>& row, int64_t i, int64_t h) {
  const int64_t blocks = static_cast<int64_t>(row.size()) / kMxfp4Block;
  for (int64_t block = 0; block < blocks; ++block) {
    const float* values = row.data() + block * kMxfp4Block;
    const int exponent = Mxfp4ScaleExponent(LargestMagnitude(values, kMxfp4Block));
    *params.out_scales.At<E8m0>(i, h, block) = E8m0FromExponent(exponent);
    for (int64_t k = 0; k < kMxfp4Block; k += 2) {
      const E2m1 even = E2m1FromFloat(values[k] * PowerOfTwo(-exponent));
      const E2m1 odd = E2m1FromFloat(values[k + 1] * PowerOfTwo(-exponent));
      *params.out_values.At<uint8_t>(i, h, (block * kMxfp4Block + k) / 2) =
          static_cast<uint8_t>(even.bits | (odd.bits << 4));
    }
  }
}

}  // namespace

void RunCpu(const Params& params) {
  const int64_t rows = params.q.extents[0];
  const int64_t heads = params.q.extents[1];
  const int64_t channels = params.q.extents[2];
  const int64_t rotary = params.cos_sin.extent(1);
  const float weight_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(channels * heads)));
  std::vector<float> row(channels);
  for (int64_t i = 0; i < rows; ++i) {
    const float* cos_sin = params.cos_sin.Row<float>(*params.positions.At<int64_t>(i));
    for (int64_t h = 0; h < heads; ++h) {
      LoadRow(params.q, row.data(), i, h);
      RotateCpu(row.data() + channels - rotary, rotary, cos_sin);
      RoundRow(row, params.q.dtype);
      if (params.hadamard) {
        HadamardCpu(row.data(), channels);
        RoundRow(row, params.q.dtype);
      }
      float weight = LoadFloat(params.weights, i, h) * weight_scale;
      if (params.format == RowFormat::kFp8Key) {
        weight *= StoreFp8(params, row, i, h);
      } else if (params.format == RowFormat::kMxfp4Key) {
        StoreMxfp4(params, row, i, h);
      } else {
        StoreRow(params.out_values, row.data(), i, h);
      }
      *params.out_weights.At<float>(i, h) = weight;
    }
  }
}

}  // namespace dsv4::indexer_query
