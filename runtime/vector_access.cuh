// Global memory accesses of 1 to 16 bytes a thread, and their conversion to and from floats.
//
//   Vector<float, 4> x = LoadVector<float, 4>(p);     // one 16-byte load
//   StoreVector(q, FromFloats<Bf16>(x));              // one 8-byte store
#ifndef DSV4_RUNTIME_VECTOR_ACCESS_CUH_
#define DSV4_RUNTIME_VECTOR_ACCESS_CUH_

#include <cstdint>
#include <type_traits>

#include "runtime/dtype.h"

namespace dsv4 {

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

namespace vector_internal {
template <int kBytes>
struct Bits;
template <>
struct Bits<1> {
  using Type = uint8_t;
};
template <>
struct Bits<2> {
  using Type = uint16_t;
};
template <>
struct Bits<4> {
  using Type = uint32_t;
};
template <>
struct Bits<8> {
  using Type = uint2;
};
template <>
struct Bits<16> {
  using Type = uint4;
};
}  // namespace vector_internal

// The type that the compiler loads and stores in one access of that many bytes.
template <int kBytes>
using VectorBits = typename vector_internal::Bits<kBytes>::Type;

// `p` must be aligned to the vector's size.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> LoadVector(const T* p) {
  return __builtin_bit_cast(Vector<T, N>, *reinterpret_cast<const VectorBits<sizeof(T) * N>*>(p));
}
template <typename T, int N>
__device__ __forceinline__ void StoreVector(T* p, const Vector<T, N>& vector) {
  using Bits = VectorBits<sizeof(T) * N>;
  *reinterpret_cast<Bits*>(p) = __builtin_bit_cast(Bits, vector);
}

// The same in one access for certain: the compiler may store a vector in parts where these are computed apart.
template <typename T, int N>
__device__ __forceinline__ void StoreVectorWhole(T* p, const Vector<T, N>& vector) {
  using Bits = VectorBits<sizeof(T) * N>;
  __stwb(reinterpret_cast<Bits*>(p), __builtin_bit_cast(Bits, vector));
}

// For data that is read or written once: evicted first from the caches.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> LoadVectorStreaming(const T* p) {
  return __builtin_bit_cast(Vector<T, N>, __ldcs(reinterpret_cast<const VectorBits<sizeof(T) * N>*>(p)));
}
template <typename T, int N>
__device__ __forceinline__ void StoreVectorStreaming(T* p, const Vector<T, N>& vector) {
  using Bits = VectorBits<sizeof(T) * N>;
  __stcs(reinterpret_cast<Bits*>(p), __builtin_bit_cast(Bits, vector));
}

// Exact from bf16; one rounding to it.
template <typename T, int N>
__device__ __forceinline__ Vector<float, N> ToFloats(const Vector<T, N>& vector) {
  Vector<float, N> floats;
#pragma unroll
  for (int i = 0; i < N; ++i) floats.values[i] = ToFloat(vector.values[i]);
  return floats;
}
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> FromFloats(const Vector<float, N>& floats) {
  if constexpr (std::is_same_v<T, float>) {
    return floats;
  } else {
    static_assert(std::is_same_v<T, Bf16>);
    Vector<T, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) vector.values[i] = Bf16FromFloat(floats.values[i]);
    return vector;
  }
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_VECTOR_ACCESS_CUH_
