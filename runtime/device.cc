#include "runtime/device.h"

#include "absl/status/status.h"
#include "runtime/cpu_device.h"

namespace dsv4 {

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return CreateCpuDevice();
    case DeviceKind::kCuda:
      return absl::UnavailableError("cuda device: this build has no cuda backend");
  }
  return absl::InvalidArgumentError("device: unknown kind");
}

}  // namespace dsv4
