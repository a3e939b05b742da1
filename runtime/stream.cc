#include "runtime/stream.h"

#include "runtime/device.h"
#include "runtime/str_cat.h"

namespace dsv4 {

absl::Status Stream::Enqueue(OpRecord record) {
  if (device_.kind() != DeviceKind::kCpu) {
    return absl::FailedPreconditionError(
        StrCat(record.op, ": a record can be enqueued on the cpu backend only, this device is ", device_.name()));
  }
  if (!record.run) return absl::InvalidArgumentError(StrCat(record.op, ": the record has no work"));
  if (sink_ != nullptr) return sink_->Append(std::move(record));
  record.run();
  return absl::OkStatus();
}

}  // namespace dsv4
