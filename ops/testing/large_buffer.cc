#include "ops/testing/large_buffer.h"

#include <sys/mman.h>

namespace dsv4 {

LargeBuffer::LargeBuffer(Device& device, Stream& stream, int64_t bytes)
    : device_(device), stream_(stream), bytes_(bytes) {
#if !defined(__SANITIZE_ADDRESS__)  // whose shadow of this much memory does not fit
  if (device.kind() == DeviceKind::kCpu) {
    void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : memory;
    return;
  }
  const absl::StatusOr<void*> memory = device.Allocate(bytes);
  if (!memory.ok()) return;
  data_ = *memory;
  DSV4_EXPECT_OK(stream.Fill(data_, 0, bytes));
#endif
}

LargeBuffer::~LargeBuffer() {
  if (data_ == nullptr) return;
  if (device_.kind() == DeviceKind::kCpu) {
    munmap(data_, static_cast<size_t>(bytes_));
  } else {
    device_.Free(data_);
  }
}

}  // namespace dsv4
