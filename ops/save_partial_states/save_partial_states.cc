#include "ops/save_partial_states/save_partial_states.h"

#include <cstdint>

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/save_partial_states/save_partial_states_cuda.h"
#include "runtime/device.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::save_partial_states {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("kv", params.kv)
      .Read("score", params.score)
      .Weight("ape", params.ape)
      .Read("positions", params.positions)
      .Read("slots", params.slots)
      .Write("state_cache", params.state_cache);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("kv", params.kv, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent}));
  const int64_t tokens = params.kv.extents[0];
  const int64_t head_size = params.kv.extents[1];
  DSV4_RETURN_IF_ERROR(CheckAtLeast("kv: head size", head_size, 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("score", params.score, {params.kv.dtype}, {tokens, head_size}));
  DSV4_RETURN_IF_ERROR(CheckTensor("ape", params.ape, {DType::kF32}, {kAnyExtent, head_size}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("ape: ratio", params.ape.extent(0), 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("slots", params.slots, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("state_cache", params.state_cache, {DType::kF32, DType::kBf16},
                                   {kAnyExtent, kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("state_cache: block size", params.state_cache.extents[1], 1));
  const int64_t row_size = params.state_cache.extents[2];
  if (row_size % 2 != 0 || row_size / 2 < head_size) {
    return absl::InvalidArgumentError(
        StrCat("state_cache: expected rows of 2 * state width, with a state width of at least the head size ",
               head_size, ", got ", params.state_cache.ToString()));
  }

  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  const SlotCheck check = MakeSlotCheck(stream.device().slot_report(), "save_partial_states", params.slots,
                                        params.state_cache.extents[0] * params.state_cache.extents[1]);
  return stream.Enqueue({.op = "save_partial_states",
                         .accesses = Accesses(params),
                         .run = [params, check] { RunCpu(params, check); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params, check); })});
}

}  // namespace dsv4::save_partial_states
