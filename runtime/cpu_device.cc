#include "runtime/cpu_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

constexpr int64_t kAlignment = 256;

class CpuStream final : public Stream {
 public:
  using Stream::Stream;

  absl::Status CopyToDevice(void* destination, const void* source, int64_t bytes) override {
    return Copy("copy to device", destination, source, bytes);
  }
  absl::Status CopyToHost(void* destination, const void* source, int64_t bytes) override {
    return Copy("copy to host", destination, source, bytes);
  }
  absl::Status Fill(void* destination, uint8_t value, int64_t bytes) override {
    DSV4_RETURN_IF_ERROR(CheckCall("fill", destination, bytes));
    if (bytes > 0) std::memset(destination, value, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  absl::Status Synchronize() override {
    DSV4_RETURN_IF_ERROR(CheckNotRecording("synchronize"));
    SlotReport* const report = device().slot_report();
    return report == nullptr ? absl::OkStatus() : TakeSlotError(report);
  }

 private:
  absl::Status CheckNotRecording(std::string_view call) const {
    if (sink() == nullptr) return absl::OkStatus();
    return absl::FailedPreconditionError(StrCat(call, ": not possible while the stream is being recorded"));
  }

  absl::Status CheckCall(std::string_view call, const void* pointer, int64_t bytes) const {
    DSV4_RETURN_IF_ERROR(CheckNotRecording(call));
    if (bytes < 0) return absl::InvalidArgumentError(StrCat(call, ": expected at least 0 bytes, got ", bytes));
    if (bytes > 0 && pointer == nullptr) {
      return absl::InvalidArgumentError(StrCat(call, ": null pointer for ", bytes, " bytes"));
    }
    return absl::OkStatus();
  }

  absl::Status Copy(std::string_view call, void* destination, const void* source, int64_t bytes) const {
    DSV4_RETURN_IF_ERROR(CheckCall(call, destination, bytes));
    DSV4_RETURN_IF_ERROR(CheckCall(call, source, bytes));
    if (bytes > 0) std::memmove(destination, source, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
};

class CpuDevice final : public Device {
 public:
  CpuDevice() { slot_report_ = &own_slot_report_; }
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override { return "cpu"; }

  absl::StatusOr<void*> Allocate(int64_t bytes) override {
    if (bytes < 0) {
      return absl::InvalidArgumentError(StrCat("cpu memory: expected at least 0 bytes, got ", bytes));
    }
    // The kernel promises more memory than there is, and ends the process when it is used; so what cannot fit
    // is refused here.
    void* memory = nullptr;
    if (bytes <= PhysicalBytes()) {
      const int64_t rounded = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
      memory = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
    }
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(StrCat("cpu memory: no room for ", bytes, " bytes"));
    }
    return memory;
  }
  void Free(void* memory) override { std::free(memory); }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override { return std::make_unique<CpuStream>(*this); }

 private:
  static int64_t PhysicalBytes() {
    const int64_t pages = sysconf(_SC_PHYS_PAGES);
    const int64_t page_bytes = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page_bytes <= 0) return std::numeric_limits<int64_t>::max() - kAlignment;
    return pages * page_bytes;
  }

  SlotReport own_slot_report_;
};

}  // namespace

std::unique_ptr<Device> CreateCpuDevice() { return std::make_unique<CpuDevice>(); }

}  // namespace dsv4
