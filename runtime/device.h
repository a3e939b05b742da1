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
#include "runtime/slot_check.h"
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

  // The same of host memory that copies to and from this device use without staging. The device's ops can access it too,
  // though slowly.
  virtual absl::StatusOr<void*> AllocateHost(int64_t bytes) { return Allocate(bytes); }
  virtual void FreeHost(void* memory) { Free(memory); }

  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;

  // Checked mode (slot_check.h) for what is recorded from now on: rows with a bad slot are not written, and the next
  // Synchronize of any of this device's streams returns OutOfRange that names the first, once.
  void set_check_slots(bool check) { check_slots_ = check; }
  // Null unless slots are checked. In the device's memory.
  SlotReport* slot_report() const { return check_slots_ ? slot_report_ : nullptr; }

 protected:
  SlotReport* slot_report_ = nullptr;  // the backend's, for the device's life

 private:
  bool check_slots_ = false;
};

// Unavailable if this build or machine has no such device. The CUDA device is the first that the driver shows
// (CUDA_VISIBLE_DEVICES chooses) and must be of compute capability 9.0 or later.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(DeviceKind kind);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DEVICE_H_
