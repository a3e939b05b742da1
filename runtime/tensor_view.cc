#include "runtime/tensor_view.h"

#include <cassert>
#include <string>

#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

// A null pointer stays null: an offset from it is undefined, and the view of an absent tensor is absent.
void* Advance(const TensorView& view, int64_t elements) {
  if (view.data == nullptr) return nullptr;
  return static_cast<char*>(view.data) + elements * DTypeBytes(view.dtype);
}

}  // namespace

TensorView TensorView::Contiguous(void* data, DType dtype, std::initializer_list<int64_t> extents) {
  assert(extents.size() <= static_cast<size_t>(kMaxRank));
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  for (int64_t extent : extents) view.extents[view.rank++] = extent;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.extents[i];
  }
  return view;
}

bool TensorView::is_contiguous() const {
  if (num_elements() == 0) return true;
  int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (extents[i] != 1 && strides[i] != stride) return false;
    stride *= extents[i];
  }
  return true;
}

TensorView TensorView::Rows(int64_t begin, int64_t count) const {
  assert(rank >= 1 && begin >= 0 && count >= 0 && begin <= extents[0] - count);
  TensorView view = *this;
  view.data = Advance(*this, begin * strides[0]);
  view.extents[0] = count;
  return view;
}

TensorView TensorView::Columns(int64_t begin, int64_t count) const {
  assert(rank == 2 && begin >= 0 && count >= 0 && begin <= extents[1] - count);
  TensorView view = *this;
  view.data = Advance(*this, begin * strides[1]);
  view.extents[1] = count;
  return view;
}

TensorView TensorView::Index(int64_t i) const {
  assert(rank >= 1 && i >= 0 && i < extents[0]);
  TensorView view;
  view.data = Advance(*this, i * strides[0]);
  view.dtype = dtype;
  view.rank = rank - 1;
  for (int k = 1; k < rank; ++k) {
    view.extents[k - 1] = extents[k];
    view.strides[k - 1] = strides[k];
  }
  return view;
}

TensorView TensorView::Reshape(std::initializer_list<int64_t> new_extents) const {
  assert(is_contiguous());
  const TensorView view = Contiguous(data, dtype, new_extents);
  assert(view.num_elements() == num_elements());
  return view;
}

std::string TensorView::ToString() const {
  std::string text = StrCat(DTypeName(dtype), " [");
  for (int i = 0; i < rank; ++i) StrAppend(&text, i == 0 ? "" : ", ", extents[i]);
  text += "]";
  return text;
}

}  // namespace dsv4
