#include "ops/indexer_logits/indexer_logits.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/indexer_logits/indexer_logits_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::indexer_logits {
namespace {

AccessList Accesses(const Params& params) {
  AccessList accesses;
  accesses.Read("q_values", params.q_values);
  if (params.keys.format == RowFormat::kMxfp4Key) accesses.Read("q_scales", params.q_scales);
  return accesses.Read("weights", params.weights)
      .Read("keys", params.keys.pages)
      .Read("block_table", params.block_table)
      .Read("requests", params.requests)
      .Read("counts", params.counts)
      .Write("logits", params.logits);
}

absl::Status CheckQuery(const Params& params) {
  const int64_t channels = params.keys.row_size;
  switch (params.keys.format) {
    case RowFormat::kF32:
    case RowFormat::kBf16:
      return CheckTensor("q_values", params.q_values, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, channels});
    case RowFormat::kFp8Key:
      return CheckTensor("q_values", params.q_values, {DType::kE4m3}, {kAnyExtent, kAnyExtent, channels});
    case RowFormat::kMxfp4Key:
      DSV4_RETURN_IF_ERROR(
          CheckTensor("q_values", params.q_values, {DType::kE2m1x2}, {kAnyExtent, kAnyExtent, channels / 2}));
      return CheckTensor("q_scales", params.q_scales, {DType::kE8m0},
                         {params.q_values.extents[0], params.q_values.extents[1], channels / 32});
    default:
      return absl::InvalidArgumentError(
          StrCat("keys: expected a format of indexer keys, got ", RowFormatName(params.keys.format)));
  }
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckPagedRows("keys", params.keys));
  DSV4_RETURN_IF_ERROR(CheckQuery(params));
  const int64_t rows = params.q_values.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("weights", params.weights, {DType::kF32}, {rows, params.q_values.extents[1]}));
  DSV4_RETURN_IF_ERROR(CheckTensor("block_table", params.block_table, {DType::kI32}, {kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("blocks of block_table", params.block_table.extents[1], 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("counts", params.counts, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("logits", params.logits, {DType::kF32}, {rows, kAnyExtent}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "indexer_logits",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::indexer_logits
