// Checked mode (Device::set_check_slots, --check_slots): before an op writes through a row's slot it makes sure that the
// slot is inside the cache and that no earlier row of the step has the same one. A row that fails is not written, and
// the first is reported by the next Stream::Synchronize:
//   "save_partial_states: token 5 has slot 4096, past the cache of 4096 slots"
//   "save_partial_states: token 5 has slot 17, which an earlier token has too"
// Slots below zero are pads and always pass.
//
//   const SlotCheck check = MakeSlotCheck(stream.device().slot_report(), "op", params.slots, num_slots);   // in Record
//   if (slot < 0 || !AcceptsSlot(check, i)) continue;                                                   // on the CPU
// Kernels use slot_check.cuh.
#ifndef DSV4_RUNTIME_SLOT_CHECK_H_
#define DSV4_RUNTIME_SLOT_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/host_device.h"
#include "runtime/tensor_view.h"

namespace dsv4 {

enum class SlotProblem : int32_t { kNone, kPastCache, kRepeated };

// The first bad slot since the last one was taken: of the op that met one first, the lowest row.
struct SlotReport {
  int32_t lock = 0;  // held by a thread that reports
  SlotProblem problem = SlotProblem::kNone;
  const char* op = nullptr;         // a string literal of the host
  const void* slots = nullptr;      // with `op`, which of the step's ops it was
  int64_t row = 0;
  int64_t slot = 0;
  int64_t num_slots = 0;
};

struct SlotCheck {
  SlotReport* report = nullptr;  // null: nothing is checked
  const char* op = nullptr;
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;
};

// `op` is a string literal, `slots` i64 [N].
inline SlotCheck MakeSlotCheck(SlotReport* report, const char* op, const TensorView& slots, int64_t num_slots) {
  return {report, op, static_cast<const int64_t*>(slots.data), num_slots};
}

// What is wrong with the slot of `row`, as far as the earlier rows first, first + step, ... show.
DSV4_HOST_DEVICE inline SlotProblem FindSlotProblem(const SlotCheck& check, int64_t row, int64_t first, int64_t step) {
  const int64_t slot = check.slots[row];
  if (slot < 0) return SlotProblem::kNone;
  if (slot >= check.num_slots) return SlotProblem::kPastCache;
  for (int64_t earlier = first; earlier < row; earlier += step) {
    if (check.slots[earlier] == slot) return SlotProblem::kRepeated;
  }
  return SlotProblem::kNone;
}

// Keeps the problem if it comes before what the report holds. The caller excludes others.
DSV4_HOST_DEVICE inline void KeepFirst(const SlotCheck& check, int64_t row, SlotProblem problem) {
  SlotReport& report = *check.report;
  const bool same_op = report.op == check.op && report.slots == check.slots;
  if (report.problem != SlotProblem::kNone && !(same_op && row < report.row)) return;
  report.op = check.op;
  report.slots = check.slots;
  report.row = row;
  report.slot = check.slots[row];
  report.num_slots = check.num_slots;
  report.problem = problem;
}

// CPU: whether `row` may be written through its slot; reports it if not.
inline bool AcceptsSlot(const SlotCheck& check, int64_t row) {
  if (check.report == nullptr) return true;
  const SlotProblem problem = FindSlotProblem(check, row, 0, 1);
  if (problem != SlotProblem::kNone) KeepFirst(check, row, problem);
  return problem == SlotProblem::kNone;
}

// The report, in host memory, as OutOfRange or Ok; clears it.
absl::Status TakeSlotError(SlotReport* report);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_SLOT_CHECK_H_
