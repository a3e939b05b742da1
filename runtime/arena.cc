#include "runtime/arena.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

// Whether the bytes of a contiguous tensor are a number, stored in *bytes.
bool TensorBytes(DType dtype, std::initializer_list<int64_t> extents, int64_t* bytes) {
  *bytes = DTypeBytes(dtype);
  for (int64_t extent : extents) {
    if (extent < 0 || __builtin_mul_overflow(*bytes, extent, bytes)) return false;
  }
  return extents.size() > 0 && extents.size() <= static_cast<size_t>(kMaxRank);
}

}  // namespace

absl::StatusOr<Arena> Arena::Create(Device& device, const std::function<void(Arena&)>& lay_out) {
  Arena measure;
  measure.measuring_ = true;
  lay_out(measure);
  DSV4_RETURN_IF_ERROR(measure.status_);

  Arena arena;
  arena.device_ = &device;
  if (measure.used_bytes_ > 0) {
    DSV4_ASSIGN_OR_RETURN(void* data, device.Allocate(measure.used_bytes_));
    arena.data_ = static_cast<char*>(data);
  }
  arena.size_bytes_ = measure.used_bytes_;
  lay_out(arena);
  DSV4_RETURN_IF_ERROR(arena.status_);
  if (arena.used_bytes_ != arena.size_bytes_) {
    return absl::InternalError(StrCat("arena: the layout was measured as ", arena.size_bytes_,
                                            " bytes and placed as ", arena.used_bytes_));
  }
  return arena;
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  if (data_ != nullptr) device_->Free(data_);
  device_ = std::exchange(other.device_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  used_bytes_ = std::exchange(other.used_bytes_, 0);
  measuring_ = std::exchange(other.measuring_, false);
  status_ = std::exchange(other.status_, absl::OkStatus());
  return *this;
}

Arena::~Arena() {
  if (data_ != nullptr) device_->Free(data_);
}

TensorView Arena::Add(DType dtype, std::initializer_list<int64_t> extents) {
  int64_t bytes = 0;
  int64_t end = 0;
  if (!TensorBytes(dtype, extents, &bytes) || __builtin_add_overflow(used_bytes_, bytes, &end) ||
      __builtin_add_overflow(end, kAlignment - 1, &end)) {
    status_.Update(absl::InvalidArgumentError(
        StrCat("arena: no tensor can be ", DTypeName(dtype), " [", absl::StrJoin(extents, ", "), "]")));
    return {};
  }
  end = end / kAlignment * kAlignment;
  if (!measuring_ && end > size_bytes_) {
    status_.Update(absl::InternalError(
        StrCat("arena: ", DTypeName(dtype), " [", absl::StrJoin(extents, ", "),
                     "] is past the measured size of ", size_bytes_, " bytes")));
    return {};
  }
  // While measuring there is no memory yet; the address only has to be one that is not null, so that a layout
  // sees the same kinds of views twice.
  void* data = measuring_ ? reinterpret_cast<void*>(static_cast<uintptr_t>(kAlignment + used_bytes_))
                          : static_cast<void*>(data_ + used_bytes_);
  used_bytes_ = end;
  return TensorView::Contiguous(data, dtype, extents);
}

}  // namespace dsv4
