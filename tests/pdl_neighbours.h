// Kernels that stand before and after an op under programmatic dependent launch and make a missing wait show: they
// trigger at once, and touch memory only a while later.
//
//   DSV4_RETURN_IF_ERROR(RecordSlowCopy(stream, {.sources = {a, b}, .destination = x, .bytes = n, .turn = turn}, 10));
//   DSV4_RETURN_IF_ERROR(op::Record(stream, {.x = x, .out = out}));
//   DSV4_RETURN_IF_ERROR(RecordCompare(stream, out, {of_a, of_b}, bytes, turn, differences));
//   DSV4_RETURN_IF_ERROR(RecordNextTurn(stream, turn));
//
// What a replay copies and expects depends on a counter on the device, the turn: on even ones the first of two, on odd
// ones the second. So data left over from the last replay is wrong, and thousands of replays need no host.
// CUDA only. Sizes are multiples of 4 bytes; all pointers are the device's.
#ifndef DSV4_TESTS_PDL_NEIGHBOURS_H_
#define DSV4_TESTS_PDL_NEIGHBOURS_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"

namespace dsv4 {

using Choices = std::array<const void*, 2>;

struct SlowCopy {
  Choices sources = {};
  void* destination = nullptr;
  int64_t bytes = 0;
  const uint32_t* turn = nullptr;
};

// Waits for its predecessor, triggers, does nothing for `delay_us`, then copies.
absl::Status RecordSlowCopy(Stream& stream, const SlowCopy& copy, int64_t delay_us);

// Adds the number of 4-byte words that differ to *differences. Without the wait it is the positive control of itself.
absl::Status RecordCompare(Stream& stream, const void* actual, const Choices& expected, int64_t bytes,
                           const uint32_t* turn, uint64_t* differences);
absl::Status RecordCompareWithoutWait(Stream& stream, const void* actual, const Choices& expected, int64_t bytes,
                                      const uint32_t* turn, uint64_t* differences);

// Last in a replay.
absl::Status RecordNextTurn(Stream& stream, uint32_t* turn);

}  // namespace dsv4

#endif  // DSV4_TESTS_PDL_NEIGHBOURS_H_
