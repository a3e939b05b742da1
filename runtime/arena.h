// Memory that is sized once, before the first step, and never grows: views into it keep their addresses for
// the life of every graph captured over them.
//
// The layout is a function that is run twice, first to measure and then to place:
//
//   auto lay_out = [&](Arena& arena) {
//     buffers.x = arena.Add(DType::kBf16, {rows, hidden});
//   };
//   DSV4_ASSIGN_OR_RETURN(Arena arena, Arena::Create(device, lay_out));
#ifndef DSV4_RUNTIME_ARENA_H_
#define DSV4_RUNTIME_ARENA_H_

#include <cstdint>
#include <functional>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/device.h"
#include "runtime/tensor_view.h"

namespace dsv4 {

class Arena {
 public:
  static constexpr int64_t kAlignment = 256;

  // Runs `lay_out` to measure, allocates, and runs it again to place. The device must outlive the arena.
  // InvalidArgument if a tensor has a negative extent or a size past 64 bits, Internal if the two runs differ.
  static absl::StatusOr<Arena> Create(Device& device, const std::function<void(Arena&)>& lay_out);

  Arena() = default;  // owns nothing
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  // A contiguous tensor, aligned to kAlignment, contents undefined. For use inside `lay_out` only. While
  // measuring, the view's pointer is neither null nor to be dereferenced. A tensor that Create will refuse gives
  // an empty view.
  TensorView Add(DType dtype, std::initializer_list<int64_t> extents);

  int64_t size_bytes() const { return size_bytes_; }
  void* data() const { return data_; }

 private:
  Device* device_ = nullptr;
  char* data_ = nullptr;  // null while measuring
  int64_t size_bytes_ = 0;
  int64_t used_bytes_ = 0;
  bool measuring_ = false;
  absl::Status status_;  // the first failed Add
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_ARENA_H_
