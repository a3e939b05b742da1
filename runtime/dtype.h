// Element types and their conversions, exact and identical on the CPU and in kernels.
//
//   Bf16 b = Bf16FromFloat(0.1f);      // round to nearest even
//   float f = ToFloat(b);              // exact
//   E4m3 q = E4m3FromFloat(1000.0f);   // saturates: 448
//
// bf16: NaN stays NaN, overflow rounds to infinity as IEEE does.
// e4m3 is the OCP "fn" form: bias 7, no infinity, 0x7F is NaN, largest 448, subnormals kept;
//   rounding is to nearest even, values past 448 (infinity too) saturate, NaN gives NaN.
// E8M0: value 2^(byte - 127); 255 is NaN.
// e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign; nearest even, saturating at 6. It has no NaN: NaN gives
//   +6 (as the hardware conversion does).
// Source: specification, sections 3.3 and 12; OCP MX v1.0.
#ifndef DSV4_RUNTIME_DTYPE_H_
#define DSV4_RUNTIME_DTYPE_H_

#include <bit>
#include <cstdint>
#include <string_view>

#include "runtime/host_device.h"

namespace dsv4 {

enum class DType : uint8_t {
  kF32,
  kBf16,
  kE4m3,
  kE8m0,
  kE2m1x2,  // two e2m1 values a byte, the even element in the low nibble
  kI64,
  kI32,
  kU8,
};

// Bytes of one stored element (kE2m1x2: of one pair).
DSV4_HOST_DEVICE constexpr int64_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBf16:
      return 2;
    default:
      return 1;
  }
}

std::string_view DTypeName(DType dtype);

struct Bf16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E8m0 {
  uint8_t bits;
};
struct E2m1 {
  uint8_t bits;  // the low four
};

// C++ type of a DType's stored element.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<Bf16> {
  static constexpr DType value = DType::kBf16;
};
template <>
struct DTypeOf<E4m3> {
  static constexpr DType value = DType::kE4m3;
};
template <>
struct DTypeOf<E8m0> {
  static constexpr DType value = DType::kE8m0;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};

namespace dtype_internal {

// std::bit_cast, which device code may not call without a compiler flag on every user.
template <typename To, typename From>
DSV4_HOST_DEVICE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

}  // namespace dtype_internal

DSV4_HOST_DEVICE inline float ToFloat(float x) { return x; }

DSV4_HOST_DEVICE inline float ToFloat(Bf16 x) {
  return dtype_internal::BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

DSV4_HOST_DEVICE inline Bf16 Bf16FromFloat(float x) {
  uint32_t bits = dtype_internal::BitCast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return Bf16{static_cast<uint16_t>(bits >> 16)};
}

// x rounded to bf16, as a float.
DSV4_HOST_DEVICE inline float RoundToBf16(float x) { return ToFloat(Bf16FromFloat(x)); }

DSV4_HOST_DEVICE inline float ToFloat(E4m3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t exponent = (x.bits >> 3) & 0xfu;
  const uint32_t mantissa = x.bits & 7u;
  if (exponent == 15u && mantissa == 7u) return dtype_internal::BitCast<float>(sign | 0x7fc00000u);
  if (exponent == 0u) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return dtype_internal::BitCast<float>(sign | dtype_internal::BitCast<uint32_t>(magnitude));
  }
  return dtype_internal::BitCast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

DSV4_HOST_DEVICE inline E4m3 E4m3FromFloat(float x) {
  const uint32_t bits = dtype_internal::BitCast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return E4m3{static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return E4m3{static_cast<uint8_t>(sign | 0x7eu)};  // |x| >= 448
  if (magnitude < 0x3c800000u) {  // |x| < 2^-6: a multiple of 2^-9, rounded by adding 2^23
    const float steps = dtype_internal::BitCast<float>(magnitude) * 512.0f + 8388608.0f;
    return E4m3{static_cast<uint8_t>(sign | (dtype_internal::BitCast<uint32_t>(steps) & 0xfu))};
  }
  magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
  return E4m3{static_cast<uint8_t>(sign | ((magnitude >> 20) - (120u << 3)))};
}

DSV4_HOST_DEVICE inline float ToFloat(E8m0 x) {
  if (x.bits == 255u) return dtype_internal::BitCast<float>(0x7fc00000u);
  if (x.bits == 0u) return 0x1p-127f;  // subnormal in fp32
  return dtype_internal::BitCast<float>(static_cast<uint32_t>(x.bits) << 23);
}

DSV4_HOST_DEVICE inline float ToFloat(E2m1 x) {
  const uint32_t exponent = (x.bits >> 1) & 3u;
  const uint32_t mantissa = x.bits & 1u;
  const float magnitude = exponent == 0u ? 0.5f * static_cast<float>(mantissa)
                                         : static_cast<float>((2u + mantissa) << exponent) * 0.25f;
  return (x.bits & 8u) != 0u ? -magnitude : magnitude;
}

DSV4_HOST_DEVICE inline E2m1 E2m1FromFloat(float x) {
  const uint32_t bits = dtype_internal::BitCast<uint32_t>(x);
  const float magnitude = dtype_internal::BitCast<float>(bits & 0x7fffffffu);
  if (magnitude != magnitude) return E2m1{7};
  // Midpoints between neighbours; a tie goes to the even code.
  uint8_t code = 0;
  if (magnitude > 0.25f) code = 1;
  if (magnitude >= 0.75f) code = 2;
  if (magnitude > 1.25f) code = 3;
  if (magnitude >= 1.75f) code = 4;
  if (magnitude > 2.5f) code = 5;
  if (magnitude >= 3.5f) code = 6;
  if (magnitude > 5.0f) code = 7;
  return E2m1{static_cast<uint8_t>(code | ((bits >> 28) & 8u))};
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DTYPE_H_
