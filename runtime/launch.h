// The host half of launching kernels. launch.cuh is what ops include.
//
//   pdl::SetEnabled(false);    // every later launch or capture, of every op, without programmatic dependent launch
#ifndef DSV4_RUNTIME_LAUNCH_H_
#define DSV4_RUNTIME_LAUNCH_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dsv4 {

namespace pdl {
namespace internal {
inline std::atomic<bool> enabled{true};
}  // namespace internal

// The one switch. What a graph captured keeps what it was captured with. Results do not depend on it.
inline void SetEnabled(bool enabled) { internal::enabled.store(enabled, std::memory_order_relaxed); }
inline bool Enabled() { return internal::enabled.load(std::memory_order_relaxed); }
}  // namespace pdl

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
  int64_t z = 1;
  // Consecutive blocks of x that run together and can reach each other's shared memory; divides x. At most 8.
  int64_t cluster = 1;
};

// The one function that launches kernels. `arguments` are pointers to the kernel's arguments, as cudaLaunchKernel takes
// them. A grid with no block in it launches nothing. Errors name the op. CUDA streams only.
absl::Status LaunchKernel(const char* op, Stream& stream, const void* kernel, const Grid& grid, int threads,
                          int64_t shared_bytes, void** arguments);

// Loads the kernel's code onto the device, so that its first launch may be inside a capture.
absl::Status LoadKernel(const char* op, const void* kernel);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_LAUNCH_H_
