#include "ops/sparse_attention/sparse_attention.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/sparse_attention/sparse_attention_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::sparse_attention {
namespace {

AccessList Accesses(const Params& params) {
  return AccessList()
      .Read("q", params.q)
      .Read("window", params.window.pages)
      .Read("window_slots", params.window_slots)
      .Read("window_lengths", params.window_lengths)
      .Read("entries", params.entries.pages)
      .Read("entry_slots", params.entry_slots)
      .Read("entry_lengths", params.entry_lengths)
      .Weight("sink", params.sink)
      .Write("out", params.out)
      .Write("lse", params.lse)
      .Write("split_out", params.split_out)
      .Write("split_sums", params.split_sums);
}

absl::Status CheckRows(std::string_view name, const PagedRows& rows, int64_t channels) {
  DSV4_RETURN_IF_ERROR(CheckPagedRows(name, rows));
  if (rows.row_size != channels) {
    return absl::InvalidArgumentError(StrCat(name, ": expected rows of ", channels, " channels, got ", rows.row_size));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("q", params.q, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, kAnyExtent}));
  const int64_t rows = params.q.extents[0];
  const int64_t heads = params.q.extents[1];
  const int64_t channels = params.q.extents[2];
  DSV4_RETURN_IF_ERROR(CheckRows("window", params.window, channels));
  DSV4_RETURN_IF_ERROR(CheckTensor("window_slots", params.window_slots, {DType::kI32}, {rows, kAnyExtent}));
  if (!params.window_lengths.empty()) {
    DSV4_RETURN_IF_ERROR(CheckTensor("window_lengths", params.window_lengths, {DType::kI32}, {rows}));
  }
  if (!params.entry_slots.empty()) {
    DSV4_RETURN_IF_ERROR(CheckRows("entries", params.entries, channels));
    DSV4_RETURN_IF_ERROR(CheckTensor("entry_slots", params.entry_slots, {DType::kI32}, {rows, kAnyExtent}));
    if (!params.entry_lengths.empty()) {
      DSV4_RETURN_IF_ERROR(CheckTensor("entry_lengths", params.entry_lengths, {DType::kI32}, {rows}));
    }
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("sink", params.sink, {DType::kF32}, {heads}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, heads, channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("lse", params.lse, {DType::kF32}, {rows, heads}));
  if (!params.split_out.empty() || !params.split_sums.empty()) {
    DSV4_RETURN_IF_ERROR(
        CheckTensor("split_out", params.split_out, {DType::kF32}, {rows, kAnyExtent, heads, channels}));
    const int64_t splits = params.split_out.extents[1];
    DSV4_RETURN_IF_ERROR(CheckAtLeast("splits of split_out", splits, 1));
    DSV4_RETURN_IF_ERROR(CheckTensor("split_sums", params.split_sums, {DType::kF32}, {rows, splits, heads, 2}));
  }
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "sparse_attention",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::sparse_attention
