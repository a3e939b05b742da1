#include "ops/indexer_query/indexer_query.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/indexer_query/indexer_query_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::indexer_query {
namespace {

AccessList Accesses(const Params& params) {
  AccessList accesses;
  accesses.Read("q", params.q)
      .Read("weights", params.weights)
      .Read("positions", params.positions)
      .Weight("cos_sin", params.cos_sin)
      .Write("out_values", params.out_values);
  if (params.format == RowFormat::kMxfp4Key) accesses.Write("out_scales", params.out_scales);
  return accesses.Write("out_weights", params.out_weights);
}

absl::Status CheckFormat(const Params& params, int64_t rows, int64_t heads, int64_t channels) {
  switch (params.format) {
    case RowFormat::kF32:
    case RowFormat::kBf16:
      return CheckTensor("out_values", params.out_values, {DType::kF32, DType::kBf16}, {rows, heads, channels});
    case RowFormat::kFp8Key:
      return CheckTensor("out_values", params.out_values, {DType::kE4m3}, {rows, heads, channels});
    case RowFormat::kMxfp4Key:
      if (channels % 32 != 0) {
        return absl::InvalidArgumentError(StrCat("q: expected a multiple of 32 channels, got ", channels));
      }
      DSV4_RETURN_IF_ERROR(CheckTensor("out_values", params.out_values, {DType::kE2m1x2}, {rows, heads, channels / 2}));
      return CheckTensor("out_scales", params.out_scales, {DType::kE8m0}, {rows, heads, channels / 32});
    default:
      return absl::InvalidArgumentError(
          StrCat("format: expected that of an indexer key, got ", RowFormatName(params.format)));
  }
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("q", params.q, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, kAnyExtent}));
  const int64_t rows = params.q.extents[0];
  const int64_t heads = params.q.extents[1];
  const int64_t channels = params.q.extents[2];
  DSV4_RETURN_IF_ERROR(CheckTensor("weights", params.weights, {DType::kF32}, {rows, heads}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("cos_sin", params.cos_sin, {DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t rotary = params.cos_sin.extent(1);
  if (rotary % 2 != 0 || rotary > channels) {
    return absl::InvalidArgumentError(
        StrCat("cos_sin: expected an even number of at most ", channels, " rotary channels, got ", rotary));
  }
  if (params.hadamard && (channels < 1 || (channels & (channels - 1)) != 0)) {
    return absl::InvalidArgumentError(StrCat("q: expected a power of two of channels for hadamard, got ", channels));
  }
  DSV4_RETURN_IF_ERROR(CheckFormat(params, rows, heads, channels));
  DSV4_RETURN_IF_ERROR(CheckTensor("out_weights", params.out_weights, {DType::kF32}, {rows, heads}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "indexer_query",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::indexer_query
