// A warp's matrix product on the tensor cores (mma.sync), and the loads of its operands from shared memory (ldmatrix).
//
// A product is m16n8k16 with fp32 accumulation: c[16][8] += a[16][16] * b[16][8]. Lane l, with g = l / 4 and t = l % 4,
// holds two 16-bit elements of ascending k a register:
//   a[0], a[1], a[2], a[3]   rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 8, 2t + 8
//   b[0], b[1]               column g at k = 2t, 2t + 8
//   c[0], c[1], c[2], c[3]   rows g, g, g + 8, g + 8 at columns 2t, 2t + 1, 2t, 2t + 1
// The order of k does not matter as long as a and b agree in it.
#ifndef DSV4_RUNTIME_TENSOR_CORE_CUH_
#define DSV4_RUNTIME_TENSOR_CORE_CUH_

#include <cstdint>

namespace dsv4::tensor_core {

__device__ __forceinline__ void MultiplyBf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void MultiplyF16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 16-bit elements from shared memory. Lane l passes the address of row l % 8, 16 bytes, of matrix
// l / 8. Register i of lane l gets, of matrix i, elements 2t and 2t + 1 of row g.
__device__ __forceinline__ void LoadMatrices(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The same of the transposed matrices: elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void LoadTransposedMatrices(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Shared memory of 128-byte rows of which the 16-byte units of each eight rows are permuted, so that eight lanes that
// access one unit of eight rows, or eight units of one row, meet no bank conflict. It is what the 128-byte swizzle of
// the tensor cores' and the copy engine's descriptors means; an array of such rows starts on a multiple of 1024 bytes.
__device__ __forceinline__ int SwizzledByte(int row, int unit) { return (unit ^ (row & 7)) * 16; }

}  // namespace dsv4::tensor_core

#endif  // DSV4_RUNTIME_TENSOR_CORE_CUH_
