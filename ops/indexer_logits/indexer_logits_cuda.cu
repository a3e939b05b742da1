#include "ops/indexer_logits/indexer_logits_cuda.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ops/indexer_logits/score.cuh"
#include "ops/indexer_logits/score_plain.cuh"
#include "ops/indexer_logits/score_tensor_cores.cuh"
#include "runtime/launch.cuh"

namespace dsv4::indexer_logits {
namespace {

constexpr int64_t kMostSharedBytes = 227 * 1024;
// Two on each multiprocessor of an H200. Fewer or more multiprocessors get whole and part rounds of them.
constexpr int64_t kMostBlocks = 264;
constexpr int64_t kMostPlainBlocksPerRow = 64;

using AnyTensorCores = ScoreTensorCores<RowFormat::kFp8Key>;

ScoreParams MakeScoreParams(const Params& params) {
  ScoreParams score = {.rows = params.q_values.extents[0],
                       .heads = static_cast<int32_t>(params.q_values.extents[1]),
                       .channels = static_cast<int32_t>(params.keys.row_size),
                       .q_values = params.q_values.data,
                       .q_dtype = params.q_values.dtype,
                       .q_row_stride = params.q_values.strides[0],
                       .q_head_stride = params.q_values.strides[1],
                       .weights = params.weights.As<float>(),
                       .weights_row_stride = params.weights.strides[0],
                       .keys = MakePagedRowsPointer(params.keys),
                       .page_shift = -1,
                       .block_table = params.block_table.As<int32_t>(),
                       .block_table_row_stride = params.block_table.strides[0],
                       .blocks = static_cast<int32_t>(params.block_table.extents[1]),
                       .requests = params.requests.As<int32_t>(),
                       .counts = params.counts.As<int32_t>(),
                       .logits = params.logits.As<float>(),
                       .logits_row_stride = params.logits.strides[0]};
  if (params.q_values.dtype == DType::kE2m1x2) {
    score.q_scales = params.q_scales.As<uint8_t>();
    score.q_scales_row_stride = params.q_scales.strides[0];
    score.q_scales_head_stride = params.q_scales.strides[1];
  }
  const auto rows_per_page = static_cast<uint64_t>(params.keys.rows_per_page);
  if (std::has_single_bit(rows_per_page)) score.page_shift = std::countr_zero(rows_per_page);
  return score;
}

template <RowFormat kFormat>
absl::Status LaunchTensorCores(Stream& stream, const ScoreParams& score, int64_t width) {
  using Op = ScoreTensorCores<kFormat>;
  const int64_t units = (width + Op::kUnitKeys - 1) / Op::kUnitKeys;
  return Launch<Op>(stream, {.x = std::min(score.rows * units, kMostBlocks)}, {}, score, sizeof(typename Op::Shared));
}

// Whether 16-byte pieces of the last dimension, and of rows a multiple of a stride apart, are aligned.
bool AllowsPieces(const TensorView& view) {
  const int64_t bytes = DTypeBytes(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.extents[i] > 1 && view.strides[i] * bytes % 16 != 0) return false;
  }
  return true;
}

}  // namespace

bool TensorCoresServe(const Params& params) {
  const RowFormat format = params.keys.format;
  const bool is_served = format == RowFormat::kFp8Key || format == RowFormat::kMxfp4Key ||
                         (format == RowFormat::kBf16 && params.q_values.dtype == DType::kBf16);
  return is_served && params.keys.row_size == AnyTensorCores::kChannels &&
         params.q_values.extents[1] <= AnyTensorCores::kMostHeads && AllowsPieces(params.q_values) &&
         AllowsPieces(params.keys.pages);
}

absl::Status RecordCuda(Stream& stream, const Params& params, KernelChoice choice) {
  const int64_t width = params.logits.extents[1];
  if (width > std::numeric_limits<int32_t>::max() / 2) {
    return absl::InvalidArgumentError(absl::StrCat("logits: expected fewer than 2^30 columns, got ", width));
  }
  const ScoreParams score = MakeScoreParams(params);
  if (choice == KernelChoice::kPlain || !TensorCoresServe(params)) {
    const int64_t shared_bytes = ScorePlain::SharedBytes(score.heads, score.channels);
    if (shared_bytes > kMostSharedBytes) {
      return absl::InvalidArgumentError(absl::StrCat("q_values: ", score.heads, " heads of ", score.channels,
                                                     " channels are more than a block's shared memory holds"));
    }
    const int64_t blocks =
        std::clamp<int64_t>((width + ScorePlain::kWarps - 1) / ScorePlain::kWarps, 1, kMostPlainBlocksPerRow);
    return Launch<ScorePlain>(stream, {.x = score.rows * blocks}, {},
                              {.score = score, .blocks_per_row = static_cast<int32_t>(blocks)}, shared_bytes);
  }
  switch (params.keys.format) {
    case RowFormat::kFp8Key:
      return LaunchTensorCores<RowFormat::kFp8Key>(stream, score, width);
    case RowFormat::kMxfp4Key:
      return LaunchTensorCores<RowFormat::kMxfp4Key>(stream, score, width);
    default:
      return LaunchTensorCores<RowFormat::kBf16>(stream, score, width);
  }
}

}  // namespace dsv4::indexer_logits
