// Into how many splits the lists of a row are divided, so that few rows still fill a GPU. All of this is pure; the model
// lays out the scratch by SplitCount, kernels divide a row by SplitLength.
//
//   const int64_t splits = SplitCount(rows, window_width, entry_width);
//   if (splits > 1) params.split_out = arena.Add(DType::kF32, {rows, splits, heads, channels}), ...
//
// Up to kMostSplitRows rows the division depends on the widths and on a row's own lengths only, and so do its bits.
// More rows fill a GPU without splits, and save the traffic of the parts.
#ifndef DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_
#define DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "runtime/host_device.h"

namespace dsv4::sparse_attention {

inline constexpr int32_t kTileRows = 64;        // a split is a multiple of it
inline constexpr int32_t kShortestSplit = 128;  // listed rows: of shorter ones the parts' traffic outweighs the work
inline constexpr int32_t kMostSplits = 32;      // bounds the scratch: 4 MB a row of 64 heads of 512 channels
inline constexpr int32_t kMostSplitRows = 64;

// The most splits that a row of a step of `rows` rows is divided into, at least 1.
inline int64_t SplitCount(int64_t rows, int64_t window_width, int64_t entry_width) {
  if (rows > kMostSplitRows) return 1;
  const int64_t splits = (window_width + entry_width + kShortestSplit - 1) / kShortestSplit;
  return std::clamp<int64_t>(splits, 1, kMostSplits);
}

// The listed rows of each split but the last, of a row that lists `listed` of them and may have `splits` splits. 32 bits,
// for the kernels; both are below 2^24.
DSV4_HOST_DEVICE inline int32_t SplitLength(int32_t listed, int32_t splits) {
  if (splits <= 1) return listed > 1 ? listed : 1;
  const int32_t length = (listed + splits * kTileRows - 1) / (splits * kTileRows) * kTileRows;
  return length > kShortestSplit ? length : kShortestSplit;
}

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_
