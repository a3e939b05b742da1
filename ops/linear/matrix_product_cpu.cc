#include "ops/linear/matrix_product_cpu.h"

#include <algorithm>
#include <cmath>

#include "Eigen/Core"
#include "runtime/block_scale.h"
#include "runtime/dtype.h"

namespace dsv4 {
namespace {

// Weight rows that are dequantised together and then meet every row of x. A fixed number, so that Eigen is called with
// shapes that depend on the weight alone.
constexpr int64_t kPanelRows = 64;

using RowMajorMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <typename T>
void DequantizeElements(const T* stored, int64_t cols, float* out) {
  for (int64_t k = 0; k < cols; ++k) out[k] = ToFloat(stored[k]);
}

void DequantizeRow(const QuantizedWeight& weight, int64_t row, float* out) {
  const int64_t cols = weight.cols();
  switch (weight.values.dtype()) {
    case DType::kF32:
      DequantizeElements(weight.values.Row<float>(row), cols, out);
      break;
    case DType::kBf16:
      DequantizeElements(weight.values.Row<Bf16>(row), cols, out);
      break;
    case DType::kE4m3:
      DequantizeElements(weight.values.Row<E4m3>(row), cols, out);
      break;
    default: {  // kE2m1x2; Validate admits no other
      const uint8_t* pairs = weight.values.Row<uint8_t>(row);
      for (int64_t k = 0; k < cols; ++k) {
        const int shift = k % 2 == 0 ? 0 : 4;
        out[k] = ToFloat(E2m1{static_cast<uint8_t>((pairs[k / 2] >> shift) & 0xf)});
      }
    }
  }
  if (weight.scales.empty()) return;
  const int64_t scale_row = row / weight.block_rows;
  for (int64_t begin = 0; begin < cols; begin += weight.block_cols) {
    const int64_t block = begin / weight.block_cols;
    const float scale = weight.scales.dtype() == DType::kE8m0 ? ToFloat(weight.scales.Row<E8m0>(scale_row)[block])
                                                              : weight.scales.Row<float>(scale_row)[block];
    const int64_t end = std::min(begin + weight.block_cols, cols);
    for (int64_t k = begin; k < end; ++k) out[k] *= scale;
  }
}

}  // namespace

void MatrixProductCpu(const float* x, int64_t rows, const QuantizedWeight& weight, float* out) {
  MatrixProductCpu(x, rows, weight, 0, weight.rows(), out);
}

void MatrixProductCpu(const float* x, int64_t rows, const QuantizedWeight& weight, int64_t weight_begin,
                      int64_t weight_rows, float* out) {
  if (rows == 0) return;
  const int64_t cols = weight.cols();
  // One product of a panel and a vector for each row of x, on operands of fixed alignment.
  RowMajorMatrix panel(std::min(kPanelRows, weight_rows), cols);
  Eigen::VectorXf row(cols);
  Eigen::VectorXf product(panel.rows());
  for (int64_t begin = 0; begin < weight_rows; begin += kPanelRows) {
    const int64_t count = std::min(kPanelRows, weight_rows - begin);
    for (int64_t o = 0; o < count; ++o) DequantizeRow(weight, weight_begin + begin + o, panel.row(o).data());
    for (int64_t i = 0; i < rows; ++i) {
      row = Eigen::Map<const Eigen::VectorXf>(x + i * cols, cols);
      product.head(count).noalias() = panel.topRows(count) * row;
      std::copy_n(product.data(), count, out + i * weight_rows + begin);
    }
  }
}

float DotCpu(const float* a, const float* b, int64_t size) {
  // Eigen takes a product of two maps from its first element on, wherever that lies.
  return Eigen::Map<const Eigen::VectorXf>(a, size).dot(Eigen::Map<const Eigen::VectorXf>(b, size));
}

void QuantizeActivationRowCpu(float* row, int64_t channels, int64_t block) {
  for (int64_t begin = 0; begin < channels; begin += block) {
    const int64_t end = std::min(begin + block, channels);
    float largest = 0.0f;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(row[k]));
    const int exponent = Fp8ScaleExponent(largest);
    const float scale = PowerOfTwo(exponent);
    const float inverse = PowerOfTwo(-exponent);
    for (int64_t k = begin; k < end; ++k) row[k] = ToFloat(E4m3FromFloat(row[k] * inverse)) * scale;
  }
}

}  // namespace dsv4
