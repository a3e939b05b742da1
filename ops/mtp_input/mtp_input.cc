#include "ops/mtp_input/mtp_input.h"

#include <cstdint>

#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::mtp_input {

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(
      CheckTensor("e", params.e, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.e.extents[0];
  const int64_t hidden = params.e.extents[1];
  DSV4_RETURN_IF_ERROR(CheckTensor("h", params.h, {DType::kF32, DType::kBf16}, {rows, kAnyExtent, hidden}));
  const int64_t streams = params.h.extents[1];
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, streams, hidden}));
  DSV4_RETURN_IF_ERROR(CheckNoSelfOverlap("out", params.out));
  const bool in_place = params.out.data == params.h.data && params.out.dtype == params.h.dtype &&
                        params.out.strides[0] == params.h.strides[0] && params.out.strides[1] == params.h.strides[1];
  if (!in_place) DSV4_RETURN_IF_ERROR(CheckDisjoint("h", params.h, "out", params.out));
  return CheckDisjoint("e", params.e, "out", params.out);
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "mtp_input",
                         .accesses = AccessList().Read("e", params.e).Read("h", params.h).Write("out", params.out),
                         .run = [params] { RunCpu(params); }});
}

}  // namespace dsv4::mtp_input
