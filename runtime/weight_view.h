// A view of data that nothing writes once a model is loaded: weights, norms, rotary tables. It is the
// only kind of data that a kernel may read before its wait (docs on graphs: PDL).
#ifndef DSV4_RUNTIME_WEIGHT_VIEW_H_
#define DSV4_RUNTIME_WEIGHT_VIEW_H_

#include <cstdint>
#include <string>

#include "runtime/tensor_view.h"

namespace dsv4 {

class WeightView {
 public:
  WeightView() = default;
  explicit WeightView(const TensorView& view) : view_(view) {}

  const void* data() const { return view_.data; }
  DType dtype() const { return view_.dtype; }
  int rank() const { return view_.rank; }
  int64_t extent(int i) const { return view_.extents[i]; }
  int64_t stride(int i) const { return view_.strides[i]; }
  bool empty() const { return view_.empty(); }
  int64_t num_bytes() const { return view_.num_bytes(); }
  std::string ToString() const { return view_.ToString(); }

  template <typename T>
  const T* Row(int64_t i) const {
    return view_.Row<T>(i);
  }
  template <typename T>
  const T* As() const {
    return view_.As<T>();
  }
  WeightView Index(int64_t i) const { return WeightView(view_.Index(i)); }
  WeightView Rows(int64_t begin, int64_t count) const { return WeightView(view_.Rows(begin, count)); }

  // For shape checks and declared accesses only: a weight is never written.
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
};

// A weight matrix [rows, cols] (or a stack of them, [n, rows, cols]) in its stored type, with the scale
// of each block where it has one: value = stored * scale[row / block_rows][col / block_cols].
// Blocks at the lower and right edge may be partial.
struct QuantizedWeight {
  WeightView values;       // f32, bf16, e4m3: [rows, cols]; e2m1x2: [rows, cols / 2]
  WeightView scales;       // e8m0 or f32: [ceil(rows / block_rows), ceil(cols / block_cols)], or empty
  int64_t block_rows = 1;
  int64_t block_cols = 1;

  int64_t rows() const { return values.extent(values.rank() - 2); }
  int64_t cols() const {
    return values.extent(values.rank() - 1) * (values.dtype() == DType::kE2m1x2 ? 2 : 1);
  }
  // FP8 and FP4 weights; their inputs are quantised too in the published precision.
  bool is_low_precision() const {
    return values.dtype() == DType::kE4m3 || values.dtype() == DType::kE2m1x2;
  }
  // Matrix i of a stack.
  QuantizedWeight Index(int64_t i) const {
    return {values.Index(i), scales.empty() ? scales : scales.Index(i), block_rows, block_cols};
  }
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_WEIGHT_VIEW_H_
