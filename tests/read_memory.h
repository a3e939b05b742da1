// A kernel that reads memory and leaves it as it is.
#ifndef DSV4_TESTS_READ_MEMORY_H_
#define DSV4_TESTS_READ_MEMORY_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4 {

inline constexpr int64_t kReadMemoryThreads = 264 * 256;

// Reads all of `memory`, u8, a multiple of 16 bytes. `sums`: u32 [kReadMemoryThreads], so that the reads have a use.
absl::Status RecordReadMemory(Stream& stream, const TensorView& memory, const TensorView& sums);

}  // namespace dsv4

#endif  // DSV4_TESTS_READ_MEMORY_H_
