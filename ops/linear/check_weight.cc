#include "ops/linear/check_weight.h"

#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4 {

absl::Status CheckMatrix(std::string_view name, const QuantizedWeight& weight, int64_t rows, int64_t cols) {
  if (weight.values.rank() == 3) {
    return absl::InvalidArgumentError(StrCat(name, ": expected one matrix, got ", weight.values.ToString()));
  }
  return CheckWeight(name, weight, rows, cols);
}

absl::Status CheckMatrices(std::string_view name, const QuantizedWeight& weight, int64_t count, int64_t rows,
                           int64_t cols) {
  if (weight.values.rank() != 3 || weight.values.extent(0) != count) {
    return absl::InvalidArgumentError(
        StrCat(name, ": expected a stack of ", count, " matrices, got ", weight.values.ToString()));
  }
  return CheckWeight(name, weight, rows, cols);
}

}  // namespace dsv4
