#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert.h"

#include <cstdint>

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::qnorm_rope_window_insert {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .ReadWrite("q", params.q)
      .Read("kv", params.kv)
      .Read("slots", params.slots)
      .Read("positions", params.positions)
      .Weight("cos_sin", params.cos_sin)
      .Write("window", params.window.pages);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("window", params.window.pages, {DType::kU8}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckPagedRows("window", params.window));
  const int64_t head_size = params.window.row_size;
  const int64_t rope_size = params.window.rope_size;
  if (rope_size < 2 || rope_size % 2 != 0 || rope_size > head_size) {
    return absl::InvalidArgumentError(StrCat("window: expected an even number of rotary channels, from 2 to the ",
                                             head_size, " of a row, got ", rope_size));
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("q", params.q, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, head_size}));
  const int64_t tokens = params.q.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("kv", params.kv, {DType::kF32, DType::kBf16}, {tokens, head_size}));
  DSV4_RETURN_IF_ERROR(CheckTensor("slots", params.slots, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("cos_sin", params.cos_sin, {DType::kF32}, {kAnyExtent, rope_size}));
  if (!(params.eps >= 0.0f)) {
    return absl::InvalidArgumentError(StrCat("eps: expected at least 0, got ", params.eps));
  }

  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "qnorm_rope_window_insert",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::qnorm_rope_window_insert
