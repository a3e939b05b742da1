#include "ops/sparse_attention/sparse_attention_cuda.h"

#include <cstdint>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "ops/sparse_attention/attend.cuh"
#include "ops/sparse_attention/attend_plain.cuh"
#include "ops/sparse_attention/attend_tensor_cores.cuh"
#include "ops/sparse_attention/combine_splits.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/status.h"

namespace dsv4::sparse_attention {
namespace {

constexpr int64_t kMostListed = int64_t{1} << 24;
constexpr int64_t kMostSharedBytes = 227 * 1024;
constexpr int64_t kMostPlainChannels = kMostSharedBytes / AttendPlain::SharedBytes(1) / 64 * 64;

using Fp8Attention = AttendTensorCores<RowFormat::kFp8>;
using Bf16Attention = AttendTensorCores<RowFormat::kBf16>;
static_assert(sizeof(Fp8Attention::Shared) <= kMostSharedBytes && sizeof(Bf16Attention::Shared) <= kMostSharedBytes);

SlotList MakeSlotList(const TensorView& slots, const TensorView& lengths) {
  if (slots.empty()) return {};
  return {.slots = slots.As<int32_t>(),
          .row_stride = slots.strides[0],
          .width = static_cast<int32_t>(slots.extents[1]),
          .lengths = lengths.empty() ? nullptr : lengths.As<int32_t>()};
}

AttendParams MakeAttendParams(const Params& params) {
  const bool has_entries = !params.entry_slots.empty();
  AttendParams kernel = {.q = params.q.data,
                         .q_row_stride = params.q.strides[0],
                         .q_head_stride = params.q.strides[1],
                         .q_is_bf16 = params.q.dtype == DType::kBf16,
                         .heads = static_cast<int32_t>(params.q.extents[1]),
                         .channels = static_cast<int32_t>(params.q.extents[2]),
                         .window = MakePagedRowsPointer(params.window),
                         .window_list = MakeSlotList(params.window_slots, params.window_lengths),
                         .entries = has_entries ? MakePagedRowsPointer(params.entries) : PagedRowsPointer{},
                         .entry_list = MakeSlotList(params.entry_slots, params.entry_lengths),
                         .scale = static_cast<float>(params.scale * std::numbers::log2e),
                         .out = params.out.data,
                         .out_row_stride = params.out.strides[0],
                         .out_head_stride = params.out.strides[1],
                         .out_is_bf16 = params.out.dtype == DType::kBf16,
                         .lse = params.lse.As<float>(),
                         .lse_row_stride = params.lse.strides[0],
                         .splits = 1};
  if (!params.split_out.empty()) {
    kernel.splits = static_cast<int32_t>(params.split_out.extents[1]);
    kernel.split_out = params.split_out.As<float>();
    kernel.split_out_row_stride = params.split_out.strides[0];
    kernel.split_out_split_stride = params.split_out.strides[1];
    kernel.split_out_head_stride = params.split_out.strides[2];
    kernel.split_sums = params.split_sums.As<float>();
    kernel.split_sums_row_stride = params.split_sums.strides[0];
    kernel.split_sums_split_stride = params.split_sums.strides[1];
    kernel.split_sums_head_stride = params.split_sums.strides[2];
  }
  return kernel;
}

bool TensorCoresServe(const PagedRows& rows, RowFormat format) {
  if (rows.format != format) return false;
  if (format == RowFormat::kFp8 && rows.rope_size != Fp8Attention::kRotary) return false;
  return reinterpret_cast<uintptr_t>(rows.pages.data) % 16 == 0 &&
         (rows.pages.extents[0] <= 1 || rows.pages.strides[0] % 16 == 0);
}

template <class Op>
absl::Status LaunchAttention(Stream& stream, const Params& params, const AttendParams& kernel, int64_t shared_bytes) {
  return Launch<Op>(stream,
                    {.x = params.q.extents[0] * kernel.splits, .y = (kernel.heads + Op::kHeads - 1) / Op::kHeads},
                    {.sink = WeightPointer<float>(params.sink)}, kernel, shared_bytes);
}

}  // namespace

bool TensorCoresServe(const Params& params) {
  const RowFormat format = params.window.format;
  if (params.q.dtype != DType::kBf16 || params.q.extents[2] != Fp8Attention::kChannels) return false;
  if (format != RowFormat::kFp8 && format != RowFormat::kBf16) return false;
  if (!TensorCoresServe(params.window, format)) return false;
  if (!params.entry_slots.empty() && !TensorCoresServe(params.entries, format)) return false;
  return AllowsVectors(params.q, 8) && AllowsVectors(params.out, 2) &&
         (params.split_out.empty() || AllowsVectors(params.split_out, 2));
}

absl::Status RecordCuda(Stream& stream, const Params& params, KernelChoice choice) {
  const int64_t channels = params.q.extents[2];
  const int64_t listed = params.window_slots.extents[1] + (params.entry_slots.empty() ? 0 : params.entry_slots.extents[1]);
  if (listed > kMostListed) {
    return absl::InvalidArgumentError(absl::StrCat("window_slots and entry_slots: expected widths that add up to at most ",
                                                   kMostListed, ", got ", listed));
  }
  const AttendParams kernel = MakeAttendParams(params);
  if (choice == KernelChoice::kPlain || !TensorCoresServe(params)) {
    if (channels > kMostPlainChannels) {
      return absl::InvalidArgumentError(
          absl::StrCat("q: expected heads of at most ", kMostPlainChannels, " channels on cuda, got ", channels));
    }
    DSV4_RETURN_IF_ERROR(LaunchAttention<AttendPlain>(stream, params, kernel, AttendPlain::SharedBytes(channels)));
  } else if (params.window.format == RowFormat::kFp8) {
    DSV4_RETURN_IF_ERROR(LaunchAttention<Fp8Attention>(stream, params, kernel, sizeof(Fp8Attention::Shared)));
  } else {
    DSV4_RETURN_IF_ERROR(LaunchAttention<Bf16Attention>(stream, params, kernel, sizeof(Bf16Attention::Shared)));
  }
  // With room for one split only, or lists that always fit one, no row has parts to add up.
  if (SplitLength(static_cast<int32_t>(listed), kernel.splits) >= listed) return absl::OkStatus();
  return Launch<CombineSplits>(stream, {.x = params.q.extents[0], .y = kernel.heads},
                               {.sink = WeightPointer<float>(params.sink)}, kernel);
}

}  // namespace dsv4::sparse_attention
