#include "runtime/paged_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/block_scale.h"
#include "runtime/dtype.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4 {
namespace {

constexpr int64_t kFp8Group = 64;
constexpr int64_t kMxfp4Group = 32;
constexpr int64_t kPageMultiple = 576;
// Far above any real size; products of sizes below them fit 64 bits.
constexpr int64_t kMaxRowSize = int64_t{1} << 20;
constexpr int64_t kMaxRowsPerPage = int64_t{1} << 24;

struct RowBytesAt {
  uint8_t* values;
  uint8_t* scales;
};

RowBytesAt Locate(const PagedRows& cache, int64_t slot) {
  const int64_t page = slot / cache.rows_per_page;
  const int64_t row = slot % cache.rows_per_page;
  const int64_t value_bytes = RowValueBytes(cache.format, cache.row_size, cache.rope_size);
  uint8_t* base = cache.pages.Row<uint8_t>(page);
  return {base + row * value_bytes, base + cache.rows_per_page * value_bytes +
                                        row * RowScaleBytes(cache.format, cache.row_size, cache.rope_size)};
}

float LargestMagnitude(const float* values, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(RoundToBf16(values[i])));
  return largest;
}

// Rounds to bf16, divides by the group's scale, rounds to e4m3. Returns the scale's exponent.
int EncodeFp8Group(const float* values, int64_t count, uint8_t* codes) {
  const int exponent = Fp8ScaleExponent(LargestMagnitude(values, count));
  for (int64_t i = 0; i < count; ++i) codes[i] = E4m3FromFloat(RoundToBf16(values[i]) * PowerOfTwo(-exponent)).bits;
  return exponent;
}

int EncodeMxfp4Group(const float* values, int64_t count, uint8_t* pairs) {
  const int exponent = Mxfp4ScaleExponent(LargestMagnitude(values, count));
  auto code = [&](int64_t i) { return E2m1FromFloat(RoundToBf16(values[i]) * PowerOfTwo(-exponent)).bits; };
  for (int64_t i = 0; i < count; i += 2) pairs[i / 2] = static_cast<uint8_t>(code(i) | (code(i + 1) << 4));
  return exponent;
}

void EncodeBf16(const float* values, int64_t count, uint8_t* bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const Bf16 value = Bf16FromFloat(values[i]);
    std::memcpy(bytes + 2 * i, &value, sizeof(value));
  }
}

void DecodeBf16(const uint8_t* bytes, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    Bf16 value;
    std::memcpy(&value, bytes + 2 * i, sizeof(value));
    values[i] = ToFloat(value);
  }
}

}  // namespace

std::string_view RowFormatName(RowFormat format) {
  switch (format) {
    case RowFormat::kF32:
      return "f32";
    case RowFormat::kBf16:
      return "bf16";
    case RowFormat::kFp8:
      return "fp8";
    case RowFormat::kFp8Key:
      return "fp8_key";
    case RowFormat::kMxfp4Key:
      return "mxfp4_key";
  }
  return "unknown row format";
}

int64_t RowValueBytes(RowFormat format, int64_t row_size, int64_t rope_size) {
  switch (format) {
    case RowFormat::kF32:
      return 4 * row_size;
    case RowFormat::kBf16:
      return 2 * row_size;
    case RowFormat::kFp8:
      return row_size - rope_size + 2 * rope_size;
    case RowFormat::kFp8Key:
      return row_size;
    case RowFormat::kMxfp4Key:
      return row_size / 2;
  }
  return 0;
}

int64_t RowScaleBytes(RowFormat format, int64_t row_size, int64_t rope_size) {
  switch (format) {
    case RowFormat::kF32:
    case RowFormat::kBf16:
      return 0;
    case RowFormat::kFp8:
      return ((row_size - rope_size) / kFp8Group + 7) / 8 * 8;
    case RowFormat::kFp8Key:
      return 4;
    case RowFormat::kMxfp4Key:
      return row_size / kMxfp4Group;
  }
  return 0;
}

int64_t RowBytes(RowFormat format, int64_t row_size, int64_t rope_size) {
  return RowValueBytes(format, row_size, rope_size) + RowScaleBytes(format, row_size, rope_size);
}

int64_t PagePayloadBytes(RowFormat format, int64_t rows_per_page, int64_t row_size, int64_t rope_size) {
  return rows_per_page * RowBytes(format, row_size, rope_size);
}

int64_t PageStrideBytes(RowFormat format, int64_t rows_per_page, int64_t row_size, int64_t rope_size) {
  const int64_t payload = PagePayloadBytes(format, rows_per_page, row_size, rope_size);
  if (format == RowFormat::kF32 || format == RowFormat::kBf16) return payload;
  return (payload + kPageMultiple - 1) / kPageMultiple * kPageMultiple;
}

absl::Status CheckPagedRows(std::string_view name, const PagedRows& cache) {
  auto error = [&](const auto&... parts) {
    return absl::InvalidArgumentError(StrCat(name, " (", RowFormatName(cache.format), "): ", parts...));
  };
  if (cache.rows_per_page < 1 || cache.rows_per_page > kMaxRowsPerPage) {
    return error("expected rows_per_page of 1 to ", kMaxRowsPerPage, ", got ", cache.rows_per_page);
  }
  if (cache.row_size < 1 || cache.row_size > kMaxRowSize) {
    return error("expected row_size of 1 to ", kMaxRowSize, ", got ", cache.row_size);
  }
  if (cache.rope_size < 0 || cache.rope_size > cache.row_size) {
    return error("expected rope_size of 0 to ", cache.row_size, ", got ", cache.rope_size);
  }
  switch (cache.format) {
    case RowFormat::kF32:
    case RowFormat::kBf16:
      break;
    case RowFormat::kFp8:
      if (cache.rope_size % 2 != 0 || cache.rope_size == cache.row_size ||
          (cache.row_size - cache.rope_size) % kFp8Group != 0) {
        return error("expected an even rope_size and row_size - rope_size a positive multiple of ", kFp8Group,
                     ", got rope_size ", cache.rope_size, " and row_size ", cache.row_size);
      }
      break;
    case RowFormat::kFp8Key:
      if (cache.row_size % 4 != 0) return error("expected row_size a multiple of 4, got ", cache.row_size);
      break;
    case RowFormat::kMxfp4Key:
      if (cache.row_size % kMxfp4Group != 0) {
        return error("expected row_size a multiple of ", kMxfp4Group, ", got ", cache.row_size);
      }
      break;
    default:
      return error("expected one of the known row formats");
  }
  DSV4_RETURN_IF_ERROR(CheckTensor(name, cache.pages, {DType::kU8}, {kAnyExtent, kAnyExtent}));
  const int64_t payload =
      PagePayloadBytes(cache.format, cache.rows_per_page, cache.row_size, cache.rope_size);
  if (cache.pages.extents[1] < payload) {
    return error("expected pages of at least ", payload, " bytes, got ", cache.pages.extents[1]);
  }
  if (reinterpret_cast<uintptr_t>(cache.pages.data) % 4 != 0) {
    return error("expected pages that start on a multiple of 4 bytes");
  }
  if (cache.pages.extents[0] > 1 && (cache.pages.strides[0] < payload || cache.pages.strides[0] % 4 != 0)) {
    return error("expected a page stride of at least ", payload, " bytes and a multiple of 4, got ",
                 cache.pages.strides[0]);
  }
  return absl::OkStatus();
}

void EncodeRow(const PagedRows& cache, int64_t slot, const float* row) {
  const RowBytesAt at = Locate(cache, slot);
  const int64_t size = cache.row_size;
  switch (cache.format) {
    case RowFormat::kF32:
      std::memcpy(at.values, row, static_cast<size_t>(size) * sizeof(float));
      return;
    case RowFormat::kBf16:
      EncodeBf16(row, size, at.values);
      return;
    case RowFormat::kFp8: {
      const int64_t quantised = size - cache.rope_size;
      const int64_t groups = quantised / kFp8Group;
      for (int64_t g = 0; g < groups; ++g) {
        const int exponent = EncodeFp8Group(row + g * kFp8Group, kFp8Group, at.values + g * kFp8Group);
        at.scales[g] = E8m0FromExponent(exponent).bits;
      }
      std::memset(at.scales + groups, 0,
                  static_cast<size_t>(RowScaleBytes(cache.format, size, cache.rope_size) - groups));
      EncodeBf16(row + quantised, cache.rope_size, at.values + quantised);
      return;
    }
    case RowFormat::kFp8Key: {
      const float scale = PowerOfTwo(EncodeFp8Group(row, size, at.values));
      std::memcpy(at.scales, &scale, sizeof(scale));
      return;
    }
    case RowFormat::kMxfp4Key:
      for (int64_t g = 0; g < size / kMxfp4Group; ++g) {
        const int exponent = EncodeMxfp4Group(row + g * kMxfp4Group, kMxfp4Group, at.values + g * kMxfp4Group / 2);
        at.scales[g] = E8m0FromExponent(exponent).bits;
      }
      return;
  }
}

void DecodeRow(const PagedRows& cache, int64_t slot, float* row) {
  const RowBytesAt at = Locate(cache, slot);
  const int64_t size = cache.row_size;
  switch (cache.format) {
    case RowFormat::kF32:
      std::memcpy(row, at.values, static_cast<size_t>(size) * sizeof(float));
      return;
    case RowFormat::kBf16:
      DecodeBf16(at.values, size, row);
      return;
    case RowFormat::kFp8: {
      const int64_t quantised = size - cache.rope_size;
      for (int64_t i = 0; i < quantised; ++i) {
        row[i] = ToFloat(E4m3{at.values[i]}) * ToFloat(E8m0{at.scales[i / kFp8Group]});
      }
      DecodeBf16(at.values + quantised, cache.rope_size, row + quantised);
      return;
    }
    case RowFormat::kFp8Key: {
      float scale = 0.0f;
      std::memcpy(&scale, at.scales, sizeof(scale));
      for (int64_t i = 0; i < size; ++i) row[i] = ToFloat(E4m3{at.values[i]}) * scale;
      return;
    }
    case RowFormat::kMxfp4Key:
      for (int64_t i = 0; i < size; ++i) {
        const uint8_t code = static_cast<uint8_t>(i % 2 == 0 ? at.values[i / 2] & 0xf : at.values[i / 2] >> 4);
        row[i] = ToFloat(E2m1{code}) * ToFloat(E8m0{at.scales[i / kMxfp4Group]});
      }
      return;
  }
}

}  // namespace dsv4
