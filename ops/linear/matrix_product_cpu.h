// The CPU backend's matrix product and dot product, shared by the ops that multiply by a weight matrix (linear, mhc,
// moe, lm_head) or sum over a row.
#ifndef DSV4_OPS_LINEAR_MATRIX_PRODUCT_CPU_H_
#define DSV4_OPS_LINEAR_MATRIX_PRODUCT_CPU_H_

#include <cstdint>

#include "runtime/weight_view.h"

namespace dsv4 {

// out[i][o] = sum_k x[i][k] * W[o][k] in fp32, with W dequantised exactly (with f32 scales, rounded to fp32). x is
// [rows, cols of W] and out [rows, rows of W], both contiguous. The order of summation depends on W's shape alone, so a
// row's bits do not depend on the other rows or on their number.
void MatrixProductCpu(const float* x, int64_t rows, const QuantizedWeight& weight, float* out);

// The same with the `weight_rows` rows of W from `weight_begin`; out is [rows, weight_rows].
void MatrixProductCpu(const float* x, int64_t rows, const QuantizedWeight& weight, int64_t weight_begin,
                      int64_t weight_rows, float* out);

// sum_k a[k] * b[k] in fp32. The order of summation depends on `size` alone.
float DotCpu(const float* a, const float* b, int64_t size);

// Rounds each block of `block` channels of a row to e4m3 times the block's power-of-two scale, in place (the last block
// may be shorter). Specification, section 12.1.
void QuantizeActivationRowCpu(float* row, int64_t channels, int64_t block);

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_MATRIX_PRODUCT_CPU_H_
