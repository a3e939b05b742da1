#include "runtime/dtype.h"

namespace dsv4 {

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kE4m3:
      return "e4m3";
    case DType::kE8m0:
      return "e8m0";
    case DType::kE2m1x2:
      return "e2m1x2";
    case DType::kI64:
      return "i64";
    case DType::kI32:
      return "i32";
    case DType::kU8:
      return "u8";
  }
  return "unknown dtype";
}

}  // namespace dsv4
