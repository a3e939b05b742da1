#include "runtime/cuda_device.h"

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "runtime/cuda_status.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

constexpr int kMinimumMajor = 9;

class CudaStream final : public Stream {
 public:
  CudaStream(Device& device, cudaStream_t stream) : Stream(device), stream_(stream) {}
  ~CudaStream() override {
    cudaStreamDestroy(stream_);
    cudaFree(workspace_);
  }

  cudaStream_t stream() const { return stream_; }

  absl::StatusOr<void*> Workspace() {
    if (workspace_ == nullptr) {
      DSV4_RETURN_IF_ERROR(CheckNotCapturing("cuda workspace: allocating it"));
      DSV4_ASSIGN_OR_RETURN(workspace_, device().Allocate(kCudaWorkspaceBytes));
    }
    return workspace_;
  }

  absl::Status CopyToDevice(void* destination, const void* source, int64_t bytes) override {
    return Copy("copy to device", destination, source, bytes, cudaMemcpyHostToDevice);
  }
  absl::Status CopyToHost(void* destination, const void* source, int64_t bytes) override {
    return Copy("copy to host", destination, source, bytes, cudaMemcpyDeviceToHost);
  }
  absl::Status Fill(void* destination, uint8_t value, int64_t bytes) override {
    DSV4_RETURN_IF_ERROR(CheckCall("fill", destination, bytes));
    if (bytes == 0) return absl::OkStatus();
    DSV4_RETURN_IF_CUDA_ERROR("fill", cudaMemsetAsync(destination, value, static_cast<size_t>(bytes), stream_));
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    DSV4_RETURN_IF_ERROR(CheckNotCapturing("synchronize"));
    SlotReport* const on_device = device().slot_report();
    SlotReport report;
    if (on_device != nullptr) {
      DSV4_RETURN_IF_CUDA_ERROR("synchronize",
                                cudaMemcpyAsync(&report, on_device, sizeof(report), cudaMemcpyDeviceToHost, stream_));
    }
    DSV4_RETURN_IF_CUDA_ERROR("synchronize", cudaStreamSynchronize(stream_));
    if (report.problem == SlotProblem::kNone) return absl::OkStatus();
    DSV4_RETURN_IF_CUDA_ERROR("synchronize", cudaMemsetAsync(on_device, 0, sizeof(report), stream_));
    DSV4_RETURN_IF_CUDA_ERROR("synchronize", cudaStreamSynchronize(stream_));
    return TakeSlotError(&report);
  }

 private:
  absl::Status CheckNotCapturing(std::string_view call) const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    DSV4_RETURN_IF_CUDA_ERROR(call, cudaStreamIsCapturing(stream_, &capture));
    if (capture == cudaStreamCaptureStatusNone) return absl::OkStatus();
    return absl::FailedPreconditionError(StrCat(call, ": not possible while the stream is being recorded"));
  }

  absl::Status CheckCall(std::string_view call, const void* pointer, int64_t bytes) const {
    DSV4_RETURN_IF_ERROR(CheckNotCapturing(call));
    if (bytes < 0) return absl::InvalidArgumentError(StrCat(call, ": expected at least 0 bytes, got ", bytes));
    if (bytes > 0 && pointer == nullptr) {
      return absl::InvalidArgumentError(StrCat(call, ": null pointer for ", bytes, " bytes"));
    }
    return absl::OkStatus();
  }

  absl::Status Copy(std::string_view call, void* destination, const void* source, int64_t bytes, cudaMemcpyKind kind) {
    DSV4_RETURN_IF_ERROR(CheckCall(call, destination, bytes));
    DSV4_RETURN_IF_ERROR(CheckCall(call, source, bytes));
    if (bytes == 0) return absl::OkStatus();
    DSV4_RETURN_IF_CUDA_ERROR(call, cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes), kind, stream_));
    return absl::OkStatus();
  }

  cudaStream_t stream_;
  void* workspace_ = nullptr;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(std::string name, SlotReport* slot_report) : name_(std::move(name)) { slot_report_ = slot_report; }
  ~CudaDevice() override { cudaFree(slot_report_); }

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return name_; }

  absl::StatusOr<void*> Allocate(int64_t bytes) override {
    if (bytes < 0) {
      return absl::InvalidArgumentError(StrCat("cuda memory: expected at least 0 bytes, got ", bytes));
    }
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes > 0 ? bytes : 1));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      size_t free_bytes = 0, total_bytes = 0;
      DSV4_RETURN_IF_CUDA_ERROR("cuda memory", cudaMemGetInfo(&free_bytes, &total_bytes));
      return absl::ResourceExhaustedError(StrCat("cuda memory: no room for ", bytes, " bytes, ", free_bytes, " of ",
                                                 total_bytes, " are free"));
    }
    DSV4_RETURN_IF_CUDA_ERROR("cuda memory", error);
    return memory;
  }
  void Free(void* memory) override { cudaFree(memory); }

  absl::StatusOr<void*> AllocateHost(int64_t bytes) override {
    if (bytes < 0) {
      return absl::InvalidArgumentError(StrCat("pinned memory: expected at least 0 bytes, got ", bytes));
    }
    void* memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, static_cast<size_t>(bytes > 0 ? bytes : 1));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return absl::ResourceExhaustedError(StrCat("pinned memory: no room for ", bytes, " bytes"));
    }
    DSV4_RETURN_IF_CUDA_ERROR("pinned memory", error);
    return memory;
  }
  void FreeHost(void* memory) override { cudaFreeHost(memory); }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override {
    cudaStream_t stream = nullptr;
    DSV4_RETURN_IF_CUDA_ERROR("cuda stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return std::make_unique<CudaStream>(*this, stream);
  }

 private:
  std::string name_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaErrorInsufficientDriver) {
    // Also what the runtime says without any driver.
    int driver = 0;
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    if (driver == 0) return absl::UnavailableError("cuda device: this machine has no nvidia driver");
    return absl::UnavailableError(StrCat("cuda device: the driver is for cuda ", driver / 1000, ".", driver % 1000 / 10,
                                         ", this build needs ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && devices == 0)) {
    cudaGetLastError();
    return absl::UnavailableError("cuda device: this machine shows no nvidia gpu");
  }
  DSV4_RETURN_IF_CUDA_ERROR("cuda device", error);
  DSV4_RETURN_IF_CUDA_ERROR("cuda device", cudaSetDevice(0));
  cudaDeviceProp properties;
  DSV4_RETURN_IF_CUDA_ERROR("cuda device", cudaGetDeviceProperties(&properties, 0));
  if (properties.major < kMinimumMajor) {
    return absl::UnavailableError(StrCat("cuda device: ", properties.name, " has compute capability ", properties.major,
                                         ".", properties.minor, ", at least ", kMinimumMajor, ".0 is needed"));
  }
  void* slot_report = nullptr;
  DSV4_RETURN_IF_CUDA_ERROR("cuda device", cudaMalloc(&slot_report, sizeof(SlotReport)));
  DSV4_RETURN_IF_CUDA_ERROR("cuda device", cudaMemset(slot_report, 0, sizeof(SlotReport)));
  return std::make_unique<CudaDevice>(properties.name, static_cast<SlotReport*>(slot_report));
}

cudaStream_t CudaStreamOf(Stream& stream) { return static_cast<CudaStream&>(stream).stream(); }

absl::StatusOr<void*> CudaWorkspaceOf(Stream& stream) { return static_cast<CudaStream&>(stream).Workspace(); }

}  // namespace dsv4
