// Matrix products in double, from the specification, for tests.
#ifndef DSV4_OPS_LINEAR_PRODUCT_REFERENCE_H_
#define DSV4_OPS_LINEAR_PRODUCT_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "ops/testing/op_test.h"

namespace dsv4 {

inline std::vector<double> Doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// x W^T by groups; x is [rows, groups * cols of W].
std::vector<float> ReferenceProduct(const std::vector<double>& x, int64_t rows, const TestWeight& weight,
                                    int64_t groups);

// x with every block of 128 channels of every group's input, of every row, rounded to e4m3 and a power of two.
std::vector<double> QuantizedInputs(const std::vector<float>& x, int64_t group_size);

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_PRODUCT_REFERENCE_H_
