// What the tensor cores and their operands' conversions need of PTX: a product of 16 x 16 by 16 x 8, and the small
// float formats in pairs. A pair is two 16-bit values in a register, the first in the lower half.
#ifndef DSV4_OPS_LINEAR_TENSOR_CORE_CUH_
#define DSV4_OPS_LINEAR_TENSOR_CORE_CUH_

#include <cstdint>

namespace dsv4 {

// sums += A B, fp32, over 16 values of k. Lane 4g + t of the warp holds, as pairs along k,
//   of A (rows by k): a[0] row g, k 2t; a[1] row g + 8, k 2t; a[2] row g, k 2t + 8; a[3] row g + 8, k 2t + 8
//   of B (k by columns): b0 column g, k 2t; b1 column g, k 2t + 8
//   of the sums: [0], [1] row g, columns 2t, 2t + 1; [2], [3] row g + 8.
// As only the sum over k counts, A and B may agree on any other assignment of values to places along k.
__device__ __forceinline__ void MultiplyBf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MultiplyF16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The values of two e4m3 codes, the first in the lower byte. Exact; the code of NaN gives NaN.
__device__ __forceinline__ uint32_t F16PairFromE4m3(uint16_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}
// Rounded to nearest even; saturates, NaN stays NaN.
__device__ __forceinline__ uint16_t E4m3PairFromFloats(float first, float second) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}

// For values that bf16 holds, as it does those of e4m3 and e2m1: exact.
__device__ __forceinline__ uint32_t Bf16PairFromF16(uint32_t pair) {
  float first, second;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.f32.f16 %0, low;\n"
      "  cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(first), "=f"(second)
      : "r"(pair));
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}

// The larger magnitude in each half, of bf16 pairs. A NaN loses against a number.
__device__ __forceinline__ uint32_t LargerBf16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
  return larger;
}

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_TENSOR_CORE_CUH_
