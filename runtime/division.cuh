// Quotient and remainder in one, without the long 64-bit division where both numbers are small.
#ifndef DSV4_RUNTIME_DIVISION_CUH_
#define DSV4_RUNTIME_DIVISION_CUH_

#include <cstdint>

namespace dsv4 {

struct Division {
  int64_t quotient;
  int64_t remainder;
};

// value >= 0, divisor > 0.
__device__ __forceinline__ Division Divide(int64_t value, int64_t divisor) {
  const auto a = static_cast<uint64_t>(value), b = static_cast<uint64_t>(divisor);
  if (((a | b) >> 32) != 0) return {static_cast<int64_t>(a / b), static_cast<int64_t>(a % b)};
  const auto a32 = static_cast<uint32_t>(a), b32 = static_cast<uint32_t>(b);
  return {a32 / b32, a32 % b32};
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DIVISION_CUH_
