#include "ops/compress_store/compress_store_cuda.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ops/rope/rope.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/division.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/paged_rows.cuh"

namespace dsv4::compress_store {
namespace {

struct KernelWeights {
  FloatWeight norm;
  WeightPointer<float> cos_sin;
  int64_t cos_sin_stride;
};

struct KernelParams {
  FloatData state;
  int64_t block_stride, row_stride;  // of the state cache, in elements
  int64_t block_size;
  int64_t state_width;
  const int64_t* state_slots;
  const int64_t* positions;
  const int64_t* entry_slots;
  const int32_t* requests;
  const int32_t* block_table;
  int64_t table_stride, table_blocks;
  int64_t tokens;
  int64_t tokens_per_cluster;  // of CompressLong
  int64_t ratio;
  bool overlap;
  bool hadamard;
  float eps;
  PagedRowsPointer entries;
};

// What a token asks for.
struct Event {
  bool due = false;
  int64_t position = 0;
  int64_t entry_slot = -1;
  int32_t request = 0;
};

__device__ __forceinline__ Event LoadEvent(const KernelParams& params, int64_t token, int64_t ratio) {
  // Four loads at once: the address of none depends on another.
  const int64_t state_slot = params.state_slots[token];
  Event event;
  event.position = params.positions[token];
  event.entry_slot = params.entry_slots[token];
  event.request = params.requests[token];
  event.due = state_slot >= 0 && event.entry_slot >= 0 && event.position >= 0 &&
              Divide(event.position + 1, ratio).remainder == 0;
  return event;
}

// Of a window of state rows: block `index` of the request's, counted from its first token on.
__device__ __forceinline__ int64_t BlockOffset(const KernelParams& params, int32_t request, int64_t index) {
  const int64_t column = Divide(index, params.table_blocks).remainder;
  return int64_t{params.block_table[request * params.table_stride + column]} * params.block_stride;
}

__device__ __forceinline__ float InverseNorm(float square_sum, int64_t channels, float eps) {
  return 1.0f / sqrtf(square_sum / static_cast<float>(channels) + eps);
}

// The angles of the two pairs of four channels; the identity where the channels are not rotary.
struct QuadRotation {
  bool rotary = false;
  float cosines[2], sines[2];
};

__device__ __forceinline__ QuadRotation LoadRotation(const KernelWeights& weights, const PagedRowsPointer& entries,
                                                     int64_t entry_position, int channel) {
  QuadRotation rotation;
  const int first = entries.row_size - entries.rope_size;
  if (channel < first) return rotation;
  rotation.rotary = true;
  const int64_t row = entry_position * weights.cos_sin_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = (channel - first) / 2 + i;
    rotation.cosines[i] = weights.cos_sin.Load(row + pair);
    rotation.sines[i] = weights.cos_sin.Load(row + entries.rope_size / 2 + pair);
  }
  return rotation;
}

__device__ __forceinline__ Vector<float, 4> NormAndRotate(Vector<float, 4> entry, float inverse_norm,
                                                          const Vector<float, 4>& norm_weight,
                                                          const QuadRotation& rotation) {
#pragma unroll
  for (int i = 0; i < 4; ++i) entry.values[i] = entry.values[i] * inverse_norm * norm_weight.values[i];
  if (rotation.rotary) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RotatePair(entry.values[2 * i], entry.values[2 * i + 1], rotation.cosines[i], rotation.sines[i]);
    }
  }
  return entry;
}

__device__ __forceinline__ float SquareSum(const Vector<float, 4>& v) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += v.values[i] * v.values[i];
  return sum;
}

// Ratio 4 with overlap, blocks of 4 rows: an entry pools the block of its window and the one before. A thread holds
// four channels of all eight rows, so that every load of an entry is in flight at once.
template <int kHead>
struct CompressOverlapped {
  static constexpr char kName[] = "compress_store";
  static constexpr int kThreads = 128;
  static constexpr int kThreadsPerEntry = kHead / 4;
  static constexpr int kEntriesPerBlock = kThreads / kThreadsPerEntry;
  static constexpr int kRatio = 4;
  // Barriers of a block with several entries would wait for entries that are not due.
  static_assert(kEntriesPerBlock == 1 || kThreadsPerEntry == kWarpThreads);

  using Weights = KernelWeights;
  using Params = KernelParams;
  using Quad = Vector<float, 4>;

  static __device__ __forceinline__ int Channel() { return threadIdx.x % kThreadsPerEntry * 4; }

  static __device__ __forceinline__ Quad Prefetch(const Weights& weights) { return weights.norm.Load<4>(Channel()); }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params, const Quad& norm_weight) {
    const int64_t token = int64_t{blockIdx.x} * kEntriesPerBlock + threadIdx.x / kThreadsPerEntry;
    if (token >= params.tokens) return;
    const Event event = LoadEvent(params, token, kRatio);
    if (!event.due) return;

    const int64_t window = event.position / kRatio;
    const int channel = Channel();
    const float* const state = static_cast<const float*>(params.state.data) + channel;
    // Both table entries before the first row: one latency, not two.
    const int64_t own_offset = BlockOffset(params, event.request, window);
    const int64_t previous_offset = window > 0 ? BlockOffset(params, event.request, window - 1) : 0;
    const float* const own = state + own_offset + kHead;
    Quad values[2 * kRatio], scores[2 * kRatio];
#pragma unroll
    for (int r = 0; r < kRatio; ++r) {
      values[kRatio + r] = LoadVector<float, 4>(own + r * params.row_stride);
      scores[kRatio + r] = LoadVector<float, 4>(own + r * params.row_stride + 2 * kHead);
    }
    if (window > 0) {
      const float* const previous = state + previous_offset;
#pragma unroll
      for (int r = 0; r < kRatio; ++r) {
        values[r] = LoadVector<float, 4>(previous + r * params.row_stride);
        scores[r] = LoadVector<float, 4>(previous + r * params.row_stride + 2 * kHead);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRatio; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[r].values[i] = 0.0f;
          scores[r].values[i] = -INFINITY;
        }
      }
    }
    const QuadRotation rotation = LoadRotation(weights, params.entries, window * kRatio, channel);

    Quad entry;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float largest = scores[0].values[i];
#pragma unroll
      for (int r = 1; r < 2 * kRatio; ++r) largest = fmaxf(largest, scores[r].values[i]);
      float weight_sum = 0.0f, weighted_sum = 0.0f;
#pragma unroll
      for (int r = 0; r < 2 * kRatio; ++r) {
        const float weight = expf(scores[r].values[i] - largest);
        weight_sum += weight;
        weighted_sum += weight * values[r].values[i];
      }
      entry.values[i] = weighted_sum / weight_sum;
    }

    __shared__ float sums[kThreads / kWarpThreads];
    float square_sum;
    if constexpr (kEntriesPerBlock == 1) {
      square_sum = BlockSum<kThreads>(SquareSum(entry), sums);
    } else {
      square_sum = WarpSum(SquareSum(entry));
    }
    entry = NormAndRotate(entry, InverseNorm(square_sum, kHead, params.eps), norm_weight, rotation);

    float row_largest = 0.0f;
    if constexpr (kThreadsPerEntry == kWarpThreads) {
      if (params.hadamard) HadamardWarp<4>(entry);
      if (params.entries.format == RowFormat::kFp8Key) row_largest = WarpMax(LargestEncodedMagnitude(entry));
    }
    EncodeSlice<4>(params.entries, LocateRow(params.entries, event.entry_slot), channel, entry, row_largest);
  }
};

// Ratio 128 without overlap, blocks of 8 rows, head 512. An entry pools 512 KiB of state, so a cluster of blocks works
// on it: each takes 64 channels of all 128 rows, and only the sum of squares crosses blocks. Within a block 16 threads
// cover the channels and 16 groups of them the state blocks of the window.
struct CompressLong {
  static constexpr char kName[] = "compress_store";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocksPerMultiprocessor = 2;
  static constexpr int kCluster = 8;
  static constexpr int kHead = 512;
  static constexpr int kRatio = 128;
  static constexpr int kBlockRows = 8;
  static constexpr int kChannels = kHead / kCluster;       // of a block
  static constexpr int kQuads = kChannels / 4;             // threads that cover them
  static constexpr int kWarps = kThreads / kWarpThreads;
  static_assert(kThreads / kQuads * kBlockRows == kRatio && kQuads == kWarpThreads / 2);

  using Weights = KernelWeights;
  using Params = KernelParams;
  using Quad = Vector<float, 4>;

  // A softmax-weighted sum of four channels over some rows, relative to the largest score among them.
  struct Pooled {
    Quad largest, weight_sum, weighted_sum;
  };
  struct Shared {
    Pooled partial[kWarps][kQuads];
    float square_sums[2][kCluster];  // of the cluster's blocks; two, since the next entry's may arrive early
  };

  static __device__ __forceinline__ int Rank() { return static_cast<int>(blockIdx.x % kCluster); }
  static __device__ __forceinline__ int Channel() { return Rank() * kChannels + threadIdx.x % kQuads * 4; }

  static __device__ __forceinline__ Quad Prefetch(const Weights& weights) { return weights.norm.Load<4>(Channel()); }

  // How much a sum relative to `from` weighs relative to `to` >= from. Rows of score -inf alone weigh nothing.
  static __device__ __forceinline__ float Rescale(float from, float to) {
    return from == -INFINITY ? 0.0f : expf(from - to);
  }

  static __device__ __forceinline__ Pooled Merge(const Pooled& a, const Pooled& b) {
    Pooled merged;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float largest = fmaxf(a.largest.values[i], b.largest.values[i]);
      const float of_a = Rescale(a.largest.values[i], largest), of_b = Rescale(b.largest.values[i], largest);
      merged.largest.values[i] = largest;
      merged.weight_sum.values[i] = a.weight_sum.values[i] * of_a + b.weight_sum.values[i] * of_b;
      merged.weighted_sum.values[i] = a.weighted_sum.values[i] * of_a + b.weighted_sum.values[i] * of_b;
    }
    return merged;
  }

  static __device__ __forceinline__ Pooled PoolBlockOfRows(const Params& params, const Event& event) {
    const int64_t first_block = event.position / kBlockRows - (kRatio / kBlockRows - 1);
    const float* const rows = static_cast<const float*>(params.state.data) +
                              BlockOffset(params, event.request, first_block + threadIdx.x / kQuads) + Channel();
    Quad values[kBlockRows], scores[kBlockRows];
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) {
      scores[r] = LoadVector<float, 4>(rows + r * params.row_stride + kHead);
      values[r] = LoadVector<float, 4>(rows + r * params.row_stride);
    }
    Pooled pooled;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float largest = scores[0].values[i];
#pragma unroll
      for (int r = 1; r < kBlockRows; ++r) largest = fmaxf(largest, scores[r].values[i]);
      const float reference = largest == -INFINITY ? 0.0f : largest;
      float weight_sum = 0.0f, weighted_sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kBlockRows; ++r) {
        const float weight = expf(scores[r].values[i] - reference);
        weight_sum += weight;
        weighted_sum += weight * values[r].values[i];
      }
      pooled.largest.values[i] = largest;
      pooled.weight_sum.values[i] = weight_sum;
      pooled.weighted_sum.values[i] = weighted_sum;
    }
    return pooled;
  }

  // Of the lane 16 further on.
  static __device__ __forceinline__ Pooled OfOtherHalf(const Pooled& pooled) {
    Pooled other;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      other.largest.values[i] = __shfl_xor_sync(kFullWarp, pooled.largest.values[i], kQuads);
      other.weight_sum.values[i] = __shfl_xor_sync(kFullWarp, pooled.weight_sum.values[i], kQuads);
      other.weighted_sum.values[i] = __shfl_xor_sync(kFullWarp, pooled.weighted_sum.values[i], kQuads);
    }
    return other;
  }

  static __device__ __forceinline__ Event BroadcastEvent(const Event& event, int lane) {
    Event broadcast;
    broadcast.due = true;
    broadcast.position = __shfl_sync(kFullWarp, event.position, lane);
    broadcast.entry_slot = __shfl_sync(kFullWarp, event.entry_slot, lane);
    broadcast.request = __shfl_sync(kFullWarp, event.request, lane);
    return broadcast;
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params, const Quad& norm_weight) {
    __shared__ Shared shared;
    const int64_t begin = blockIdx.x / kCluster * params.tokens_per_cluster;
    const int64_t end = min(begin + params.tokens_per_cluster, params.tokens);
    const int lane = threadIdx.x % kWarpThreads;
    int entries = 0;  // so far; every thread of the cluster counts the same ones
    for (int64_t first = begin; first < end; first += kWarpThreads) {
      Event candidate;
      if (first + lane < end) candidate = LoadEvent(params, first + lane, kRatio);
      unsigned due = __ballot_sync(kFullWarp, candidate.due);
      while (due != 0) {
        const Event event = BroadcastEvent(candidate, __ffs(static_cast<int>(due)) - 1);
        due &= due - 1;
        // Another block's shared memory may be written once that block has started.
        if (entries == 0) cooperative_groups::this_cluster().sync();
        Compress(weights, params, norm_weight, event, entries % 2, shared);
        entries += 1;
      }
    }
  }

  static __device__ __forceinline__ void Compress(const Weights& weights, const Params& params, const Quad& norm_weight,
                                                  const Event& event, int parity, Shared& shared) {
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, quad = lane % kQuads;
    const QuadRotation rotation =
        LoadRotation(weights, params.entries, event.position / kRatio * kRatio, Channel());

    Pooled pooled = PoolBlockOfRows(params, event);
    pooled = Merge(pooled, OfOtherHalf(pooled));
    if (lane < kQuads) shared.partial[warp][quad] = pooled;
    __syncthreads();

    // The first warp finishes the entry, its two halves the same channels.
    Quad entry = {};
    if (warp == 0) {
      Pooled all = shared.partial[0][quad];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) all = Merge(all, shared.partial[other][quad]);
#pragma unroll
      for (int i = 0; i < 4; ++i) entry.values[i] = all.weighted_sum.values[i] / all.weight_sum.values[i];
      const float square_sum = WarpSum<kQuads>(SquareSum(entry));
      if (lane < kCluster) *cluster.map_shared_rank(&shared.square_sums[parity][Rank()], lane) = square_sum;
    }
    cluster.sync();
    if (warp != 0) return;

    float square_sum = shared.square_sums[parity][0];
#pragma unroll
    for (int rank = 1; rank < kCluster; ++rank) square_sum += shared.square_sums[parity][rank];
    entry = NormAndRotate(entry, InverseNorm(square_sum, kHead, params.eps), norm_weight, rotation);
    EncodeSlice<4>(params.entries, LocateRow(params.entries, event.entry_slot), Channel(), entry, /*row_largest=*/0.0f,
                   /*active=*/lane < kQuads);
  }
};

// Any sizes: a block pools an entry into shared memory, channel by channel, in the order of the CPU.
struct CompressAny {
  static constexpr char kName[] = "compress_store";
  static constexpr int kThreads = 256;
  using Weights = KernelWeights;
  using Params = KernelParams;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    extern __shared__ float row[];
    __shared__ float sums[kThreads / kWarpThreads];
    const Event event = LoadEvent(params, blockIdx.x, params.ratio);
    if (!event.due) return;

    const int head = params.entries.row_size, rope = params.entries.rope_size;
    const int thread = static_cast<int>(threadIdx.x);
    float square_sum = 0.0f;
    for (int channel = thread; channel < head; channel += kThreads) {
      const float pooled = PoolChannel(params, event, channel);
      row[channel] = pooled;
      square_sum += pooled * pooled;
    }
    const float inverse_norm = InverseNorm(BlockSum<kThreads>(square_sum, sums), head, params.eps);
    for (int channel = thread; channel < head; channel += kThreads) {
      row[channel] = row[channel] * inverse_norm * weights.norm.LoadOne(channel);
    }
    __syncthreads();

    const int64_t angles = (event.position + 1 - params.ratio) * weights.cos_sin_stride;
    for (int pair = thread; pair < rope / 2; pair += kThreads) {
      float* const channels = row + head - rope + 2 * pair;
      RotatePair(channels[0], channels[1], weights.cos_sin.Load(angles + pair),
                 weights.cos_sin.Load(angles + rope / 2 + pair));
    }
    __syncthreads();

    if (params.hadamard) HadamardShared(row, head, thread, kThreads, [] { __syncthreads(); });
    EncodeRowFromShared(params.entries, LocateRow(params.entries, event.entry_slot), row);
  }

  static __device__ __forceinline__ float PoolChannel(const Params& params, const Event& event, int channel) {
    float largest = -INFINITY;
    ForEachRow(params, event, [&](int64_t offset) {
      largest = fmaxf(largest, params.state.LoadOne(offset + params.state_width + channel));
    });
    float weight_sum = 0.0f, weighted_sum = 0.0f;
    ForEachRow(params, event, [&](int64_t offset) {
      const float weight = expf(params.state.LoadOne(offset + params.state_width + channel) - largest);
      weight_sum += weight;
      weighted_sum += weight * params.state.LoadOne(offset + channel);
    });
    return weighted_sum / weight_sum;
  }

  // Calls visit(offset) for each row that the entry pools: where its column 0 lies, or column `head` in the entry's own
  // window if windows overlap.
  template <class Visit>
  static __device__ __forceinline__ void ForEachRow(const Params& params, const Event& event, const Visit& visit) {
    const int64_t window_begin = event.position + 1 - params.ratio;
    const int64_t first = max(params.overlap ? window_begin - params.ratio : window_begin, int64_t{0});
    auto [index, row] = Divide(first, params.block_size);
    int64_t block = BlockOffset(params, event.request, index);
    for (int64_t t = first; t <= event.position; ++t) {
      const bool own = params.overlap && t >= window_begin;
      visit(block + row * params.row_stride + (own ? params.entries.row_size : 0));
      row += 1;
      if (row == params.block_size && t < event.position) {
        row = 0;
        index += 1;
        block = BlockOffset(params, event.request, index);
      }
    }
  }
};

// Clusters that a launch of CompressLong has at most: two blocks on each of an H200's multiprocessors.
constexpr int64_t kMostClusters = 32;
// What fits into a block's shared memory.
constexpr int64_t kLargestRow = 48 * 1024;

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params, Kernel kernel) {
  const int64_t tokens = params.state_slots.extents[0];
  const KernelWeights weights = {.norm = MakeFloatWeight(params.norm_weight, 4),
                                 .cos_sin = WeightPointer<float>(params.cos_sin),
                                 .cos_sin_stride = params.cos_sin.stride(0)};
  const int64_t clusters = std::min(tokens, kMostClusters);
  const KernelParams kernel_params = {.state = MakeFloatData(params.state_cache, 4),
                                      .block_stride = params.state_cache.strides[0],
                                      .row_stride = params.state_cache.strides[1],
                                      .block_size = params.state_cache.extents[1],
                                      .state_width = params.state_cache.extents[2] / 2,
                                      .state_slots = params.state_slots.As<int64_t>(),
                                      .positions = params.positions.As<int64_t>(),
                                      .entry_slots = params.entry_slots.As<int64_t>(),
                                      .requests = params.requests.As<int32_t>(),
                                      .block_table = params.state_block_table.As<int32_t>(),
                                      .table_stride = params.state_block_table.strides[0],
                                      .table_blocks = params.state_block_table.extents[1],
                                      .tokens = tokens,
                                      .tokens_per_cluster = clusters > 0 ? (tokens + clusters - 1) / clusters : 0,
                                      .ratio = params.ratio,
                                      .overlap = params.overlap,
                                      .hadamard = params.hadamard,
                                      .eps = params.eps,
                                      .entries = MakePagedRowsPointer(params.entries)};
  switch (kernel) {
    case Kernel::kOverlapped512:
      return Launch<CompressOverlapped<512>>(stream, {.x = tokens}, weights, kernel_params);
    case Kernel::kOverlapped128: {
      constexpr int64_t kEntries = CompressOverlapped<128>::kEntriesPerBlock;
      return Launch<CompressOverlapped<128>>(stream, {.x = (tokens + kEntries - 1) / kEntries}, weights, kernel_params);
    }
    case Kernel::kLong512:
      return Launch<CompressLong>(stream, {.x = clusters * CompressLong::kCluster, .cluster = CompressLong::kCluster},
                                  weights, kernel_params);
    case Kernel::kGeneric:
      break;
  }
  if (params.entries.row_size > kLargestRow) {
    return absl::InvalidArgumentError(absl::StrCat("entries: expected rows of at most ", kLargestRow,
                                                   " channels on cuda, got ", params.entries.row_size));
  }
  return Launch<CompressAny>(stream, {.x = tokens}, weights, kernel_params,
                             params.entries.row_size * static_cast<int64_t>(sizeof(float)));
}

}  // namespace dsv4::compress_store
