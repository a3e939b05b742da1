// Reads and writes f32 and bf16 data as floats in a kernel that learns the type at run time. A thread accesses kWidth
// consecutive elements: in wide accesses where the view allows them, one by one otherwise, so that which thread handles
// which element, and with it the order of a sum, does not depend on the alignment.
//
//   FloatData x = MakeFloatData(params.x, 8);                       // host
//   Vector<float, 8> v = x.Load<8>(row * stride + column, count);   // count < 8 only at the end of a row
#ifndef DSV4_RUNTIME_FLOAT_ACCESS_CUH_
#define DSV4_RUNTIME_FLOAT_ACCESS_CUH_

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/tensor_view.h"
#include "runtime/vector_access.cuh"
#include "runtime/weight_pointer.cuh"
#include "runtime/weight_view.h"

namespace dsv4 {

// Whether accesses of `width` elements at multiples of `width` in the last dimension are aligned and stay inside it.
inline bool AllowsVectors(const TensorView& view, int64_t width) {
  if (view.rank == 0 || view.extents[view.rank - 1] % width != 0) return false;
  const int64_t element_bytes = DTypeBytes(view.dtype);
  const int64_t bytes = width * element_bytes < 16 ? width * element_bytes : 16;
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) != 0) return false;
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.extents[i] > 1 && view.strides[i] * element_bytes % bytes != 0) return false;
  }
  return true;
}

namespace float_access_internal {

// Elements of one access: 16 bytes at most.
template <typename T, int N>
inline constexpr int kPiece = sizeof(T) * N <= 16 ? N : static_cast<int>(16 / sizeof(T));

template <typename T, int N>
__device__ __forceinline__ Vector<float, N> LoadPieces(const T* p) {
  constexpr int kElements = kPiece<T, N>;
  Vector<float, N> floats;
#pragma unroll
  for (int begin = 0; begin < N; begin += kElements) {
    const Vector<float, kElements> piece = ToFloats(LoadVector<T, kElements>(p + begin));
#pragma unroll
    for (int i = 0; i < kElements; ++i) floats.values[begin + i] = piece.values[i];
  }
  return floats;
}

template <typename T, int N>
__device__ __forceinline__ void StorePieces(T* p, const Vector<float, N>& floats) {
  constexpr int kElements = kPiece<T, N>;
#pragma unroll
  for (int begin = 0; begin < N; begin += kElements) {
    Vector<float, kElements> piece;
#pragma unroll
    for (int i = 0; i < kElements; ++i) piece.values[i] = floats.values[begin + i];
    StoreVector(p + begin, FromFloats<T>(piece));
  }
}

template <typename T, int N>
__device__ __forceinline__ Vector<float, N> LoadWeightPieces(const WeightPointer<T>& weight, int64_t index) {
  constexpr int kElements = kPiece<T, N>;
  Vector<float, N> floats;
#pragma unroll
  for (int begin = 0; begin < N; begin += kElements) {
    const Vector<float, kElements> piece = ToFloats(weight.template LoadVector<kElements>(index + begin));
#pragma unroll
    for (int i = 0; i < kElements; ++i) floats.values[begin + i] = piece.values[i];
  }
  return floats;
}

}  // namespace float_access_internal

// Elements of a tensor by their offset from the first. What lies past `count` is 0, and is not written.
struct FloatData {
  void* data = nullptr;
  bool is_bf16 = false;
  bool vectors = false;  // every access of kWidth elements is aligned, and count is always kWidth

  template <int kWidth>
  __device__ __forceinline__ Vector<float, kWidth> Load(int64_t index, int64_t count = kWidth) const {
    if (vectors && is_bf16) {
      return float_access_internal::LoadPieces<Bf16, kWidth>(static_cast<const Bf16*>(data) + index);
    }
    if (vectors) return float_access_internal::LoadPieces<float, kWidth>(static_cast<const float*>(data) + index);
    Vector<float, kWidth> floats;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) floats.values[i] = i < count ? LoadOne(index + i) : 0.0f;
    return floats;
  }
  __device__ __forceinline__ float LoadOne(int64_t index) const {
    return is_bf16 ? ToFloat(static_cast<const Bf16*>(data)[index]) : static_cast<const float*>(data)[index];
  }

  template <int kWidth>
  __device__ __forceinline__ void Store(int64_t index, const Vector<float, kWidth>& floats,
                                        int64_t count = kWidth) const {
    if (vectors) {
      if (is_bf16) {
        float_access_internal::StorePieces(static_cast<Bf16*>(data) + index, floats);
      } else {
        float_access_internal::StorePieces(static_cast<float*>(data) + index, floats);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < count) StoreOne(index + i, floats.values[i]);
    }
  }
  __device__ __forceinline__ void StoreOne(int64_t index, float value) const {
    if (is_bf16) {
      static_cast<Bf16*>(data)[index] = Bf16FromFloat(value);
    } else {
      static_cast<float*>(data)[index] = value;
    }
  }
};

// `view` is f32 or bf16. Kernels pass the same width to Load and Store.
inline FloatData MakeFloatData(const TensorView& view, int64_t width) {
  return {view.data, view.dtype == DType::kBf16, AllowsVectors(view, width)};
}

// The same for a weight, which may be read before the wait.
struct FloatWeight {
  WeightPointer<float> f32;
  WeightPointer<Bf16> bf16;
  bool is_bf16 = false;
  bool vectors = false;

  template <int kWidth>
  __device__ __forceinline__ Vector<float, kWidth> Load(int64_t index, int64_t count = kWidth) const {
    if (vectors && is_bf16) return float_access_internal::LoadWeightPieces<Bf16, kWidth>(bf16, index);
    if (vectors) return float_access_internal::LoadWeightPieces<float, kWidth>(f32, index);
    Vector<float, kWidth> floats;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) floats.values[i] = i < count ? LoadOne(index + i) : 0.0f;
    return floats;
  }
  __device__ __forceinline__ float LoadOne(int64_t index) const {
    return is_bf16 ? ToFloat(bf16.Load(index)) : f32.Load(index);
  }
  __device__ __forceinline__ void PrefetchToL2(int64_t index) const {
    if (is_bf16) {
      bf16.PrefetchToL2(index);
    } else {
      f32.PrefetchToL2(index);
    }
  }
};

inline FloatWeight MakeFloatWeight(const WeightView& view, int64_t width) {
  return {WeightPointer<float>(view), WeightPointer<Bf16>(view), view.dtype() == DType::kBf16,
          AllowsVectors(view.view(), width)};
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_FLOAT_ACCESS_CUH_
