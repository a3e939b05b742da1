#include "runtime/launch.h"

#include <cuda_runtime_api.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "runtime/cuda_device.h"
#include "runtime/cuda_status.h"

namespace dsv4 {
namespace {

// More dynamic shared memory than this needs a kernel's consent.
constexpr int64_t kDefaultSharedBytes = 48 * 1024;

// What every device of the supported kind can place.
constexpr int64_t kMaxCluster = 8;

}  // namespace

absl::Status LaunchKernel(const char* op, Stream& stream, const void* kernel, const Grid& grid, int threads,
                          int64_t shared_bytes, void** arguments) {
  if (stream.device().kind() != DeviceKind::kCuda) {
    return absl::InternalError(absl::StrCat(op, ": a kernel cannot be launched on ", stream.device().name()));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return absl::OkStatus();
  if (grid.x < 0 || grid.x > std::numeric_limits<int32_t>::max() || grid.y < 0 || grid.y > 65535 || grid.z < 0 ||
      grid.z > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": a grid of ", grid.x, " x ", grid.y, " x ", grid.z, " blocks is too large"));
  }
  if (grid.cluster < 1 || grid.cluster > kMaxCluster || grid.x % grid.cluster != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", grid.x, " blocks cannot be split into clusters of ", grid.cluster));
  }
  if (shared_bytes > kDefaultSharedBytes) {
    DSV4_RETURN_IF_CUDA_ERROR(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes)));
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (pdl::Enabled()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = CudaStreamOf(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  DSV4_RETURN_IF_CUDA_ERROR(op, cudaLaunchKernelExC(&config, kernel, arguments));
  return absl::OkStatus();
}

absl::Status LoadKernel(const char* op, const void* kernel) {
  cudaFuncAttributes attributes;
  DSV4_RETURN_IF_CUDA_ERROR(op, cudaFuncGetAttributes(&attributes, kernel));
  return absl::OkStatus();
}

}  // namespace dsv4
