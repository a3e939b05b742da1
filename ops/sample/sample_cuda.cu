#include "ops/sample/sample_cuda.h"

#include <cooperative_groups.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ops/sample/philox.h"
#include "runtime/block_reduce.cuh"
#include "runtime/launch.cuh"

namespace dsv4::sample {
namespace {

// A cluster of blocks a row of logits. Each warp of the cluster has a range of consecutive tokens: the ranges' largest
// logits give the row's, their sums of weights the range that the draw falls into, and that range's block finds the token.
struct SampleRow {
  static constexpr char kName[] = "sample";
  static constexpr int kThreads = 512;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kCluster = 8;
  static constexpr int kRanges = kCluster * kWarps;
  static constexpr int32_t kNoToken = std::numeric_limits<int32_t>::max();

  struct Weights {};
  struct Params {
    const float* logits;
    int64_t logits_stride, vocabulary;
    int64_t range;  // tokens
    const int32_t* rows;
    const int64_t* positions;
    const float* temperatures;
    const int64_t* seeds;
    const int64_t* request_ids;
    int32_t* tokens;
    int32_t* next_tokens;
  };

  // The largest logit, of equal ones the lowest token; NaN never is.
  struct Best {
    float logit;
    int32_t token;  // kNoToken: all are NaN
  };

  struct Shared {
    Best warp_best[kWarps];
    Best block_best[kCluster];
    double range_sums[kRanges];
    double below[kRanges + 1];  // sums of all ranges before
    double warp_sums[kWarps];
    int32_t first_past, last_possible;
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ Best Better(const Best& a, const Best& b) {
    return b.logit > a.logit || (b.logit == a.logit && b.token < a.token) ? b : a;
  }

  // exp((logit - largest) / temperature), and 0 for NaN. Infinite logits are settled before infinity - infinity arises.
  static __device__ __forceinline__ float Weight(float logit, float largest, float temperature) {
    if (std::isnan(logit)) return 0.0f;
    if (logit == largest) return 1.0f;
    if (std::isinf(logit)) return 0.0f;
    return expf((logit - largest) / temperature);
  }

  static __device__ __forceinline__ void Write(const Params& params, int64_t l, int32_t row, int32_t token) {
    params.tokens[l] = token;
    if (params.next_tokens[row] < 0) params.next_tokens[row] = token;
  }

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    __shared__ Shared shared;
    const int64_t l = blockIdx.x / kCluster;
    const int32_t row = params.rows[l];
    if (row < 0) return;
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int rank = static_cast<int>(blockIdx.x % kCluster);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const float* const logits = params.logits + l * params.logits_stride;
    const int64_t begin = (rank * kWarps + warp) * params.range;
    const int64_t end = min(begin + params.range, params.vocabulary);

    Best best = {-INFINITY, kNoToken};
#pragma unroll 8
    for (int64_t t = begin + lane; t < end; t += kWarpThreads) {
      const float logit = logits[t];
      if (logit > best.logit || (best.token == kNoToken && !std::isnan(logit))) best = {logit, static_cast<int32_t>(t)};
    }
    best = BestOfWarp(best);
    if (lane == 0) shared.warp_best[warp] = best;
    // Another block's shared memory may be written once that block has started; also a barrier of this block.
    cluster.sync();
    if (warp == 0) {
      best = BestOfWarp(lane < kWarps ? shared.warp_best[lane] : Best{-INFINITY, kNoToken});
      if (lane < kCluster) *cluster.map_shared_rank(&shared.block_best[rank], lane) = best;
    }
    cluster.sync();
    best = shared.block_best[0];
#pragma unroll
    for (int other = 1; other < kCluster; ++other) best = Better(best, shared.block_best[other]);

    const float temperature = params.temperatures[l];
    if (temperature == 0.0f || best.token == kNoToken) {
      if (rank == 0 && thread == 0) Write(params, l, row, best.token == kNoToken ? 0 : best.token);
      return;
    }

    double sum = 0.0;
#pragma unroll 8
    for (int64_t t = begin + lane; t < end; t += kWarpThreads) sum += Weight(logits[t], best.logit, temperature);
    sum = WarpSum(sum);
    if (lane < kCluster) *cluster.map_shared_rank(&shared.range_sums[rank * kWarps + warp], lane) = sum;
    cluster.sync();
    if (thread == 0) {
      double below = 0.0;
      for (int range = 0; range < kRanges; ++range) {
        shared.below[range] = below;
        below += shared.range_sums[range];
      }
      shared.below[kRanges] = below;
      shared.first_past = kNoToken;
      shared.last_possible = -1;
    }
    __syncthreads();
    const float u = UniformAt(params.seeds[l], params.request_ids[l], params.positions[row] + 1);
    const double target = u * shared.below[kRanges];
    // Exactly one range of the cluster holds the target: below grows, from 0 to more than the target.
    int chosen = -1;
    for (int range = rank * kWarps; range < (rank + 1) * kWarps; ++range) {
      if (shared.below[range] <= target && target < shared.below[range + 1]) chosen = range;
    }
    if (chosen < 0) return;
    FindToken(params, logits, chosen, best.logit, temperature, target, shared);
    __syncthreads();
    if (thread == 0) {
      // The sum within the range may round below the target that its end is above.
      Write(params, l, row, shared.first_past != kNoToken ? shared.first_past : shared.last_possible);
    }
  }

 private:
  static __device__ __forceinline__ Best BestOfWarp(Best best) {
#pragma unroll
    for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
      best = Better(best, {__shfl_xor_sync(kFullWarp, best.logit, offset),
                           __shfl_xor_sync(kFullWarp, best.token, offset)});
    }
    return best;
  }

  // The first token of the range at which the running sum exceeds the target, by the whole block, each thread with some
  // consecutive tokens.
  static __device__ __forceinline__ void FindToken(const Params& params, const float* logits, int range, float largest,
                                                   float temperature, double target, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const int64_t range_begin = range * params.range, range_end = min(range_begin + params.range, params.vocabulary);
    const int64_t per_thread = (params.range + kThreads - 1) / kThreads;
    const int64_t begin = range_begin + thread * per_thread, end = min(begin + per_thread, range_end);
    double own = 0.0;
    for (int64_t t = begin; t < end; ++t) own += Weight(logits[t], largest, temperature);
    double inclusive = own;
#pragma unroll
    for (int offset = 1; offset < kWarpThreads; offset *= 2) {
      const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    const double before = __shfl_up_sync(kFullWarp, inclusive, 1);
    if (lane == kWarpThreads - 1) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    double running = shared.below[range];
    for (int earlier = 0; earlier < warp; ++earlier) running += shared.warp_sums[earlier];
    if (lane > 0) running += before;
    for (int64_t t = begin; t < end; ++t) {
      const float weight = Weight(logits[t], largest, temperature);
      if (weight <= 0.0f) continue;
      running += weight;
      atomicMax(&shared.last_possible, static_cast<int32_t>(t));
      if (running > target) {
        atomicMin(&shared.first_past, static_cast<int32_t>(t));
        break;
      }
    }
  }
};

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t vocabulary = params.logits.extents[1];
  if (vocabulary >= SampleRow::kNoToken) {
    return absl::InvalidArgumentError(absl::StrCat("logits: expected a vocabulary below 2^31 - 1, got ", vocabulary));
  }
  return Launch<SampleRow>(
      stream, {.x = params.rows.extents[0] * SampleRow::kCluster, .cluster = SampleRow::kCluster}, {},
      {.logits = params.logits.As<float>(),
       .logits_stride = params.logits.strides[0],
       .vocabulary = vocabulary,
       .range = (vocabulary + SampleRow::kRanges - 1) / SampleRow::kRanges,
       .rows = params.rows.As<int32_t>(),
       .positions = params.positions.As<int64_t>(),
       .temperatures = params.temperatures.As<float>(),
       .seeds = params.seeds.As<int64_t>(),
       .request_ids = params.request_ids.As<int64_t>(),
       .tokens = params.tokens.As<int32_t>(),
       .next_tokens = params.next_tokens.As<int32_t>()});
}

}  // namespace dsv4::sample
