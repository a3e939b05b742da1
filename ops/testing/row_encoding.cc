#include "ops/testing/row_encoding.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "gtest/gtest.h"
#include "ops/testing/op_test.h"

namespace dsv4 {

EncodedRow EncodeByDefinition(RowFormat format, const std::vector<float>& row, int64_t rope_size) {
  EncodedRow encoded;
  const int64_t size = static_cast<int64_t>(row.size());
  const auto put_bf16 = [&](int64_t begin) {
    for (int64_t c = begin; c < size; ++c) {
      const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(NearestBf16(row[c])));
      encoded.values.push_back(static_cast<uint8_t>(bits >> 16));
      encoded.values.push_back(static_cast<uint8_t>(bits >> 24));
    }
  };
  const auto exponent_of = [&](int64_t begin, int64_t count, double floor, double top) {
    double largest = 0;
    for (int64_t c = begin; c < begin + count; ++c) largest = std::max(largest, std::abs(NearestBf16(row[c])));
    return ScaleExponent(largest, floor, top);
  };
  switch (format) {
    case RowFormat::kF32:
      ADD_FAILURE() << "f32 rows are compared as they are";
      break;
    case RowFormat::kBf16:
      put_bf16(0);
      break;
    case RowFormat::kFp8:
      for (int64_t begin = 0; begin < size - rope_size; begin += 64) {
        const int exponent = exponent_of(begin, 64, 1e-4, 448);
        encoded.scales.push_back(static_cast<uint8_t>(exponent + 127));
        for (int64_t c = begin; c < begin + 64; ++c) {
          encoded.values.push_back(NearestE4m3(std::ldexp(NearestBf16(row[c]), -exponent)));
        }
      }
      encoded.scales.resize((encoded.scales.size() + 7) / 8 * 8, 0);
      put_bf16(size - rope_size);
      break;
    case RowFormat::kFp8Key: {
      const int exponent = exponent_of(0, size, 1e-4, 448);
      const uint32_t scale = std::bit_cast<uint32_t>(static_cast<float>(std::ldexp(1.0, exponent)));
      for (int shift = 0; shift < 32; shift += 8) encoded.scales.push_back(static_cast<uint8_t>(scale >> shift));
      for (const float x : row) encoded.values.push_back(NearestE4m3(std::ldexp(NearestBf16(x), -exponent)));
      break;
    }
    case RowFormat::kMxfp4Key:
      for (int64_t begin = 0; begin < size; begin += 32) {
        const int exponent = exponent_of(begin, 32, 6 * std::ldexp(1.0, -126), 6);
        encoded.scales.push_back(static_cast<uint8_t>(exponent + 127));
        for (int64_t c = begin; c < begin + 32; c += 2) {
          const uint8_t low = NearestE2m1(std::ldexp(NearestBf16(row[c]), -exponent));
          const uint8_t high = NearestE2m1(std::ldexp(NearestBf16(row[c + 1]), -exponent));
          encoded.values.push_back(static_cast<uint8_t>(low | high << 4));
        }
      }
      break;
  }
  return encoded;
}

}  // namespace dsv4
