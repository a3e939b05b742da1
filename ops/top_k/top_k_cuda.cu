#include "ops/top_k/top_k_cuda.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "runtime/block_reduce.cuh"
#include "runtime/division.cuh"
#include "runtime/launch.cuh"
#include "runtime/shared_memory.cuh"

namespace dsv4::top_k {
namespace {

// Selects by radix. A score becomes an integer key that orders alike; digit by digit, from the highest, histograms tell
// the K-th largest key and how many keys equal to it are among the K. Then all larger keys and that many of the equal
// ones, lowest index first, are listed: where to is known from counts of those before.
//
// A cluster of blocks works on a row, each on one stretch of it; as many of them as the row's count gives work to. Within
// a block's stretch each warp has a stretch, and reads neighbouring scores in its lanes. After the first of five passes
// over its stretch a block finds most of it in its L1.
//
// Grid: x = row * blocks of a cluster + rank.
struct SelectTopK {
  static constexpr char kName[] = "top_k";
  static constexpr int kThreads = 1024;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static_assert(kWarps == kWarpThreads);  // SumUpWarps
  static constexpr int kMostCluster = 8;
  static constexpr int32_t kScoresPerBlock = 8192;  // for each further one of a cluster to take part

  static constexpr int kDigits = 3;  // of 11, 11 and 10 bits
  static constexpr int kBins = 2048;
  static_assert(kBins == 2 * kThreads);  // DecideDigit

  struct Weights {};
  struct Params {
    const float* logits;
    int64_t logits_row_stride;
    const int32_t* counts;
    const int32_t* requests;
    const int32_t* block_table;
    int64_t block_table_row_stride;
    int32_t blocks;
    int64_t rows_per_block;
    int32_t* indices;
    int64_t indices_row_stride;
    int32_t* slots;
    int64_t slots_row_stride;
    int32_t width;    // K
    int32_t cluster;  // blocks of a row
  };

  struct Counts {
    uint32_t larger;  // keys larger than the threshold's
    uint32_t equal;
  };
  struct Shared {
    uint32_t histograms[kDigits][kBins];
    uint32_t warp_sums[kWarps];
    Counts warps[kWarps];  // of each warp's stretch; then of all stretches before it in the block
    Counts block;
    uint32_t bin;     // of the digit that is being decided
    uint32_t needed;  // of the keys in that bin
  };

  // What is known of the K-th largest key.
  struct Threshold {
    uint32_t key = 0;   // its first digits, then zeros
    uint32_t mask = 0;  // of those digits
    uint32_t needed;    // how many of the keys with those digits are among the K
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    const int64_t row = blockIdx.x / params.cluster;
    const int rank = static_cast<int>(blockIdx.x - row * params.cluster);
    const int32_t count = max(params.counts[row], 0);
    const int ranks = max(1, min(params.cluster, (count + kScoresPerBlock - 1) / kScoresPerBlock));
    if (rank >= ranks) return;  // the others' barriers are of those that have not returned

    Shared& shared = DynamicShared<Shared>();
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const float* const logits = params.logits + row * params.logits_row_stride;
    const Stretch stretch = Stretch{0, count}.Part(rank, ranks).Part(warp, kWarps);

    Threshold threshold = {.needed = static_cast<uint32_t>(params.width)};
    if (count > params.width) {
      for (int i = static_cast<int>(threadIdx.x); i < kDigits * kBins; i += kThreads) {
        shared.histograms[i / kBins][i % kBins] = 0;
      }
      __syncthreads();
#pragma unroll 1
      for (int digit = 0; digit < kDigits; ++digit) {
        CountDigit(logits, stretch, lane, digit, threshold, shared.histograms[digit]);
        Synchronize(ranks);
        DecideDigit(digit, ranks, threshold, shared);
      }
    }
    // A key of 0 is that of a NaN, or nothing is known because no more than K scores are there: all numbers are larger.
    if (threshold.key == 0) threshold.needed = 0;

    const Counts of_stretch = CountKeys(logits, stretch, lane, threshold.key);
    if (lane == 0) shared.warps[warp] = of_stretch;
    __syncthreads();
    if (warp == 0) SumUpWarps(lane, shared);
    Synchronize(ranks);
    Counts before = shared.warps[warp];
    Counts total = {0, 0};
    for (int other = 0; other < ranks; ++other) {
      const Counts of_other = *Remote(&shared.block, other, ranks);
      if (other < rank) {
        before.larger += of_other.larger;
        before.equal += of_other.equal;
      }
      total.larger += of_other.larger;
      total.equal += of_other.equal;
    }
    if (stretch.begin < stretch.end) List(params, row, logits, stretch, lane, threshold, before);
    if (rank == 0) {
      const auto listed = static_cast<int32_t>(total.larger + min(total.equal, threshold.needed));
      for (int32_t i = listed + static_cast<int32_t>(threadIdx.x); i < params.width; i += kThreads) {
        params.indices[row * params.indices_row_stride + i] = -1;
        params.slots[row * params.slots_row_stride + i] = -1;
      }
    }
    if (ranks > 1) Synchronize(ranks);  // no block's shared memory goes while others read it
  }

 private:
  struct Stretch {
    int32_t begin, end;

    // Of `parts` parts, equal but for whole groups of 32 scores.
    __device__ __forceinline__ Stretch Part(int i, int parts) const {
      const int32_t groups = (end - begin + kWarpThreads - 1) / kWarpThreads;
      const int32_t size = (groups + parts - 1) / parts * kWarpThreads;
      return {min(begin + i * size, end), min(begin + (i + 1) * size, end)};
    }
  };

  // Larger scores have larger keys, +0 and -0 the same one. A NaN has 0, which no number has.
  static __device__ __forceinline__ uint32_t KeyOf(float score) {
    if (score != score) return 0;
    const uint32_t bits = score == 0.0f ? 0 : __float_as_uint(score);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  }

  static __device__ __forceinline__ int DigitShift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
  static __device__ __forceinline__ uint32_t DigitMask(int digit) { return digit == 2 ? 1023 : 2047; }

  // Calls visit(index, key) with neighbouring indices in the lanes: in all of them, so that some may be past the end.
  template <typename Visit>
  static __device__ __forceinline__ void ForEachKey(const float* logits, const Stretch& stretch, int lane,
                                                    const Visit& visit) {
    constexpr int kInFlight = 4;
    for (int32_t first = stretch.begin; first < stretch.end; first += kInFlight * kWarpThreads) {
      float scores[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int32_t index = first + i * kWarpThreads + lane;
        scores[i] = index < stretch.end ? logits[index] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) visit(first + i * kWarpThreads + lane, KeyOf(scores[i]));
    }
  }

  // Counts the keys with the threshold's digits by their next one.
  static __device__ __forceinline__ void CountDigit(const float* logits, const Stretch& stretch, int lane, int digit,
                                                    const Threshold& threshold, uint32_t* histogram) {
    ForEachKey(logits, stretch, lane, [&](int32_t index, uint32_t key) {
      if (index < stretch.end && (key & threshold.mask) == threshold.key) {
        atomicAdd(&histogram[(key >> DigitShift(digit)) & DigitMask(digit)], 1u);
      }
    });
  }

  // From the histograms of all blocks of the row: the threshold's next digit. The same in every block.
  static __device__ __forceinline__ void DecideDigit(int digit, int ranks, Threshold& threshold, Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads, warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    // A thread has two bins, the first thread the two highest.
    const int high = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
    uint32_t in_high = 0, in_low = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const uint32_t* const histogram = Remote(shared.histograms[digit], rank, ranks);
      in_high += histogram[high];
      in_low += histogram[high - 1];
    }
    uint32_t up_to = in_high + in_low;  // keys in this thread's bins and all higher ones
#pragma unroll
    for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, up_to, lanes);
      if (lane >= lanes) up_to += other;
    }
    if (lane == kWarpThreads - 1) shared.warp_sums[warp] = up_to;
    __syncthreads();
    for (int i = 0; i < warp; ++i) up_to += shared.warp_sums[i];
    const uint32_t higher = up_to - in_high - in_low;
    if (higher < threshold.needed && threshold.needed <= up_to) {
      const bool is_high = threshold.needed <= higher + in_high;
      shared.bin = static_cast<uint32_t>(is_high ? high : high - 1);
      shared.needed = threshold.needed - higher - (is_high ? 0 : in_high);
    }
    __syncthreads();
    threshold.key |= shared.bin << DigitShift(digit);
    threshold.mask |= DigitMask(digit) << DigitShift(digit);
    threshold.needed = shared.needed;
  }

  static __device__ __forceinline__ Counts CountKeys(const float* logits, const Stretch& stretch, int lane,
                                                     uint32_t threshold) {
    Counts counts = {0, 0};
    ForEachKey(logits, stretch, lane, [&](int32_t index, uint32_t key) {
      const bool is_score = index < stretch.end;
      counts.larger += __popc(__ballot_sync(kFullWarp, is_score && key > threshold));
      counts.equal += __popc(__ballot_sync(kFullWarp, is_score && key == threshold));
    });
    return counts;
  }

  // Turns each warp's counts into those of the warps before it. One warp calls this.
  static __device__ __forceinline__ void SumUpWarps(int lane, Shared& shared) {
    const Counts own = shared.warps[lane];
    Counts sum = own;
#pragma unroll
    for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const uint32_t larger = __shfl_up_sync(kFullWarp, sum.larger, lanes);
      const uint32_t equal = __shfl_up_sync(kFullWarp, sum.equal, lanes);
      if (lane >= lanes) {
        sum.larger += larger;
        sum.equal += equal;
      }
    }
    shared.warps[lane] = {sum.larger - own.larger, sum.equal - own.equal};
    if (lane == kWarpThreads - 1) shared.block = sum;
  }

  // Lists the chosen of a stretch, with `before` counted in the stretches before it.
  static __device__ __forceinline__ void List(const Params& params, int64_t row, const float* logits,
                                              const Stretch& stretch, int lane, const Threshold& threshold,
                                              Counts before) {
    const int32_t* const table = params.block_table + params.requests[row] * params.block_table_row_stride;
    int32_t* const indices = params.indices + row * params.indices_row_stride;
    int32_t* const slots = params.slots + row * params.slots_row_stride;
    const uint32_t lower_lanes = (1u << lane) - 1;
    ForEachKey(logits, stretch, lane, [&](int32_t index, uint32_t key) {
      const bool is_score = index < stretch.end;
      const bool is_larger = is_score && key > threshold.key, is_equal = is_score && key == threshold.key;
      const uint32_t larger = __ballot_sync(kFullWarp, is_larger), equal = __ballot_sync(kFullWarp, is_equal);
      const uint32_t equal_before = before.equal + __popc(equal & lower_lanes);
      if (is_larger || (is_equal && equal_before < threshold.needed)) {
        const uint32_t at = before.larger + __popc(larger & lower_lanes) + min(equal_before, threshold.needed);
        const Division entry = Divide(index, params.rows_per_block);
        const int64_t block = entry.quotient < params.blocks ? entry.quotient : entry.quotient % params.blocks;
        indices[at] = index;
        slots[at] = static_cast<int32_t>(table[block] * params.rows_per_block + entry.remainder);
      }
      before.larger += __popc(larger);
      before.equal += __popc(equal);
    });
  }

  // A barrier of the blocks of a row.
  static __device__ __forceinline__ void Synchronize(int ranks) {
    if (ranks == 1) {
      __syncthreads();
    } else {
      cooperative_groups::this_cluster().sync();
    }
  }
  // What the row's block `rank` has where this one has `local`.
  template <typename T>
  static __device__ __forceinline__ T* Remote(T* local, int rank, int ranks) {
    return ranks == 1 ? local : cooperative_groups::this_cluster().map_shared_rank(local, rank);
  }
};

// A power of two: as many blocks as the widest row has work for.
int32_t ClusterFor(int64_t width) {
  int32_t cluster = 1;
  while (cluster < SelectTopK::kMostCluster && cluster * SelectTopK::kScoresPerBlock < width) cluster *= 2;
  return cluster;
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t width = std::max(params.logits.extents[1], params.indices.extents[1]);
  if (width > std::numeric_limits<int32_t>::max() / 2) {
    return absl::InvalidArgumentError(absl::StrCat("logits and indices: expected fewer than 2^30 columns, got ", width));
  }
  if (params.indices.extents[1] == 0) return absl::OkStatus();
  const int32_t cluster = ClusterFor(params.logits.extents[1]);
  return Launch<SelectTopK>(stream, {.x = params.logits.extents[0] * cluster, .cluster = cluster}, {},
                            {.logits = params.logits.As<float>(),
                             .logits_row_stride = params.logits.strides[0],
                             .counts = params.counts.As<int32_t>(),
                             .requests = params.requests.As<int32_t>(),
                             .block_table = params.block_table.As<int32_t>(),
                             .block_table_row_stride = params.block_table.strides[0],
                             .blocks = static_cast<int32_t>(params.block_table.extents[1]),
                             .rows_per_block = params.rows_per_block,
                             .indices = params.indices.As<int32_t>(),
                             .indices_row_stride = params.indices.strides[0],
                             .slots = params.slots.As<int32_t>(),
                             .slots_row_stride = params.slots.strides[0],
                             .width = static_cast<int32_t>(params.indices.extents[1]),
                             .cluster = cluster},
                            sizeof(SelectTopK::Shared));
}

}  // namespace dsv4::top_k
