// Checks that an op's Validate is made of. Every message names the tensor, what was expected and what came:
//   "kv: expected f32 or bf16 [8, 128], got f32 [8, 64]"
#ifndef DSV4_RUNTIME_TENSOR_CHECK_H_
#define DSV4_RUNTIME_TENSOR_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "absl/status/status.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

inline constexpr int64_t kAnyExtent = -1;

// InvalidArgument unless `view` has data (an extent of 0 needs none), one of `dtypes`, these extents
// (kAnyExtent matches all), strides >= 0, a unit stride in its last dimension, and data aligned to its element type.
absl::Status CheckTensor(std::string_view name, const TensorView& view,
                         std::initializer_list<DType> dtypes, std::initializer_list<int64_t> extents);
absl::Status CheckTensor(std::string_view name, const WeightView& view,
                         std::initializer_list<DType> dtypes, std::initializer_list<int64_t> extents);

// InvalidArgument unless values and scales fit each other and the matrix, or each of the stack, is [rows, cols]
// (kAnyExtent matches all). e4m3 and e2m1x2 need scales, f32 and bf16 have none.
absl::Status CheckWeight(std::string_view name, const QuantizedWeight& weight, int64_t rows, int64_t cols);

// InvalidArgument if the written view maps two indices to one element, or shares a byte with another view.
// Interleaved views (two column halves of one buffer) do not overlap. Both are decided exactly, for any rank and
// strides, by a search of bounded length; where it ends without an answer (a quarter of a million tries: many thousand
// rows of one view that cross those of another) the views are refused.
absl::Status CheckNoSelfOverlap(std::string_view name, const TensorView& view);
absl::Status CheckDisjoint(std::string_view name_a, const TensorView& a, std::string_view name_b,
                           const TensorView& b);

// InvalidArgument "<name>: expected at least <minimum>, got <value>".
absl::Status CheckAtLeast(std::string_view name, int64_t value, int64_t minimum);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_TENSOR_CHECK_H_
