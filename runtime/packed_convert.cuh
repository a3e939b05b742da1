// Conversions of packed small floats to pairs of 16-bit floats, the operands of the tensor cores. All are exact.
#ifndef DSV4_RUNTIME_PACKED_CONVERT_CUH_
#define DSV4_RUNTIME_PACKED_CONVERT_CUH_

#include <cstdint>

#include "runtime/dtype.h"

namespace dsv4 {

// Two floats rounded to bf16, the first in the low half. As Bf16FromFloat, but for the bits of a NaN.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Both halves of a times those of b, rounded to bf16; subnormal numbers are kept.
__device__ __forceinline__ uint32_t MultiplyBf16Pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The value of an E8M0 byte in both halves.
__device__ __forceinline__ uint32_t Bf16PairOfE8m0(uint32_t byte) {
  const uint32_t bits = byte == 0 ? 0x40u : byte == 255 ? 0x7fc0u : byte << 7;
  return bits | bits << 16;
}

struct TwoPairs {
  uint32_t low;   // elements 0 and 1
  uint32_t high;  // elements 2 and 3
};

// Four e4m3 to f16, whose range holds them.
__device__ __forceinline__ TwoPairs F16OfE4m3(uint32_t four) {
  TwoPairs pairs;
  asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.rn.f16x2.e4m3x2 %0, low;\n"
      " cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(pairs.low), "=r"(pairs.high)
      : "r"(four));
  return pairs;
}

// Multiplies by the E8M0 scale 2^(byte - 127), byte < 255, while converting four e4m3 to bf16.
//
// The bits of an e4m3 number, moved to bf16's places, are the number times 2^-120 (subnormal ones too), so that one
// product with 2^(byte - 7) does both. Above byte 134 that factor would overflow, and a second product follows.
// A NaN code becomes 480.
struct ScaledE4m3 {
  __device__ __forceinline__ explicit ScaledE4m3(uint32_t byte)
      : first(PowerPair(min(byte, kLargestSingle) + 120)), second(byte <= kLargestSingle ? 0 : PowerPair(byte - 7)) {}

  __device__ __forceinline__ TwoPairs ToBf16(uint32_t four) const {
    TwoPairs pairs = {Scale(__byte_perm(four, 0, 0x1404)), Scale(__byte_perm(four, 0, 0x3424))};
    if (second != 0) {
      pairs.low = MultiplyBf16Pairs(pairs.low, second);
      pairs.high = MultiplyBf16Pairs(pairs.high, second);
    }
    return pairs;
  }

 private:
  static constexpr uint32_t kLargestSingle = 134;
  // The bf16 with this exponent field, a power of two, in both halves.
  static __device__ __forceinline__ uint32_t PowerPair(uint32_t field) { return field << 7 | field << 23; }
  // Of two e4m3 in the high bytes of the halves.
  __device__ __forceinline__ uint32_t Scale(uint32_t codes) const {
    return MultiplyBf16Pairs((codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u), first);
  }

  uint32_t first, second;
};

// Eight e2m1, with an E8M0 scale, to bf16. Pair i holds elements i and i + 4.
__device__ __forceinline__ void ScaledBf16OfE2m1(uint32_t eight, uint32_t scale_byte, uint32_t (&pairs)[4]) {
  // Moved to bf16's places the bits are the number times 2^-126.
  constexpr uint32_t kPower126 = 0x7e807e80u;
  const uint32_t scale = Bf16PairOfE8m0(scale_byte);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t codes = eight >> 4 * i;
    const uint32_t bits = ((codes & 0x00080008u) << 12) | ((codes & 0x00070007u) << 6);
    pairs[i] = MultiplyBf16Pairs(MultiplyBf16Pairs(bits, kPower126), scale);
  }
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_PACKED_CONVERT_CUH_
