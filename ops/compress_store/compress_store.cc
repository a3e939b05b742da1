#include "ops/compress_store/compress_store.h"

#include <cstdint>

#include "ops/compress_store/compress_store_cuda.h"
#include "ops/compress_store/kernel_choice.h"
#include "ops/declared_accesses/declared_accesses.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::compress_store {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("state_cache", params.state_cache)
      .Read("state_slots", params.state_slots)
      .Read("state_block_table", params.state_block_table)
      .Read("requests", params.requests)
      .Read("positions", params.positions)
      .Weight("norm_weight", params.norm_weight)
      .Weight("cos_sin", params.cos_sin)
      .Read("entry_slots", params.entry_slots)
      .Write("entries", params.entries.pages);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("entries", params.entries.pages, {DType::kU8}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckPagedRows("entries", params.entries));
  const int64_t head_size = params.entries.row_size;
  const int64_t rope_size = params.entries.rope_size;
  if (rope_size < 2 || rope_size % 2 != 0 || rope_size > head_size) {
    return absl::InvalidArgumentError(StrCat("entries: expected an even number of rotary channels, from 2 to the ",
                                             head_size, " of a row, got ", rope_size));
  }
  if (params.hadamard && (head_size & (head_size - 1)) != 0) {
    return absl::InvalidArgumentError(
        StrCat("entries: the hadamard rotation needs a row size that is a power of two, got ", head_size));
  }
  DSV4_RETURN_IF_ERROR(CheckAtLeast("ratio", params.ratio, 1));
  if (!(params.eps >= 0.0f)) {
    return absl::InvalidArgumentError(StrCat("eps: expected at least 0, got ", params.eps));
  }

  const int64_t state_width = params.overlap ? 2 * head_size : head_size;
  DSV4_RETURN_IF_ERROR(CheckTensor("state_cache", params.state_cache, {DType::kF32, DType::kBf16},
                                   {kAnyExtent, kAnyExtent, 2 * state_width}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("state_cache: block size", params.state_cache.extents[1], 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("state_slots", params.state_slots, {DType::kI64}, {kAnyExtent}));
  const int64_t tokens = params.state_slots.extents[0];
  DSV4_RETURN_IF_ERROR(
      CheckTensor("state_block_table", params.state_block_table, {DType::kI32}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("state_block_table: blocks of a request", params.state_block_table.extents[1], 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("norm_weight", params.norm_weight, {DType::kF32, DType::kBf16}, {head_size}));
  DSV4_RETURN_IF_ERROR(CheckTensor("cos_sin", params.cos_sin, {DType::kF32}, {kAnyExtent, rope_size}));
  DSV4_RETURN_IF_ERROR(CheckTensor("entry_slots", params.entry_slots, {DType::kI64}, {tokens}));

  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "compress_store",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params, ChooseKernel(params)); })});
}

}  // namespace dsv4::compress_store
