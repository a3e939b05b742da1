#include "runtime/tensor_check.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

std::string DTypesText(std::initializer_list<DType> dtypes) {
  std::string text;
  size_t i = 0;
  for (DType dtype : dtypes) {
    StrAppend(&text, i == 0 ? "" : i + 1 == dtypes.size() ? " or " : ", ", DTypeName(dtype));
    ++i;
  }
  return text;
}

std::string ExtentsText(std::initializer_list<int64_t> extents) {
  std::string text = "[";
  for (int64_t extent : extents) {
    StrAppend(&text, text.size() == 1 ? "" : ", ", extent == kAnyExtent ? std::string("any") : StrCat(extent));
  }
  return text + "]";
}

bool Matches(const TensorView& view, std::initializer_list<DType> dtypes, std::initializer_list<int64_t> extents) {
  if (std::find(dtypes.begin(), dtypes.end(), view.dtype) == dtypes.end()) return false;
  if (view.rank != static_cast<int>(extents.size())) return false;
  int i = 0;
  for (int64_t extent : extents) {
    if (view.extents[i] < 0 || (extent != kAnyExtent && view.extents[i] != extent)) return false;
    ++i;
  }
  return true;
}

bool HasNoElements(const TensorView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.extents[i] == 0) return true;
  }
  return view.rank == 0;
}

// The bytes from the lowest to past the highest one that the view touches, relative to its pointer; false if they are
// too many for 64 bits. The view has elements.
bool ByteSpan(const TensorView& view, int64_t* begin, int64_t* end) {
  *begin = 0;
  *end = DTypeBytes(view.dtype);
  for (int i = 0; i < view.rank; ++i) {
    int64_t reach = 0;
    if (view.extents[i] < 0) return false;
    if (view.extents[i] == 1) continue;
    if (__builtin_mul_overflow(view.extents[i] - 1, view.strides[i], &reach) ||
        __builtin_mul_overflow(reach, DTypeBytes(view.dtype), &reach)) {
      return false;
    }
    int64_t* edge = reach < 0 ? begin : end;
    if (__builtin_add_overflow(*edge, reach, edge)) return false;
  }
  int64_t span = 0;
  return !__builtin_sub_overflow(*end, *begin, &span);
}

// One unknown t of a linear equation: lo <= t <= hi, with a positive coefficient.
struct Term {
  int64_t coefficient;
  int64_t lo;
  int64_t hi;
};

enum class Answer { kNo, kYes, kUnknown };

// Whether sum(coefficient * t) == target for some t. Tries one term after another, the largest coefficient first,
// and only values that the later terms can still make up for; so rows that do not cross each other, and nested
// dimensions in general, need one or two tries a term. `tries` bounds the work where they do.
Answer Solve(const std::vector<Term>& terms, size_t first, __int128 target, int* tries) {
  if (first == terms.size()) return target == 0 ? Answer::kYes : Answer::kNo;
  __int128 rest_lo = 0;
  __int128 rest_hi = 0;
  for (size_t i = first + 1; i < terms.size(); ++i) {
    rest_lo += static_cast<__int128>(terms[i].coefficient) * terms[i].lo;
    rest_hi += static_cast<__int128>(terms[i].coefficient) * terms[i].hi;
  }
  const Term& term = terms[first];
  auto floor_divide = [](__int128 a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); };
  const __int128 lo = std::max<__int128>(term.lo, -floor_divide(-(target - rest_hi), term.coefficient));
  const __int128 hi = std::min<__int128>(term.hi, floor_divide(target - rest_lo, term.coefficient));
  for (__int128 t = lo; t <= hi; ++t) {
    if (--*tries < 0) return Answer::kUnknown;
    const Answer answer = Solve(terms, first + 1, target - t * term.coefficient, tries);
    if (answer != Answer::kNo) return answer;
  }
  return Answer::kNo;
}

constexpr int kMaxTries = 1 << 18;

// The terms of one byte's offset in a view, or minus it.
void AddTerms(const TensorView& view, int sign, std::vector<Term>* terms) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.extents[i] == 1 || view.strides[i] == 0) continue;
    const int64_t coefficient = view.strides[i] * DTypeBytes(view.dtype);
    const int64_t last = view.extents[i] - 1;
    const bool positive = (coefficient > 0) == (sign > 0);
    terms->push_back({coefficient > 0 ? coefficient : -coefficient, positive ? 0 : -last, positive ? last : 0});
  }
  const int64_t last_byte = DTypeBytes(view.dtype) - 1;
  terms->push_back({1, sign > 0 ? 0 : -last_byte, sign > 0 ? last_byte : 0});
}

// Sorts by coefficient, largest first, and merges equal ones: t1 + t2 takes every value of its range.
void Normalise(std::vector<Term>* terms) {
  std::sort(terms->begin(), terms->end(), [](const Term& a, const Term& b) { return a.coefficient > b.coefficient; });
  std::vector<Term> merged;
  for (const Term& term : *terms) {
    if (!merged.empty() && merged.back().coefficient == term.coefficient) {
      merged.back().lo += term.lo;
      merged.back().hi += term.hi;
    } else {
      merged.push_back(term);
    }
  }
  *terms = std::move(merged);
}

absl::Status TooLarge(std::string_view name, const TensorView& view) {
  return absl::InvalidArgumentError(StrCat(name, ": the bytes of ", view.ToString(), " are too many for 64 bits"));
}

}  // namespace

absl::Status CheckTensor(std::string_view name, const TensorView& view, std::initializer_list<DType> dtypes,
                         std::initializer_list<int64_t> extents) {
  if (view.empty() && view.rank == 0) {
    return absl::InvalidArgumentError(
        StrCat(name, ": expected ", DTypesText(dtypes), " ", ExtentsText(extents), ", got no tensor"));
  }
  if (!Matches(view, dtypes, extents)) {
    return absl::InvalidArgumentError(
        StrCat(name, ": expected ", DTypesText(dtypes), " ", ExtentsText(extents), ", got ", view.ToString()));
  }
  if (HasNoElements(view)) return absl::OkStatus();
  if (view.empty()) {
    return absl::InvalidArgumentError(StrCat(name, ": expected data, got ", view.ToString(), " with a null pointer"));
  }
  for (int i = 0; i < view.rank; ++i) {
    if (view.extents[i] == 1) continue;
    if (view.strides[i] < 0) {
      return absl::InvalidArgumentError(StrCat(name, ": expected a stride of at least 0 in dimension ", i, " of ",
                                               view.ToString(), ", got ", view.strides[i]));
    }
    if (i == view.rank - 1 && view.strides[i] != 1) {
      return absl::InvalidArgumentError(StrCat(name, ": expected a stride of 1 in the last dimension of ",
                                               view.ToString(), ", got ", view.strides[i]));
    }
  }
  int64_t begin = 0;
  int64_t end = 0;
  if (!ByteSpan(view, &begin, &end)) return TooLarge(name, view);
  const int64_t misalignment = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) %
                                                    static_cast<uintptr_t>(DTypeBytes(view.dtype)));
  if (misalignment != 0) {
    return absl::InvalidArgumentError(StrCat(name, ": expected ", view.ToString(), " on a multiple of ",
                                             DTypeBytes(view.dtype), " bytes, got ", misalignment, " past one"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(std::string_view name, const WeightView& view, std::initializer_list<DType> dtypes,
                         std::initializer_list<int64_t> extents) {
  return CheckTensor(name, view.view(), dtypes, extents);
}

absl::Status CheckWeight(std::string_view name, const QuantizedWeight& weight, int64_t rows, int64_t cols) {
  const TensorView& values = weight.values.view();
  const bool is_stack = values.rank == 3;
  const bool is_packed = values.dtype == DType::kE2m1x2;
  if (is_packed && cols != kAnyExtent && cols % 2 != 0) {
    return absl::InvalidArgumentError(StrCat(name, ": expected an even number of columns in e2m1x2, got ", cols));
  }
  const int64_t stored_cols = is_packed && cols != kAnyExtent ? cols / 2 : cols;
  const std::initializer_list<DType> dtypes = {DType::kF32, DType::kBf16, DType::kE4m3, DType::kE2m1x2};
  DSV4_RETURN_IF_ERROR(is_stack ? CheckTensor(name, values, dtypes, {kAnyExtent, rows, stored_cols})
                                : CheckTensor(name, values, dtypes, {rows, stored_cols}));

  const std::string scales_name = StrCat(name, ".scales");
  if (!weight.is_low_precision()) {
    if (weight.scales.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(StrCat(scales_name, ": expected none for ", DTypeName(values.dtype), ", got ",
                                             weight.scales.ToString()));
  }
  if (weight.block_rows < 1 || weight.block_cols < 1 || (is_packed && weight.block_cols % 2 != 0)) {
    return absl::InvalidArgumentError(StrCat(name, ": expected blocks of at least 1 x ", is_packed ? 2 : 1,
                                             is_packed ? " with an even number of columns" : "", ", got ",
                                             weight.block_rows, " x ", weight.block_cols));
  }
  auto blocks = [](int64_t size, int64_t block) { return size / block + (size % block != 0 ? 1 : 0); };
  const int64_t scale_rows = blocks(weight.rows(), weight.block_rows);
  const int64_t scale_cols = blocks(weight.cols(), weight.block_cols);
  return is_stack ? CheckTensor(scales_name, weight.scales, {DType::kE8m0, DType::kF32},
                                {values.extents[0], scale_rows, scale_cols})
                  : CheckTensor(scales_name, weight.scales, {DType::kE8m0, DType::kF32}, {scale_rows, scale_cols});
}

absl::Status CheckNoSelfOverlap(std::string_view name, const TensorView& view) {
  if (view.empty() || HasNoElements(view)) return absl::OkStatus();
  int64_t begin = 0;
  int64_t end = 0;
  if (!ByteSpan(view, &begin, &end)) return TooLarge(name, view);
  // Two indices share an element if their difference d is not 0 and sum(stride * d) is. Terms not merged here:
  // equal strides are a shared element.
  std::vector<Term> terms;
  bool shared = false;
  for (int i = 0; i < view.rank; ++i) {
    if (view.extents[i] == 1) continue;
    if (view.strides[i] == 0) shared = true;
    const int64_t last = view.extents[i] - 1;
    terms.push_back({view.strides[i] < 0 ? -view.strides[i] : view.strides[i], -last, last});
  }
  std::sort(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.coefficient > b.coefficient; });
  // Of d and -d one has a positive first entry, so it is enough to look for that one.
  int tries = kMaxTries;
  for (size_t first = 0; first < terms.size() && !shared; ++first) {
    std::vector<Term> rest(terms.begin() + static_cast<std::ptrdiff_t>(first), terms.end());
    rest[0].lo = 1;
    shared = Solve(rest, 0, 0, &tries) != Answer::kNo;
  }
  if (!shared) return absl::OkStatus();
  std::string strides;
  for (int i = 0; i < view.rank; ++i) StrAppend(&strides, i == 0 ? "" : ", ", view.strides[i]);
  return absl::InvalidArgumentError(StrCat(name, ": expected every element of the output at its own address, got ",
                                           view.ToString(), " with strides [", strides, "]"));
}

absl::Status CheckDisjoint(std::string_view name_a, const TensorView& a, std::string_view name_b,
                           const TensorView& b) {
  if (a.empty() || b.empty() || HasNoElements(a) || HasNoElements(b)) return absl::OkStatus();
  int64_t a_begin = 0, a_end = 0, b_begin = 0, b_end = 0;
  if (!ByteSpan(a, &a_begin, &a_end)) return TooLarge(name_a, a);
  if (!ByteSpan(b, &b_begin, &b_end)) return TooLarge(name_b, b);
  const __int128 distance = static_cast<__int128>(reinterpret_cast<uintptr_t>(b.data)) -
                            static_cast<__int128>(reinterpret_cast<uintptr_t>(a.data));
  if (a_end <= distance + b_begin || distance + b_end <= a_begin) return absl::OkStatus();

  // A shared byte: a.data + offset in a == b.data + offset in b.
  std::vector<Term> terms;
  AddTerms(a, 1, &terms);
  AddTerms(b, -1, &terms);
  Normalise(&terms);
  int tries = kMaxTries;
  const Answer answer = Solve(terms, 0, distance, &tries);
  if (answer == Answer::kNo) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name_a, " and ", name_b, ": expected tensors without a common byte, ",
                                           answer == Answer::kYes ? "got " : "cannot rule one out for ", a.ToString(),
                                           " and ", b.ToString(), ", whose data is ", static_cast<int64_t>(distance),
                                           " bytes after the first's"));
}

absl::Status CheckAtLeast(std::string_view name, int64_t value, int64_t minimum) {
  if (value >= minimum) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected at least ", minimum, ", got ", value));
}

}  // namespace dsv4
