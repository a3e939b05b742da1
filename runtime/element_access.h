// Reads and writes elements of f32 and bf16 tensors as floats, on the host. For CPU ops and tests.
#ifndef DSV4_RUNTIME_ELEMENT_ACCESS_H_
#define DSV4_RUNTIME_ELEMENT_ACCESS_H_

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

// Element (i, j, k) of an f32 or bf16 view.
inline float LoadFloat(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return view.dtype == DType::kBf16 ? ToFloat(*view.At<Bf16>(i, j, k)) : *view.At<float>(i, j, k);
}
inline float LoadFloat(const WeightView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return LoadFloat(view.view(), i, j, k);
}

// Rounds to bf16 where the view holds bf16.
inline void StoreFloat(const TensorView& view, float value, int64_t i, int64_t j = 0, int64_t k = 0) {
  if (view.dtype == DType::kBf16) {
    *view.At<Bf16>(i, j, k) = Bf16FromFloat(value);
  } else {
    *view.At<float>(i, j, k) = value;
  }
}

// The innermost dimension at (i) of a view of rank 2, or at (i, j) of one of rank 3.
inline void LoadRow(const TensorView& view, float* out, int64_t i) {
  for (int64_t k = 0; k < view.extents[1]; ++k) out[k] = LoadFloat(view, i, k);
}
inline void LoadRow(const TensorView& view, float* out, int64_t i, int64_t j) {
  for (int64_t k = 0; k < view.extents[2]; ++k) out[k] = LoadFloat(view, i, j, k);
}
inline void StoreRow(const TensorView& view, const float* values, int64_t i) {
  for (int64_t k = 0; k < view.extents[1]; ++k) StoreFloat(view, values[k], i, k);
}
inline void StoreRow(const TensorView& view, const float* values, int64_t i, int64_t j) {
  for (int64_t k = 0; k < view.extents[2]; ++k) StoreFloat(view, values[k], i, j, k);
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_ELEMENT_ACCESS_H_
