#include "ops/linear/linear.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/linear/check_weight.h"
#include "ops/linear/linear_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::linear {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList().Read("x", params.x).Weight("weight", params.weight).Write("out", params.out);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckAtLeast("groups", params.groups, 1));
  DSV4_RETURN_IF_ERROR(CheckMatrix("weight", params.weight, kAnyExtent, kAnyExtent));
  if (params.weight.rows() % params.groups != 0) {
    return absl::InvalidArgumentError(
        StrCat("weight: expected rows in ", params.groups, " equal groups, got ", params.weight.rows()));
  }
  DSV4_RETURN_IF_ERROR(
      CheckTensor("x", params.x, {DType::kF32, DType::kBf16}, {kAnyExtent, params.groups * params.weight.cols()}));
  DSV4_RETURN_IF_ERROR(
      CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {params.x.extents[0], params.weight.rows()}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "linear",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::linear
