#include "ops/advance_step/advance_step.h"

#include <cstdint>

#include "ops/advance_step/advance_step_cuda.h"
#include "ops/declared_accesses/declared_accesses.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::advance_step {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .ReadWrite("requests", params.requests)
      .ReadWrite("token_ids", params.token_ids)
      .ReadWrite("positions", params.positions)
      .ReadWrite("next_tokens", params.next_tokens)
      .ReadWrite("remaining", params.remaining)
      .Read("ignore_eos", params.ignore_eos)
      .Read("forced", params.forced)
      .Write("outputs", params.outputs)
      .ReadWrite("output_counts", params.output_counts)
      .Write("live_rows", params.live_rows);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {kAnyExtent}));
  const int64_t rows = params.requests.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("token_ids", params.token_ids, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("next_tokens", params.next_tokens, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("remaining", params.remaining, {DType::kI32}, {kAnyExtent}));
  const int64_t num_requests = params.remaining.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("ignore_eos", params.ignore_eos, {DType::kU8}, {num_requests}));
  if (!params.forced.empty()) {
    DSV4_RETURN_IF_ERROR(CheckTensor("forced", params.forced, {DType::kI32}, {num_requests, kAnyExtent}));
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("outputs", params.outputs, {DType::kI32}, {num_requests, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("output_counts", params.output_counts, {DType::kI32}, {num_requests}));
  DSV4_RETURN_IF_ERROR(CheckTensor("live_rows", params.live_rows, {DType::kI32}, {1}));

  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "advance_step",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::advance_step
