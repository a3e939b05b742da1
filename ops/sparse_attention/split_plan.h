// Into how many splits the lists of a row are divided, so that few rows still fill a GPU. All of this is pure; the model
// lays out the scratch by MostSplits and divides by SplitCount, kernels divide a row by SplitLength.
//
//   const int64_t splits = SplitCount(DType::kBf16, rows, heads, window_width + entry_width);
//   if (splits > 1) params.split_out = f32 [rows, splits, heads, channels], ...
//
// A split's part of the result is as large as the query in fp32: for 64 heads nearly twice the bytes of 128 cached rows.
// So parts are worth their traffic only until the GPU is full, and with bf16 queries the number of splits falls as the
// number of rows grows: a row's bits then depend on the bucket (at 64 rows splits of a fixed 128 rows would write and
// read 84 MB beside 24 MB of cached rows). In fp32 precision, where runs are compared bit for bit, splits are of a fixed
// length up to kMostFixedRows rows.
#ifndef DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_
#define DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/host_device.h"

namespace dsv4::sparse_attention {

inline constexpr int32_t kTileRows = 64;      // a split is a multiple of it, but for a row's last
inline constexpr int32_t kHeadsPerBlock = 64;
inline constexpr int32_t kBlocksWanted = 132;  // the multiprocessors of an H200, each of which has room for one
inline constexpr int32_t kMostSplits = 64;     // more take longer to add up than they gain
inline constexpr int32_t kFixedSplit = 128;    // listed rows
inline constexpr int32_t kMostFixedSplits = 32;
inline constexpr int32_t kMostFixedRows = 64;

// The most splits of a row, at least 1, in a step of `rows` rows whose lists are `listed` wide together.
inline int64_t SplitCount(DType q_dtype, int64_t rows, int64_t heads, int64_t listed) {
  if (q_dtype == DType::kF32) {
    if (rows > kMostFixedRows) return 1;
    return std::clamp<int64_t>((listed + kFixedSplit - 1) / kFixedSplit, 1, kMostFixedSplits);
  }
  const int64_t blocks = rows * ((heads + kHeadsPerBlock - 1) / kHeadsPerBlock);
  const int64_t tiles = (listed + kTileRows - 1) / kTileRows;
  return std::max<int64_t>(1, std::min<int64_t>({kBlocksWanted / std::max<int64_t>(blocks, 1), tiles, kMostSplits}));
}

// The most splits of all rows together in any step of up to `most_rows` rows that has more than one a row; or 0.
inline int64_t MostSplits(DType q_dtype, int64_t most_rows, int64_t heads, int64_t listed) {
  int64_t most = 0;
  for (int64_t rows = 1; rows <= std::min<int64_t>(most_rows, std::max(kBlocksWanted, kMostFixedRows)); ++rows) {
    const int64_t splits = SplitCount(q_dtype, rows, heads, listed);
    if (splits > 1) most = std::max(most, rows * splits);
  }
  return most;
}

// The listed rows of each split but the last, of a row that lists `listed` of them and may have `splits` splits. 32 bits,
// for the kernels; both are below 2^24.
DSV4_HOST_DEVICE inline int32_t SplitLength(int32_t listed, int32_t splits) {
  if (splits <= 1) return listed > 1 ? listed : 1;
  const int32_t tiles = (listed + splits * kTileRows - 1) / (splits * kTileRows);
  return (tiles > 1 ? tiles : 1) * kTileRows;
}

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_SPLIT_PLAN_H_
