// Checks of weights for the ops that multiply by them: one matrix, or a stack of matrices.
#ifndef DSV4_OPS_LINEAR_CHECK_WEIGHT_H_
#define DSV4_OPS_LINEAR_CHECK_WEIGHT_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "runtime/weight_view.h"

namespace dsv4 {

// InvalidArgument unless `weight` is one matrix [rows, cols] (kAnyExtent matches all), with scales that fit it.
absl::Status CheckMatrix(std::string_view name, const QuantizedWeight& weight, int64_t rows, int64_t cols);

// InvalidArgument unless `weight` is a stack of `count` such matrices.
absl::Status CheckMatrices(std::string_view name, const QuantizedWeight& weight, int64_t count, int64_t rows,
                           int64_t cols);

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_CHECK_WEIGHT_H_
