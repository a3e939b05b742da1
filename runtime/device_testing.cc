#include "runtime/device_testing.h"

#include <cstdint>
#include <map>
#include <vector>

#include "runtime/testing.h"

namespace dsv4 {
namespace {

DeviceKind test_device_kind = DeviceKind::kCpu;

// Pinned memory is slow to get and to return, so it is kept and used again.
class PinnedMemory {
 public:
  static PinnedMemory& Get() {
    static auto* const memory = new PinnedMemory();  // never freed, so that it outlives every tensor
    return *memory;
  }

  void* Allocate(int64_t bytes) {
    int64_t rounded = 4096;
    while (rounded < bytes) rounded *= 2;
    std::vector<void*>& free = free_[rounded];
    void* memory = nullptr;
    if (!free.empty()) {
      memory = free.back();
      free.pop_back();
    } else {
      absl::StatusOr<void*> fresh = device_->AllocateHost(rounded);
      if (!fresh.ok()) return nullptr;
      memory = *fresh;
    }
    sizes_[memory] = rounded;
    return memory;
  }
  void Free(void* memory) { free_[sizes_[memory]].push_back(memory); }

 private:
  PinnedMemory() : device_(*CreateDevice(DeviceKind::kCuda)) {}

  std::unique_ptr<Device> device_;
  std::map<void*, int64_t> sizes_;
  std::map<int64_t, std::vector<void*>> free_;
};

}  // namespace

void SetTestDevice(DeviceKind kind) { test_device_kind = kind; }

void DeviceTest::SetUp() {
  absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice(test_device_kind);
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  device_ = *std::move(device);
  DSV4_ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream());
  stream_->set_blocking(true);
  if (!on_cpu()) {
    SetTestMemory({[](int64_t bytes) { return PinnedMemory::Get().Allocate(bytes); },
                   [](void* memory) { PinnedMemory::Get().Free(memory); }});
  }
}

void DeviceTest::TearDown() { SetTestMemory({}); }

}  // namespace dsv4
