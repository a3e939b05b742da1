// StrCat is absl::StrCat that takes std::string_view too: in an Abseil that was built for C++14, as Debian's is,
// absl::string_view is a type of its own.
//
//   return absl::InvalidArgumentError(StrCat(name, ": expected ", DTypeName(DType::kF32)));
#ifndef DSV4_RUNTIME_STR_CAT_H_
#define DSV4_RUNTIME_STR_CAT_H_

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dsv4 {
namespace str_cat_internal {

template <typename T>
decltype(auto) Convert(const T& value) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return absl::string_view(value.data(), value.size());
  } else {
    return (value);
  }
}

}  // namespace str_cat_internal

template <typename... Args>
std::string StrCat(const Args&... args) {
  return absl::StrCat(str_cat_internal::Convert(args)...);
}

template <typename... Args>
void StrAppend(std::string* text, const Args&... args) {
  absl::StrAppend(text, str_cat_internal::Convert(args)...);
}

}  // namespace dsv4

#endif  // DSV4_RUNTIME_STR_CAT_H_
