#include "ops/rms_norm/rms_norm.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/rms_norm/rms_norm_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::rms_norm {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList().Read("x", params.x).Weight("weight", params.weight).Write("out", params.out);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("x", params.x, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.x.extents[0];
  const int64_t channels = params.x.extents[1];
  DSV4_RETURN_IF_ERROR(CheckTensor("weight", params.weight, {DType::kF32, DType::kBf16}, {channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, channels}));
  if (IsSameView(params.x, params.out)) {
    return CheckWritesDisjoint(AccessList().Weight("weight", params.weight).Write("out", params.out));
  }
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "rms_norm",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::rms_norm
