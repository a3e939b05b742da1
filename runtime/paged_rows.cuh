// Paged rows in kernels: where a row lies, and the codecs of paged_rows.h, with the same bytes.
//
// A row is encoded either by warps that hold it in registers, kWidth consecutive channels a lane (EncodeSlice), or by a
// block that has it in shared memory (EncodeRowFromShared, any row size).
#ifndef DSV4_RUNTIME_PAGED_ROWS_CUH_
#define DSV4_RUNTIME_PAGED_ROWS_CUH_

#include <cstdint>

#include "runtime/block_reduce.cuh"
#include "runtime/block_scale.h"
#include "runtime/division.cuh"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/vector_access.cuh"

namespace dsv4 {

// Channels that share a scale.
inline constexpr int kFp8GroupChannels = 64;
inline constexpr int kMxfp4GroupChannels = 32;

// PagedRows as a kernel takes it.
struct PagedRowsPointer {
  uint8_t* pages = nullptr;
  int64_t page_stride = 0;  // bytes
  int64_t rows_per_page = 0;
  int32_t row_size = 0;
  int32_t rope_size = 0;
  int32_t value_bytes = 0;  // of a row
  int32_t scale_bytes = 0;
  RowFormat format = RowFormat::kF32;
};

inline PagedRowsPointer MakePagedRowsPointer(const PagedRows& rows) {
  return {.pages = rows.pages.As<uint8_t>(),
          .page_stride = rows.pages.strides[0],
          .rows_per_page = rows.rows_per_page,
          .row_size = static_cast<int32_t>(rows.row_size),
          .rope_size = static_cast<int32_t>(rows.rope_size),
          .value_bytes = static_cast<int32_t>(RowValueBytes(rows.format, rows.row_size, rows.rope_size)),
          .scale_bytes = static_cast<int32_t>(RowScaleBytes(rows.format, rows.row_size, rows.rope_size)),
          .format = rows.format};
}

struct RowAddress {
  uint8_t* values;
  uint8_t* scales;
};

__device__ __forceinline__ RowAddress LocateRow(const PagedRowsPointer& rows, int64_t slot) {
  const auto [page, row] = Divide(slot, rows.rows_per_page);
  uint8_t* const base = rows.pages + page * rows.page_stride;
  return {base + row * rows.value_bytes, base + rows.rows_per_page * rows.value_bytes + row * rows.scale_bytes};
}

namespace paged_rows_internal {

// Rows start on a multiple of 4 bytes in every format whose row size is a multiple of 4; wider only by luck.
template <int kWords>
__device__ __forceinline__ void StoreWords(uint8_t* p, const Vector<uint32_t, kWords>& words) {
  if constexpr (kWords == 1) {
    *reinterpret_cast<uint32_t*>(p) = words.values[0];
  } else if constexpr (kWords > 4) {
    Vector<uint32_t, 4> half;
#pragma unroll
    for (int begin = 0; begin < kWords; begin += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) half.values[i] = words.values[begin + i];
      StoreWords(p + 4 * begin, half);
    }
  } else if (reinterpret_cast<uintptr_t>(p) % (4 * kWords) == 0) {
    StoreVector(reinterpret_cast<uint32_t*>(p), words);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(p)[i] = words.values[i];
  }
}

template <int kWidth>
__device__ __forceinline__ void StoreF32(uint8_t* p, const Vector<float, kWidth>& values) {
  Vector<uint32_t, kWidth> words;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) words.values[i] = __float_as_uint(values.values[i]);
  StoreWords(p, words);
}

template <int kWidth>
__device__ __forceinline__ void StoreBf16(uint8_t* p, const Vector<float, kWidth>& values) {
  Vector<uint32_t, kWidth / 2> words;
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    words.values[i] = static_cast<uint32_t>(Bf16FromFloat(values.values[2 * i]).bits) |
                      static_cast<uint32_t>(Bf16FromFloat(values.values[2 * i + 1]).bits) << 16;
  }
  StoreWords(p, words);
}

// Of values that are already rounded to bf16.
template <int kWidth>
__device__ __forceinline__ void StoreE4m3(uint8_t* p, const Vector<float, kWidth>& rounded, int exponent) {
  const float inverse = PowerOfTwo(-exponent);
  Vector<uint32_t, kWidth / 4> words;
#pragma unroll
  for (int word = 0; word < kWidth / 4; ++word) {
    words.values[word] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words.values[word] |= static_cast<uint32_t>(E4m3FromFloat(rounded.values[4 * word + i] * inverse).bits) << 8 * i;
    }
  }
  StoreWords(p, words);
}

template <int kWidth>
__device__ __forceinline__ void StoreE2m1(uint8_t* p, const Vector<float, kWidth>& rounded, int exponent) {
  const float inverse = PowerOfTwo(-exponent);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    codes |= static_cast<uint32_t>(E2m1FromFloat(rounded.values[i] * inverse).bits) << 4 * i;
  }
  if constexpr (kWidth == 4) {
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(codes);
  } else {
    *reinterpret_cast<uint32_t*>(p) = codes;
  }
}

template <int kWidth>
__device__ __forceinline__ float LargestMagnitude(const Vector<float, kWidth>& values) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(values.values[i]));
  return largest;
}

}  // namespace paged_rows_internal

template <int kWidth>
__device__ __forceinline__ Vector<float, kWidth> RoundVectorToBf16(const Vector<float, kWidth>& values) {
  Vector<float, kWidth> rounded;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) rounded.values[i] = RoundToBf16(values.values[i]);
  return rounded;
}

// The largest magnitude among a lane's values, as the formats that have one scale a row take it.
template <int kWidth>
__device__ __forceinline__ float LargestEncodedMagnitude(const Vector<float, kWidth>& values) {
  return paged_rows_internal::LargestMagnitude(RoundVectorToBf16(values));
}

// Stores channels channel .. channel + kWidth - 1 of a row, 4 or 8 of them. The row size is a multiple of kWidth, the
// rotary part of the row too.
// The whole warp calls this. Lanes hold consecutive slices, and lane l's slice is at l * kWidth modulo 64 channels (so
// that a group of 64 or 32 channels is an aligned group of lanes). A lane that is not `active` stores nothing; the lanes
// of a group are all active or all not. `row_largest` is that of the whole row, and only kFp8Key uses it.
template <int kWidth>
__device__ __forceinline__ void EncodeSlice(const PagedRowsPointer& rows, const RowAddress& at, int channel,
                                            const Vector<float, kWidth>& values, float row_largest,
                                            bool active = true) {
  static_assert(kWidth == 4 || kWidth == 8);
  switch (rows.format) {
    case RowFormat::kF32:
      if (active) paged_rows_internal::StoreF32(at.values + int64_t{4} * channel, values);
      return;
    case RowFormat::kBf16:
      if (active) paged_rows_internal::StoreBf16(at.values + int64_t{2} * channel, values);
      return;
    case RowFormat::kFp8: {
      const Vector<float, kWidth> rounded = RoundVectorToBf16(values);
      const float largest = WarpMax<kFp8GroupChannels / kWidth>(paged_rows_internal::LargestMagnitude(rounded));
      if (!active) return;
      const int quantised = rows.row_size - rows.rope_size;
      if (channel >= quantised) {
        paged_rows_internal::StoreBf16(at.values + quantised + int64_t{2} * (channel - quantised), values);
        return;
      }
      const int exponent = Fp8ScaleExponent(largest);
      paged_rows_internal::StoreE4m3(at.values + channel, rounded, exponent);
      if (channel % kFp8GroupChannels == 0) {
        at.scales[channel / kFp8GroupChannels] = E8m0FromExponent(exponent).bits;
        const int groups = quantised / kFp8GroupChannels;
        if (channel / kFp8GroupChannels == groups - 1) {
          for (int pad = groups; pad < rows.scale_bytes; ++pad) at.scales[pad] = 0;
        }
      }
      return;
    }
    case RowFormat::kFp8Key: {
      if (!active) return;
      const int exponent = Fp8ScaleExponent(row_largest);
      paged_rows_internal::StoreE4m3(at.values + channel, RoundVectorToBf16(values), exponent);
      if (channel == 0) *reinterpret_cast<float*>(at.scales) = PowerOfTwo(exponent);
      return;
    }
    case RowFormat::kMxfp4Key: {
      const Vector<float, kWidth> rounded = RoundVectorToBf16(values);
      const float largest = WarpMax<kMxfp4GroupChannels / kWidth>(paged_rows_internal::LargestMagnitude(rounded));
      if (!active) return;
      const int exponent = Mxfp4ScaleExponent(largest);
      paged_rows_internal::StoreE2m1(at.values + channel / 2, rounded, exponent);
      if (channel % kMxfp4GroupChannels == 0) {
        at.scales[channel / kMxfp4GroupChannels] = E8m0FromExponent(exponent).bits;
      }
      return;
    }
  }
}

// Stores a row of rows.row_size floats in shared memory. The whole block, a multiple of 32 threads, calls this, after a
// barrier that follows the last write of the row.
__device__ inline void EncodeRowFromShared(const PagedRowsPointer& rows, const RowAddress& at, const float* row) {
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpThreads, warp = thread / kWarpThreads, warps = threads / kWarpThreads;
  const auto store_bf16 = [&](int begin, uint8_t* bytes) {
    for (int i = begin + thread; i < rows.row_size; i += threads) {
      reinterpret_cast<Bf16*>(bytes)[i - begin] = Bf16FromFloat(row[i]);
    }
  };
  switch (rows.format) {
    case RowFormat::kF32:
      for (int i = thread; i < rows.row_size; i += threads) reinterpret_cast<float*>(at.values)[i] = row[i];
      return;
    case RowFormat::kBf16:
      store_bf16(0, at.values);
      return;
    case RowFormat::kFp8: {
      const int quantised = rows.row_size - rows.rope_size;
      const int groups = quantised / kFp8GroupChannels;
      for (int group = warp; group < groups; group += warps) {
        const int first = group * kFp8GroupChannels + lane, second = first + kWarpThreads;
        const float a = RoundToBf16(row[first]), b = RoundToBf16(row[second]);
        const int exponent = Fp8ScaleExponent(WarpMax(fmaxf(fmaxf(0.0f, fabsf(a)), fabsf(b))));
        at.values[first] = E4m3FromFloat(a * PowerOfTwo(-exponent)).bits;
        at.values[second] = E4m3FromFloat(b * PowerOfTwo(-exponent)).bits;
        if (lane == 0) at.scales[group] = E8m0FromExponent(exponent).bits;
      }
      for (int i = groups + thread; i < rows.scale_bytes; i += threads) at.scales[i] = 0;
      store_bf16(quantised, at.values + quantised);
      return;
    }
    case RowFormat::kFp8Key: {
      float largest = 0.0f;
      for (int i = lane; i < rows.row_size; i += kWarpThreads) largest = fmaxf(largest, fabsf(RoundToBf16(row[i])));
      const int exponent = Fp8ScaleExponent(WarpMax(largest));
      for (int i = thread; i < rows.row_size; i += threads) {
        at.values[i] = E4m3FromFloat(RoundToBf16(row[i]) * PowerOfTwo(-exponent)).bits;
      }
      if (thread == 0) *reinterpret_cast<float*>(at.scales) = PowerOfTwo(exponent);
      return;
    }
    case RowFormat::kMxfp4Key: {
      const int groups = rows.row_size / kMxfp4GroupChannels;
      for (int group = warp; group < groups; group += warps) {
        const float value = RoundToBf16(row[group * kMxfp4GroupChannels + lane]);
        const int exponent = Mxfp4ScaleExponent(WarpMax(fmaxf(0.0f, fabsf(value))));
        const unsigned code = E2m1FromFloat(value * PowerOfTwo(-exponent)).bits;
        const unsigned next = __shfl_down_sync(kFullWarp, code, 1);
        if (lane % 2 == 0) {
          at.values[(group * kMxfp4GroupChannels + lane) / 2] = static_cast<uint8_t>(code | next << 4);
        }
        if (lane == 0) at.scales[group] = E8m0FromExponent(exponent).bits;
      }
      return;
    }
  }
}

// Channel `channel` of a row, as DecodeRow gives it.
__device__ inline float DecodeChannel(const PagedRowsPointer& rows, const RowAddress& at, int channel) {
  switch (rows.format) {
    case RowFormat::kF32:
      return reinterpret_cast<const float*>(at.values)[channel];
    case RowFormat::kBf16:
      return ToFloat(reinterpret_cast<const Bf16*>(at.values)[channel]);
    case RowFormat::kFp8: {
      const int quantised = rows.row_size - rows.rope_size;
      if (channel >= quantised) {
        return ToFloat(reinterpret_cast<const Bf16*>(at.values + quantised)[channel - quantised]);
      }
      return ToFloat(E4m3{at.values[channel]}) * ToFloat(E8m0{at.scales[channel / kFp8GroupChannels]});
    }
    case RowFormat::kFp8Key:
      return ToFloat(E4m3{at.values[channel]}) * *reinterpret_cast<const float*>(at.scales);
    case RowFormat::kMxfp4Key: {
      const int pair = at.values[channel / 2];
      const auto code = static_cast<uint8_t>(channel % 2 == 0 ? pair & 0xf : pair >> 4);
      return ToFloat(E2m1{code}) * ToFloat(E8m0{at.scales[channel / kMxfp4GroupChannels]});
    }
  }
  return 0.0f;
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_PAGED_ROWS_CUH_
