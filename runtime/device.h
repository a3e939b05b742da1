// A device that holds memory and runs ops: the CPU, or a CUDA GPU. Everything above is written against it.
//
//   DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCpu));
//   DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream());
#ifndef DSV4_RUNTIME_DEVICE_H_
#define DSV4_RUNTIME_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/stream.h"

namespace dsv4 {

enum class DeviceKind : uint8_t { kCpu, kCuda };

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceKind kind() const = 0;
  // "cpu", or the GPU's name.
  virtual std::string name() const = 0;

  // `bytes` >= 0 of memory aligned to 256, contents undefined; ResourceExhausted names the size asked for.
  // The caller frees it with Free.
  virtual absl::StatusOr<void*> Allocate(int64_t bytes) = 0;
  virtual void Free(void* memory) = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
};

// Unavailable if this build or machine has no such device.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(DeviceKind kind);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DEVICE_H_
