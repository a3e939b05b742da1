#include "runtime/slot_check.h"

#include "absl/strings/str_cat.h"

namespace dsv4 {

absl::Status TakeSlotError(SlotReport* report) {
  const SlotReport taken = *report;
  *report = SlotReport();
  switch (taken.problem) {
    case SlotProblem::kNone:
      return absl::OkStatus();
    case SlotProblem::kPastCache:
      return absl::OutOfRangeError(absl::StrCat(taken.op, ": token ", taken.row, " has slot ", taken.slot,
                                                ", past the cache of ", taken.num_slots, " slots"));
    case SlotProblem::kRepeated:
      return absl::OutOfRangeError(absl::StrCat(taken.op, ": token ", taken.row, " has slot ", taken.slot,
                                                ", which an earlier token has too"));
  }
  return absl::InternalError("slot report: unknown problem");
}

}  // namespace dsv4
