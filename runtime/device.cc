#include "runtime/device.h"

#include "absl/status/status.h"
#include "runtime/cpu_device.h"
#ifdef DSV4_HAVE_CUDA
#include "runtime/cuda_device.h"
#endif

namespace dsv4 {

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return CreateCpuDevice();
    case DeviceKind::kCuda:
#ifdef DSV4_HAVE_CUDA
      return CreateCudaDevice();
#else
      return absl::UnavailableError("cuda device: this build has no cuda backend");
#endif
  }
  return absl::InvalidArgumentError("device: unknown kind");
}

}  // namespace dsv4
