#include "runtime/warmup.h"

#include <set>

#include "absl/strings/str_cat.h"

namespace dsv4 {
namespace {

struct Entry {
  const char* op;
  WarmupFunction function;
};

// Not a plain global: registrations run before main, in any order.
std::vector<Entry>& Entries() {
  static auto* const entries = new std::vector<Entry>();
  return *entries;
}

}  // namespace

WarmupRegistration::WarmupRegistration(const char* op, WarmupFunction function) {
  Entries().push_back({op, function});
}

absl::Status WarmUp(Device& device) {
  if (device.kind() == DeviceKind::kCpu) return absl::OkStatus();
  for (const Entry& entry : Entries()) {
    if (absl::Status status = entry.function(device); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("warm-up of ", entry.op, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> WarmupOps() {
  std::set<std::string> ops;
  for (const Entry& entry : Entries()) ops.insert(entry.op);
  return {ops.begin(), ops.end()};
}

}  // namespace dsv4
