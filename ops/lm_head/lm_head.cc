#include "ops/lm_head/lm_head.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/linear/check_weight.h"
#include "ops/lm_head/lm_head_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::lm_head {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("x", params.x)
      .Read("rows", params.rows)
      .Weight("weight", params.weight)
      .Write("logits", params.logits);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckMatrix("weight", params.weight, kAnyExtent, kAnyExtent));
  DSV4_RETURN_IF_ERROR(CheckTensor("x", params.x, {DType::kF32, DType::kBf16}, {kAnyExtent, params.weight.cols()}));
  const int64_t rows = params.x.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("rows", params.rows, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("logits", params.logits, {DType::kF32}, {rows, params.weight.rows()}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "lm_head",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::lm_head
