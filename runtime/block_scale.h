// The power-of-two scale of a group of values: FP8 (e4m3) and MXFP4 (e2m1).
//
//   int e = Fp8ScaleExponent(largest_magnitude);      // the scale is 2^e
//   E4m3 code = E4m3FromFloat(x * PowerOfTwo(-e));    // exact product, one rounding
//
// Source: specification, sections 6.3, 12.1 and 12.2.
#ifndef DSV4_RUNTIME_BLOCK_SCALE_H_
#define DSV4_RUNTIME_BLOCK_SCALE_H_

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/host_device.h"

namespace dsv4 {

inline constexpr float kFp8ScaleFloor = 1e-4f;          // of the largest magnitude
inline constexpr float kMxfp4ScaleFloor = 6 * 0x1p-126f;

// ceil(log2(x)) of a positive normal float, from its bits.
DSV4_HOST_DEVICE inline int CeilLog2(float x) {
  const uint32_t bits = dtype_internal::BitCast<uint32_t>(x);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0u ? 1 : 0);
}

// 2^exponent for -126 <= exponent <= 127.
DSV4_HOST_DEVICE inline float PowerOfTwo(int exponent) {
  return dtype_internal::BitCast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// Exponents e such that largest_magnitude / 2^e fits the format. Finite input only.
DSV4_HOST_DEVICE inline int Fp8ScaleExponent(float largest_magnitude) {
  const float a = largest_magnitude > kFp8ScaleFloor ? largest_magnitude : kFp8ScaleFloor;
  return CeilLog2(a / 448.0f);
}
DSV4_HOST_DEVICE inline int Mxfp4ScaleExponent(float largest_magnitude) {
  const float a = largest_magnitude > kMxfp4ScaleFloor ? largest_magnitude : kMxfp4ScaleFloor;
  return CeilLog2(a / 6.0f);
}

// The E8M0 byte of 2^exponent, clamped to what is a number (specification, section 11, item 10).
DSV4_HOST_DEVICE inline E8m0 E8m0FromExponent(int exponent) {
  const int byte = exponent + 127;
  return E8m0{static_cast<uint8_t>(byte < 0 ? 0 : byte > 254 ? 254 : byte)};
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_BLOCK_SCALE_H_
