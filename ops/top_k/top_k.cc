#include "ops/top_k/top_k.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/top_k/top_k_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::top_k {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("logits", params.logits)
      .Read("counts", params.counts)
      .Read("requests", params.requests)
      .Read("block_table", params.block_table)
      .Write("indices", params.indices)
      .Write("slots", params.slots);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("logits", params.logits, {DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.logits.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("counts", params.counts, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("block_table", params.block_table, {DType::kI32}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("blocks of block_table", params.block_table.extents[1], 1));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("rows_per_block", params.rows_per_block, 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("indices", params.indices, {DType::kI32}, {rows, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("slots", params.slots, {DType::kI32}, {rows, params.indices.extents[1]}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "top_k",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::top_k
