#include "ops/sample/sample.h"

#include <cstdint>

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/sample/sample_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::sample {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("logits", params.logits)
      .Read("rows", params.rows)
      .Read("positions", params.positions)
      .Read("temperatures", params.temperatures)
      .Read("seeds", params.seeds)
      .Read("request_ids", params.request_ids)
      .Write("tokens", params.tokens)
      .ReadWrite("next_tokens", params.next_tokens);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("logits", params.logits, {DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t wanted = params.logits.extents[0];
  DSV4_RETURN_IF_ERROR(CheckAtLeast("logits: vocabulary", params.logits.extents[1], 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("rows", params.rows, {DType::kI32}, {wanted}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("temperatures", params.temperatures, {DType::kF32}, {wanted}));
  DSV4_RETURN_IF_ERROR(CheckTensor("seeds", params.seeds, {DType::kI64}, {wanted}));
  DSV4_RETURN_IF_ERROR(CheckTensor("request_ids", params.request_ids, {DType::kI64}, {wanted}));
  DSV4_RETURN_IF_ERROR(CheckTensor("tokens", params.tokens, {DType::kI32}, {wanted}));
  DSV4_RETURN_IF_ERROR(CheckTensor("next_tokens", params.next_tokens, {DType::kI32}, {params.positions.extents[0]}));

  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "sample",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::sample
