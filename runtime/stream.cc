#include "runtime/stream.h"

#include "runtime/device.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {

absl::Status Stream::Enqueue(OpRecord record) {
  if (device_.kind() == DeviceKind::kCuda) {
    if (!record.launch) return absl::InternalError(StrCat(record.op, ": no cuda kernel in this build"));
    DSV4_RETURN_IF_ERROR(record.launch());
    return blocking_ ? Synchronize() : absl::OkStatus();
  }
  if (!record.run) return absl::InvalidArgumentError(StrCat(record.op, ": the record has no work"));
  if (sink_ != nullptr) return sink_->Append(std::move(record));
  record.run();
  return blocking_ ? Synchronize() : absl::OkStatus();
}

}  // namespace dsv4
