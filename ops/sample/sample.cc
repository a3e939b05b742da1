#include "ops/sample/sample.h"

#include <cstdint>

#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::sample {

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

  const struct {
    const char* name;
    const TensorView& view;
  } written[] = {{"tokens", params.tokens}, {"next_tokens", params.next_tokens}};
  for (const auto& output : written) {
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "logits", params.logits));
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "rows", params.rows));
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "positions", params.positions));
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "temperatures", params.temperatures));
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "seeds", params.seeds));
    DSV4_RETURN_IF_ERROR(CheckDisjoint(output.name, output.view, "request_ids", params.request_ids));
  }
  return CheckDisjoint("tokens", params.tokens, "next_tokens", params.next_tokens);
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "sample",
                         .accesses = AccessList()
                                         .Read("logits", params.logits)
                                         .Read("rows", params.rows)
                                         .Read("positions", params.positions)
                                         .Read("temperatures", params.temperatures)
                                         .Read("seeds", params.seeds)
                                         .Read("request_ids", params.request_ids)
                                         .Write("tokens", params.tokens)
                                         .ReadWrite("next_tokens", params.next_tokens),
                         .run = [params] { RunCpu(params); }});
}

}  // namespace dsv4::sample
