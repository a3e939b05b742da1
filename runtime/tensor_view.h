// A view of a tensor: pointer, element type, extents and strides. It owns nothing, is trivially
// copyable, and all its arithmetic is in 64 bits.
//
//   TensorView x = TensorView::Contiguous(data, DType::kF32, {tokens, 256});
//   TensorView first = x.FirstRows(live_tokens);
//   TensorView kv = x.Columns(0, 128), score = x.Columns(128, 128);   // two halves of each row
//   float* row = x.Row<float>(3);
//
// A dimension of extent 1 may have any stride.
#ifndef DSV4_RUNTIME_TENSOR_VIEW_H_
#define DSV4_RUNTIME_TENSOR_VIEW_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "runtime/dtype.h"
#include "runtime/host_device.h"

namespace dsv4 {

inline constexpr int kMaxRank = 4;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t extents[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // in stored elements

  static TensorView Contiguous(void* data, DType dtype, std::initializer_list<int64_t> extents);

  DSV4_HOST_DEVICE bool empty() const { return data == nullptr; }
  DSV4_HOST_DEVICE int64_t num_elements() const {
    int64_t n = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= extents[i];
    return n;
  }
  int64_t num_bytes() const { return num_elements() * DTypeBytes(dtype); }
  bool is_contiguous() const;

  // Element (i, j, ...) of a view whose stored type is T. No bounds check.
  template <typename T>
  DSV4_HOST_DEVICE T* At(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) const {
    return static_cast<T*>(data) + i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
  }
  template <typename T>
  DSV4_HOST_DEVICE T* Row(int64_t i) const {
    return static_cast<T*>(data) + i * strides[0];
  }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data);
  }

  // The first `count` of the outermost dimension; `count` of them from `begin`.
  TensorView FirstRows(int64_t count) const { return Rows(0, count); }
  TensorView Rows(int64_t begin, int64_t count) const;
  // Of a view of rank 2: `count` columns from `begin`.
  TensorView Columns(int64_t begin, int64_t count) const;
  // Index `i` of the outermost dimension, which goes.
  TensorView Index(int64_t i) const;
  // The same contiguous elements in another shape.
  TensorView Reshape(std::initializer_list<int64_t> new_extents) const;

  // "f32 [3, 256]", for messages.
  std::string ToString() const;
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_TENSOR_VIEW_H_
