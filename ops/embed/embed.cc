#include "ops/embed/embed.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/embed/embed_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::embed {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList().Read("token_ids", params.token_ids).Weight("table", params.table).Write("out", params.out);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("token_ids", params.token_ids, {DType::kI32}, {kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("table", params.table, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16},
                                   {params.token_ids.extents[0], kAnyExtent, params.table.extent(1)}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "embed",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::embed
