#include "ops/moe/moe.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/linear/check_weight.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::moe {
namespace {

AccessList Accesses(const Params& params) {
  AccessList accesses;
  accesses.Read("x", params.x)
      .Weight("gate", params.gate)
      .Weight("bias", params.bias)
      .Weight("expert_table", params.expert_table);
  if (!params.expert_table.empty()) accesses.Read("row_tokens", params.row_tokens);
  return accesses.Weight("experts.w1", params.experts.w1)
      .Weight("experts.w3", params.experts.w3)
      .Weight("experts.w2", params.experts.w2)
      .Weight("shared.w1", params.shared.w1)
      .Weight("shared.w3", params.shared.w3)
      .Weight("shared.w2", params.shared.w2)
      .Write("expert_ids", params.expert_ids)
      .Write("expert_weights", params.expert_weights)
      .Write("out", params.out);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("x", params.x, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.x.extents[0];
  const int64_t channels = params.x.extents[1];
  DSV4_RETURN_IF_ERROR(CheckMatrix("gate", params.gate, kAnyExtent, channels));
  const int64_t experts = params.gate.rows();
  DSV4_RETURN_IF_ERROR(CheckAtLeast("experts", experts, 1));

  DSV4_RETURN_IF_ERROR(CheckTensor("expert_ids", params.expert_ids, {DType::kI32}, {rows, kAnyExtent}));
  const int64_t chosen = params.expert_ids.extents[1];
  DSV4_RETURN_IF_ERROR(CheckAtLeast("experts of a row", chosen, 1));
  if (chosen > experts) {
    return absl::InvalidArgumentError(
        StrCat("expert_ids: expected at most ", experts, " experts of a row, got ", chosen));
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("expert_weights", params.expert_weights, {DType::kF32}, {rows, chosen}));
  if (params.bias.empty() == params.expert_table.empty()) {
    return absl::InvalidArgumentError(
        StrCat("bias, expert_table: expected one of them, got ", params.bias.empty() ? "neither" : "both"));
  }
  if (params.expert_table.empty()) {
    DSV4_RETURN_IF_ERROR(CheckTensor("bias", params.bias, {DType::kF32}, {experts}));
  } else {
    DSV4_RETURN_IF_ERROR(CheckTensor("expert_table", params.expert_table, {DType::kI32}, {kAnyExtent, chosen}));
    DSV4_RETURN_IF_ERROR(CheckTensor("row_tokens", params.row_tokens, {DType::kI32}, {rows}));
  }

  DSV4_RETURN_IF_ERROR(CheckMatrices("experts.w1", params.experts.w1, experts, kAnyExtent, channels));
  const int64_t inner = params.experts.w1.rows();
  DSV4_RETURN_IF_ERROR(CheckMatrices("experts.w3", params.experts.w3, experts, inner, channels));
  DSV4_RETURN_IF_ERROR(CheckMatrices("experts.w2", params.experts.w2, experts, channels, inner));
  DSV4_RETURN_IF_ERROR(CheckMatrix("shared.w1", params.shared.w1, kAnyExtent, channels));
  const int64_t shared_inner = params.shared.w1.rows();
  DSV4_RETURN_IF_ERROR(CheckMatrix("shared.w3", params.shared.w3, shared_inner, channels));
  DSV4_RETURN_IF_ERROR(CheckMatrix("shared.w2", params.shared.w2, channels, shared_inner));
  if (!(params.swiglu_limit > 0.0f)) {
    return absl::InvalidArgumentError(StrCat("swiglu_limit: expected a positive number, got ", params.swiglu_limit));
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, channels}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "moe", .accesses = Accesses(params), .run = [params] { RunCpu(params); }});
}

}  // namespace dsv4::moe
