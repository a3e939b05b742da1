// What must happen once before a graph is captured: kernels are loaded and algorithms are chosen. Ops join by a
// registration before main; kernels launched through launch.cuh do so by themselves.
//
//   DSV4_RETURN_IF_ERROR(WarmUp(*device));   // then capture
#ifndef DSV4_RUNTIME_WARMUP_H_
#define DSV4_RUNTIME_WARMUP_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "runtime/device.h"

namespace dsv4 {

// A warm-up changes no state that an op reads or writes, and may be run again.
using WarmupFunction = absl::Status (*)(Device& device);

// A static object. `op` is a string literal.
class WarmupRegistration {
 public:
  WarmupRegistration(const char* op, WarmupFunction function);
};

// Runs every registered warm-up. Does nothing on the CPU. The first error ends it, with the op's name.
absl::Status WarmUp(Device& device);

// The ops that have registered, sorted, each once.
std::vector<std::string> WarmupOps();

}  // namespace dsv4

#endif  // DSV4_RUNTIME_WARMUP_H_
