#include "ops/mtp_input/mtp_input.h"

#include <cstdint>

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/mtp_input/mtp_input_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::mtp_input {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList().Read("e", params.e).Read("h", params.h).Write("out", params.out);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("e", params.e, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.e.extents[0];
  const int64_t hidden = params.e.extents[1];
  DSV4_RETURN_IF_ERROR(CheckTensor("h", params.h, {DType::kF32, DType::kBf16}, {rows, kAnyExtent, hidden}));
  const int64_t streams = params.h.extents[1];
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, streams, hidden}));
  if (IsSameView(params.h, params.out)) {
    return CheckWritesDisjoint(AccessList().Read("e", params.e).Write("out", params.out));
  }
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "mtp_input",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::mtp_input
