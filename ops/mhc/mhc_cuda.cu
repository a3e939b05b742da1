#include "ops/mhc/mhc_cuda.h"

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "runtime/block_reduce.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/status.h"

namespace dsv4::mhc {
namespace {

constexpr int kWidth = 8;  // channels that a thread accesses at once

__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// pre and head: the mixing coefficients of a row, and the weighted sum of its streams.
//
// A cluster of blocks handles a few rows, so that `fn`, which is far larger than a row, is read by many multiprocessors
// also when there is one row. Each block has a part of the channels, of all streams: it multiplies that part of the
// rows by that part of `fn`, the blocks exchange their sums, and each adds them up in the same order and then mixes its
// own channels. The sum of squares counts as one more product, of the row with itself.
template <class Access>
struct MixStreams {
  static constexpr char kName[] = "mhc";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kCluster = 8;
  static constexpr int kRows = 4;           // of a cluster
  static constexpr int kMixesPerWarp = 4;   // at a time
  static constexpr int kMixesAtOnce = kWarps * kMixesPerWarp;
  static constexpr int kTile = 1024;        // channels of a stream in shared memory at a time
  // fn is f32: wide accesses where the streams allow them.
  using Fn = std::conditional_t<std::is_same_v<Access, AnyAccess>, FloatWeight, VectorWeight<float>>;

  struct Weights {
    Fn fn;
    WeightPointer<float> scale, base;
    int64_t fn_stride;
    int64_t mixes, streams, channels;
    int64_t part;  // channels of a block, a multiple of kWidth
  };
  struct Params {
    typename Access::Data streams;
    int64_t row_stride, stream_stride;
    int64_t rows;           // of out
    const int32_t* chosen;  // null: row i is row i of the streams
    float rms_eps, hc_eps;
    typename Access::Data out;
    int64_t out_stride;
    float* post;  // null: head
    int64_t post_stride;
    float* comb;
    int64_t comb_row_stride, comb_stride;
    int64_t sinkhorn_iters;
  };

  // Floats of dynamic shared memory: the rows' tile, and for each row of the cluster the sums of this block, of all
  // blocks, and of the row.
  static int64_t SharedFloats(int64_t mixes) { return kRows * kTile + (kCluster + 2) * kRows * (mixes + 1); }

  static __device__ __forceinline__ int Rank() { return static_cast<int>(blockIdx.x % kCluster); }

  // One cluster brings `fn` into L2.
  static __device__ __forceinline__ void Prefetch(const Weights& weights) {
    if (blockIdx.x >= kCluster) return;
    constexpr int kLine = 32;
    const int64_t begin = Rank() * weights.part, end = min(begin + weights.part, weights.channels);
    const int64_t lines = end > begin ? (end - begin + kLine - 1) / kLine : 0;
    for (int64_t i = threadIdx.x; i < weights.mixes * weights.streams * lines; i += kThreads) {
      const int64_t line = i % lines, stream = i / lines % weights.streams, mix = i / lines / weights.streams;
      weights.fn.PrefetchToL2(mix * weights.fn_stride + stream * weights.channels + begin + line * kLine);
    }
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    extern __shared__ __align__(16) float mix_shared[];
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
    const int sums = static_cast<int>(weights.mixes) + 1;
    float* const tile = mix_shared;                      // [kRows][kTile]
    float* const own_sums = tile + kRows * kTile;        // [kRows][sums]
    float* const all_sums = own_sums + kRows * sums;     // [kCluster][kRows][sums]
    float* const mixes = all_sums + kCluster * kRows * sums;  // [kRows][sums]

    // Which rows; negative: none.
    const int64_t first_row = int64_t{blockIdx.x} / kCluster * kRows;
    int64_t rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = -1;
      if (first_row + r < params.rows) rows[r] = params.chosen == nullptr ? first_row + r : params.chosen[first_row + r];
    }

    for (int first_mix = 0; first_mix < sums; first_mix += kMixesAtOnce) {
      MultiplyPart(weights, params, rows, first_mix + warp * kMixesPerWarp, tile, own_sums);
    }
    // Another block's shared memory may be written once that block has started; also a barrier of this block.
    cluster.sync();
    for (int i = thread; i < kCluster * kRows * sums; i += kThreads) {
      const int to = i / (kRows * sums), from = i % (kRows * sums);
      *cluster.map_shared_rank(&all_sums[Rank() * kRows * sums + from], to) = own_sums[from];
    }
    cluster.sync();
    for (int i = thread; i < kRows * sums; i += kThreads) {
      float sum = all_sums[i];
      for (int rank = 1; rank < kCluster; ++rank) sum += all_sums[rank * kRows * sums + i];
      mixes[i] = sum;
    }
    __syncthreads();
    // The last of a row's sums is that of the squares. all_sums is free again, and takes the coefficients.
    const float size = static_cast<float>(weights.streams * weights.channels);
    float* const coefficients = all_sums;
    for (int i = thread; i < kRows * (sums - 1); i += kThreads) {
      const int r = i / (sums - 1), mix = i % (sums - 1);
      const float factor = 1.0f / sqrtf(mixes[r * sums + sums - 1] / size + params.rms_eps);
      coefficients[r * sums + mix] = Coefficient(weights, params, mixes[r * sums + mix] * factor, mix);
    }
    __syncthreads();

    if (params.post != nullptr && Rank() == 0 && warp < kRows) {
      StoreMixing(weights, params, first_row + warp, coefficients + warp * sums, lane);
    }
    MixPart(weights, params, rows, first_row, coefficients, sums);
  }

 private:
  // own_sums[r][mix] of this block's channels for four mixes of each warp, from `mix` on.
  static __device__ __forceinline__ void MultiplyPart(const Weights& weights, const Params& params,
                                                      const int64_t (&rows)[kRows], int mix, float* tile,
                                                      float* own_sums) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads;
    const int sums = static_cast<int>(weights.mixes) + 1;
    float products[kMixesPerWarp][kRows] = {};
    const int64_t begin = Rank() * weights.part, end = min(begin + weights.part, weights.channels);
    for (int64_t stream = 0; stream < weights.streams; ++stream) {
      for (int64_t channel = begin; channel < end; channel += kTile) {
        const int count = static_cast<int>(min(int64_t{kTile}, end - channel));
        __syncthreads();  // the last tile has been read
        LoadTile(params, rows, stream, channel, count, tile);
        __syncthreads();
        const int64_t fn = stream * weights.channels + channel;
#pragma unroll 2
        for (int k = lane * 4; k < count; k += kWarpThreads * 4) {
          Vector<float, 4> x[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) x[r] = LoadVector<float, 4>(tile + r * kTile + k);
#pragma unroll
          for (int m = 0; m < kMixesPerWarp; ++m) {
            if (mix + m >= sums) continue;
            if (mix + m == sums - 1) {
#pragma unroll
              for (int r = 0; r < kRows; ++r) products[m][r] = AddProduct(products[m][r], x[r], x[r]);
            } else {
              const Vector<float, 4> w = weights.fn.template Load<4>((mix + m) * weights.fn_stride + fn + k, count - k);
#pragma unroll
              for (int r = 0; r < kRows; ++r) products[m][r] = AddProduct(products[m][r], w, x[r]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kMixesPerWarp; ++m) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = WarpSum(products[m][r]);
        if (lane == 0 && mix + m < sums) own_sums[r * sums + mix + m] = sum;
      }
    }
  }

  static __device__ __forceinline__ float AddProduct(float sum, const Vector<float, 4>& a, const Vector<float, 4>& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += a.values[i] * b.values[i];
    return sum;
  }

  // Zeros where there is no row, and up to a whole number of vectors.
  static __device__ __forceinline__ void LoadTile(const Params& params, const int64_t (&rows)[kRows], int64_t stream,
                                                  int64_t channel, int count, float* tile) {
    const int vectors = (count + kWidth - 1) / kWidth;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
        Vector<float, kWidth> x = {};
        if (rows[r] >= 0) {
          x = params.streams.template Load<kWidth>(
              rows[r] * params.row_stride + stream * params.stream_stride + channel + v * kWidth, count - v * kWidth);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) tile[r * kTile + v * kWidth + i] = x.values[i];
      }
    }
  }

  // What the mix stands for: an input weight, a post weight, or the argument of Sinkhorn's exponential.
  static __device__ __forceinline__ float Coefficient(const Weights& weights, const Params& params, float m, int mix) {
    const int streams = static_cast<int>(weights.streams);
    const int kind = mix < streams ? 0 : mix < 2 * streams ? 1 : 2;
    const float x = m * weights.scale.Load(kind) + weights.base.Load(mix);
    return kind == 0 ? Sigmoid(x) + params.hc_eps : kind == 1 ? 2.0f * Sigmoid(x) : x;
  }

  // This block's channels of out = sum_a in_a X_a.
  static __device__ __forceinline__ void MixPart(const Weights& weights, const Params& params,
                                                 const int64_t (&rows)[kRows], int64_t first_row,
                                                 const float* coefficients, int sums) {
    const int64_t begin = Rank() * weights.part, end = min(begin + weights.part, weights.channels);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (rows[r] < 0) continue;
      for (int64_t channel = begin + threadIdx.x * kWidth; channel < end; channel += kThreads * kWidth) {
        Vector<float, kWidth> out = {};
#pragma unroll 4
        for (int64_t stream = 0; stream < weights.streams; ++stream) {
          const float in = coefficients[r * sums + stream];
          const Vector<float, kWidth> x = params.streams.template Load<kWidth>(
              rows[r] * params.row_stride + stream * params.stream_stride + channel, end - channel);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) out.values[i] += in * x.values[i];
        }
        params.out.template Store<kWidth>((first_row + r) * params.out_stride + channel, out, end - channel);
      }
    }
  }

  // post and comb of a row, by one warp. `coefficients` is of this row.
  static __device__ __forceinline__ void StoreMixing(const Weights& weights, const Params& params, int64_t row,
                                                     float* coefficients, int lane) {
    if (row >= params.rows) return;
    const int streams = static_cast<int>(weights.streams);
    for (int a = lane; a < streams; a += kWarpThreads) {
      params.post[row * params.post_stride + a] = coefficients[streams + a];
    }
    float* const c = coefficients + 2 * streams;
    if (streams == 4) {
      const float value = Sinkhorn4(c[lane % 16], params.sinkhorn_iters, params.hc_eps);
      if (lane < 16) params.comb[row * params.comb_row_stride + lane / 4 * params.comb_stride + lane % 4] = value;
      return;
    }
    Sinkhorn(c, streams, params.sinkhorn_iters, params.hc_eps, lane);
    for (int i = lane; i < streams * streams; i += kWarpThreads) {
      params.comb[row * params.comb_row_stride + i / streams * params.comb_stride + i % streams] = c[i];
    }
  }

  // Lane 4a + b has C[a][b], and lanes 16 to 31 the same again. Sums over b cross lanes 1 and 2, over a 4 and 8.
  static __device__ __forceinline__ float Sinkhorn4(float c, int64_t iterations, float eps) {
    c = expf(c - fmaxf(fmaxf(c, __shfl_xor_sync(kFullWarp, c, 1)), WarpMaxOfPair(c)));
    c = c / SumOver<1>(c) + eps;
    c /= SumOver<4>(c) + eps;
    for (int64_t iteration = 1; iteration < iterations; ++iteration) {
      c /= SumOver<1>(c) + eps;
      c /= SumOver<4>(c) + eps;
    }
    return c;
  }
  static __device__ __forceinline__ float WarpMaxOfPair(float c) {
    const float other = __shfl_xor_sync(kFullWarp, c, 2);
    return fmaxf(other, __shfl_xor_sync(kFullWarp, other, 1));
  }
  // Over the four lanes kStep apart.
  template <int kStep>
  static __device__ __forceinline__ float SumOver(float c) {
    c += __shfl_xor_sync(kFullWarp, c, kStep);
    return c + __shfl_xor_sync(kFullWarp, c, 2 * kStep);
  }

  // In place, in shared memory, a lane a row or a column.
  static __device__ __forceinline__ void Sinkhorn(float* c, int streams, int64_t iterations, float eps, int lane) {
    for (int a = lane; a < streams; a += kWarpThreads) {
      float* const row = c + a * streams;
      float largest = row[0];
      for (int b = 1; b < streams; ++b) largest = fmaxf(largest, row[b]);
      float sum = 0.0f;
      for (int b = 0; b < streams; ++b) sum += row[b] = expf(row[b] - largest);
      for (int b = 0; b < streams; ++b) row[b] = row[b] / sum + eps;
    }
    __syncwarp();
    for (int64_t iteration = 0; iteration < iterations; ++iteration) {
      if (iteration > 0) {
        for (int a = lane; a < streams; a += kWarpThreads) Normalize(c + a * streams, streams, 1, eps);
        __syncwarp();
      }
      for (int b = lane; b < streams; b += kWarpThreads) Normalize(c + b, streams, streams, eps);
      __syncwarp();
    }
  }
  static __device__ __forceinline__ void Normalize(float* values, int count, int stride, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) sum += values[i * stride];
    for (int i = 0; i < count; ++i) values[i * stride] /= sum + eps;
  }
};

// post: a thread has some channels of all streams of a row.
template <class Access>
struct PostKernelParams {
  typename Access::Data streams;
  int64_t row_stride, stream_stride;
  typename Access::Data y;
  int64_t y_stride;
  const float* post;
  int64_t post_stride;
  const float* comb;
  int64_t comb_row_stride, comb_stride;
  typename Access::Data out;
  int64_t out_row_stride, out_stream_stride;
  int64_t count, channels;  // streams of a row, channels of a stream
};

constexpr int kMostHeldStreams = 4;

// Few streams, in registers.
template <class Access>
struct UpdateStreams {
  static constexpr char kName[] = "mhc_post";
  static constexpr int kThreads = 128;
  static constexpr int kChannels = kThreads * kWidth;  // of a block
  using Floats = Vector<float, kWidth>;

  struct Weights {};
  using Params = PostKernelParams<Access>;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    const int64_t row = blockIdx.x, channel = int64_t{blockIdx.y} * kChannels + threadIdx.x * kWidth;
    const int64_t left = params.channels - channel;
    if (left <= 0) return;
    const Floats y = params.y.template Load<kWidth>(row * params.y_stride + channel, left);
    Floats x[kMostHeldStreams] = {};
#pragma unroll
    for (int a = 0; a < kMostHeldStreams; ++a) {
      if (a < params.count) {
        x[a] = params.streams.template Load<kWidth>(row * params.row_stride + a * params.stream_stride + channel, left);
      }
    }
#pragma unroll
    for (int b = 0; b < kMostHeldStreams; ++b) {
      if (b >= params.count) continue;
      const float post = params.post[row * params.post_stride + b];
      Floats sum;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum.values[i] = post * y.values[i];
#pragma unroll
      for (int a = 0; a < kMostHeldStreams; ++a) {
        if (a >= params.count) continue;
        const float c = params.comb[row * params.comb_row_stride + a * params.comb_stride + b];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum.values[i] += c * x[a].values[i];
      }
      params.out.template Store<kWidth>(row * params.out_row_stride + b * params.out_stream_stride + channel, sum, left);
    }
  }
};

// Any number of streams: a thread keeps one channel of each in shared memory, since out may be the same as the streams.
struct UpdateManyStreams {
  static constexpr char kName[] = "mhc_post";
  static constexpr int kThreads = 128;
  struct Weights {};
  using Params = PostKernelParams<AnyAccess>;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    extern __shared__ float post_shared[];
    const int64_t row = blockIdx.x, channel = int64_t{blockIdx.y} * kThreads + threadIdx.x;
    if (channel >= params.channels) return;
    float* const x = post_shared + threadIdx.x;
    for (int64_t a = 0; a < params.count; ++a) {
      x[a * kThreads] = params.streams.LoadOne(row * params.row_stride + a * params.stream_stride + channel);
    }
    const float y = params.y.LoadOne(row * params.y_stride + channel);
    for (int64_t b = 0; b < params.count; ++b) {
      float sum = params.post[row * params.post_stride + b] * y;
      for (int64_t a = 0; a < params.count; ++a) {
        sum += params.comb[row * params.comb_row_stride + a * params.comb_stride + b] * x[a * kThreads];
      }
      params.out.StoreOne(row * params.out_row_stride + b * params.out_stream_stride + channel, sum);
    }
  }
};

constexpr int64_t kMostStreams = 32;

absl::Status CheckStreamCount(int64_t streams) {
  if (streams <= kMostStreams) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("streams: expected at most ", kMostStreams, " streams of a row on cuda, got ", streams));
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What pre and head ask for beyond the tensors that both have.
struct MixRequest {
  const int32_t* chosen = nullptr;
  float rms_eps, hc_eps;
  TensorView post, comb;  // empty: head
  int64_t sinkhorn_iters = 0;
};

absl::Status LaunchMix(Stream& stream, const TensorView& streams, const WeightView& fn, const WeightView& scale,
                       const WeightView& base, const TensorView& out, const MixRequest& request) {
  const int64_t count = streams.extents[1], channels = streams.extents[2];
  DSV4_RETURN_IF_ERROR(CheckStreamCount(count));
  const auto launch = [&](auto access) {
    using Access = decltype(access);
    using Kernel = MixStreams<Access>;
    const typename Kernel::Weights weights = {.fn = Kernel::Fn::Make(fn, 4),
                                              .scale = WeightPointer<float>(scale),
                                              .base = WeightPointer<float>(base),
                                              .fn_stride = fn.stride(0),
                                              .mixes = fn.extent(0),
                                              .streams = count,
                                              .channels = channels,
                                              .part = CeilDiv(CeilDiv(channels, Kernel::kCluster), kWidth) * kWidth};
    typename Kernel::Params params = {};
    params.streams = Access::Data::Make(streams, kWidth);
    params.row_stride = streams.strides[0];
    params.stream_stride = streams.strides[1];
    params.rows = out.extents[0];
    params.chosen = request.chosen;
    params.rms_eps = request.rms_eps;
    params.hc_eps = request.hc_eps;
    params.out = Access::Data::Make(out, kWidth);
    params.out_stride = out.strides[0];
    if (!request.post.empty()) {
      params.post = request.post.template As<float>();
      params.post_stride = request.post.strides[0];
      params.comb = request.comb.template As<float>();
      params.comb_row_stride = request.comb.strides[0];
      params.comb_stride = request.comb.strides[1];
      params.sinkhorn_iters = request.sinkhorn_iters;
    }
    return Launch<Kernel>(
        stream, {.x = CeilDiv(params.rows, Kernel::kRows) * Kernel::kCluster, .cluster = Kernel::kCluster}, weights,
        params, Kernel::SharedFloats(weights.mixes) * static_cast<int64_t>(sizeof(float)));
  };
  // fn's rows are read from the start of each stream on.
  if (!AllowsVectors(fn.view(), 4)) return launch(AnyAccess());
  return DispatchAccess({streams, out}, {}, kWidth, launch);
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const PreParams& params) {
  return LaunchMix(stream, params.streams, params.fn, params.scale, params.base, params.out,
                   {.rms_eps = params.rms_eps,
                    .hc_eps = params.hc_eps,
                    .post = params.post,
                    .comb = params.comb,
                    .sinkhorn_iters = params.sinkhorn_iters});
}

absl::Status RecordCuda(Stream& stream, const HeadParams& params) {
  return LaunchMix(stream, params.streams, params.fn, params.scale, params.base, params.out,
                   {.chosen = params.rows.empty() ? nullptr : params.rows.As<int32_t>(),
                    .rms_eps = params.rms_eps,
                    .hc_eps = params.hc_eps});
}

absl::Status RecordCuda(Stream& stream, const PostParams& params) {
  const int64_t rows = params.streams.extents[0], count = params.streams.extents[1];
  const int64_t channels = params.streams.extents[2];
  DSV4_RETURN_IF_ERROR(CheckStreamCount(count));
  const auto make_params = [&](auto access) -> PostKernelParams<decltype(access)> {
    using Data = typename decltype(access)::Data;
    return {.streams = Data::Make(params.streams, kWidth),
            .row_stride = params.streams.strides[0],
            .stream_stride = params.streams.strides[1],
            .y = Data::Make(params.y, kWidth),
            .y_stride = params.y.strides[0],
            .post = params.post.As<float>(),
            .post_stride = params.post.strides[0],
            .comb = params.comb.As<float>(),
            .comb_row_stride = params.comb.strides[0],
            .comb_stride = params.comb.strides[1],
            .out = Data::Make(params.out, kWidth),
            .out_row_stride = params.out.strides[0],
            .out_stream_stride = params.out.strides[1],
            .count = count,
            .channels = channels};
  };
  if (count > kMostHeldStreams) {
    return Launch<UpdateManyStreams>(stream, {.x = rows, .y = CeilDiv(channels, UpdateManyStreams::kThreads)}, {},
                                     make_params(AnyAccess()),
                                     count * UpdateManyStreams::kThreads * static_cast<int64_t>(sizeof(float)));
  }
  return DispatchAccess({params.streams, params.y, params.out}, {}, kWidth, [&](auto access) {
    using Kernel = UpdateStreams<decltype(access)>;
    return Launch<Kernel>(stream, {.x = rows, .y = CeilDiv(channels, Kernel::kChannels)}, {}, make_params(access));
  });
}

}  // namespace dsv4::mhc
