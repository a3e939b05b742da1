#include "ops/moe/moe.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/linear/check_weight.h"
#include "ops/moe/moe_cuda.h"
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
      .Write("scratch.scores", params.scratch.scores)
      .Write("scratch.expert_slots", params.scratch.expert_slots)
      .Write("scratch.choices", params.scratch.choices)
      .Write("scratch.gate", params.scratch.gate)
      .Write("scratch.up", params.scratch.up)
      .Write("scratch.routed", params.scratch.routed)
      .Write("scratch.shared_gate", params.scratch.shared_gate)
      .Write("scratch.shared_up", params.scratch.shared_up)
      .Write("scratch.shared_out", params.scratch.shared_out)
      .Write("expert_ids", params.expert_ids)
      .Write("expert_weights", params.expert_weights)
      .Write("out", params.out);
}

absl::Status CheckContiguous(std::string_view name, const TensorView& view, DType dtype,
                             std::initializer_list<int64_t> extents) {
  DSV4_RETURN_IF_ERROR(CheckTensor(name, view, {dtype}, extents));
  if (view.is_contiguous()) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(name, ": expected a contiguous tensor, got other strides"));
}

absl::Status CheckScratch(const Scratch& scratch, const Scratch::Sizes& sizes) {
  const int64_t rows = sizes.rows;
  const int64_t choices = rows * sizes.chosen;
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.scores", scratch.scores, DType::kF32, {rows, sizes.experts}));
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.expert_slots", scratch.expert_slots, DType::kI32,
                                       {std::min(sizes.experts, choices), 3}));
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.choices", scratch.choices, DType::kI32, {choices}));
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.gate", scratch.gate, sizes.dtype, {choices, sizes.inner}));
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.up", scratch.up, sizes.dtype, {choices, sizes.inner}));
  DSV4_RETURN_IF_ERROR(CheckContiguous("scratch.routed", scratch.routed, sizes.dtype, {choices, sizes.channels}));
  DSV4_RETURN_IF_ERROR(
      CheckContiguous("scratch.shared_gate", scratch.shared_gate, sizes.dtype, {rows, sizes.shared_inner}));
  DSV4_RETURN_IF_ERROR(
      CheckContiguous("scratch.shared_up", scratch.shared_up, sizes.dtype, {rows, sizes.shared_inner}));
  return CheckContiguous("scratch.shared_out", scratch.shared_out, sizes.dtype, {rows, sizes.channels});
}

}  // namespace

Scratch Scratch::LayOut(Arena& arena, const Sizes& sizes) {
  const int64_t choices = sizes.rows * sizes.chosen;
  Scratch scratch;
  scratch.scores = arena.Add(DType::kF32, {sizes.rows, sizes.experts});
  scratch.expert_slots = arena.Add(DType::kI32, {std::min(sizes.experts, choices), 3});
  scratch.choices = arena.Add(DType::kI32, {choices});
  scratch.gate = arena.Add(sizes.dtype, {choices, sizes.inner});
  scratch.up = arena.Add(sizes.dtype, {choices, sizes.inner});
  scratch.routed = arena.Add(sizes.dtype, {choices, sizes.channels});
  scratch.shared_gate = arena.Add(sizes.dtype, {sizes.rows, sizes.shared_inner});
  scratch.shared_up = arena.Add(sizes.dtype, {sizes.rows, sizes.shared_inner});
  scratch.shared_out = arena.Add(sizes.dtype, {sizes.rows, sizes.channels});
  return scratch;
}

Scratch Scratch::FirstRows(int64_t rows) const {
  const int64_t chosen = choices.extents[0] / scores.extents[0];
  Scratch first = *this;
  for (TensorView* view : {&first.scores, &first.shared_gate, &first.shared_up, &first.shared_out}) {
    *view = view->FirstRows(rows);
  }
  for (TensorView* view : {&first.choices, &first.gate, &first.up, &first.routed}) {
    *view = view->FirstRows(rows * chosen);
  }
  first.expert_slots = expert_slots.FirstRows(std::min(scores.extents[1], rows * chosen));
  return first;
}

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
  DSV4_RETURN_IF_ERROR(CheckScratch(params.scratch, {.rows = rows,
                                                     .channels = channels,
                                                     .experts = experts,
                                                     .chosen = chosen,
                                                     .inner = inner,
                                                     .shared_inner = shared_inner,
                                                     .dtype = params.x.dtype}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, channels}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "moe",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::moe
