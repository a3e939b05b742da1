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
// own channels.
template <class Access>
struct MixStreams {
  static constexpr char kName[] = "mhc";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kCluster = 8;
  static constexpr int kRows = 4;                             // of a cluster
  static constexpr int kThreadsPerRow = kThreads / kRows;     // where a thread deals with one row
  static constexpr int kMixesPerWarp = 3;                     // at a time: the 24 of four streams in one pass
  static constexpr int kMixesAtOnce = kWarps * kMixesPerWarp;
  static constexpr int kTile = 1024;                          // consecutive channels of a stream
  static constexpr int kTiles = 4;                            // in shared memory at a time
  static constexpr int kSteps = 4;                            // of a warp's loads of fn in flight, per mix
  static constexpr int kStepChannels = kWarpThreads * 4;
  static_assert(kSteps * kStepChannels == kThreadsPerRow * kWidth && kTile % (kThreadsPerRow * kWidth) == 0);

  // fn is f32: wide accesses where the streams allow them.
  static constexpr bool kWideFn = !std::is_same_v<Access, AnyAccess>;
  using Fn = std::conditional_t<kWideFn, VectorWeight<float>, FloatWeight>;

  struct Weights {
    Fn fn;
    WeightPointer<float> scale, base;
    int64_t fn_stride;
    int32_t mixes, streams;
    int64_t channels;
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

  // Floats of dynamic shared memory: the tiles, and for each row of the cluster a sum a mix and one of squares, of this
  // block, of all blocks, and in total.
  static int64_t SharedFloats(int64_t mixes) { return kTiles * kRows * kTile + (kCluster + 2) * kRows * (mixes + 1); }

  static __device__ __forceinline__ int Rank() { return static_cast<int>(blockIdx.x % kCluster); }
  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % kWarpThreads); }
  static __device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x / kWarpThreads); }

  // The channels of this block: end <= begin if there are none.
  struct Range {
    int64_t begin, end;
  };
  static __device__ __forceinline__ Range Part(const Weights& weights) {
    const int64_t begin = Rank() * weights.part;
    return {begin, min(begin + weights.part, weights.channels)};
  }

  // One cluster brings `fn` into L2.
  static __device__ __forceinline__ void Prefetch(const Weights& weights) {
    if (blockIdx.x >= kCluster) return;
    constexpr int kLine = 32;
    const Range part = Part(weights);
    for (int mix = Warp(); mix < weights.mixes; mix += kWarps) {
      for (int stream = 0; stream < weights.streams; ++stream) {
        for (int64_t channel = part.begin + Lane() * kLine; channel < part.end; channel += kWarpThreads * kLine) {
          weights.fn.PrefetchToL2(mix * weights.fn_stride + stream * weights.channels + channel);
        }
      }
    }
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    extern __shared__ __align__(16) float mix_shared[];
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const int thread = static_cast<int>(threadIdx.x);
    const int sums = weights.mixes + 1;                   // the last is that of the squares
    float* const tiles = mix_shared;                      // [kTiles][kRows][kTile]
    float* const own = tiles + kTiles * kRows * kTile;    // [kRows][sums]
    float* const all = own + kRows * sums;                // [kCluster][kRows][sums]
    float* const total = all + kCluster * kRows * sums;   // [kRows][sums]

    // This thread's row where it deals with one; negative: none.
    const int64_t out_row = int64_t{blockIdx.x} / kCluster * kRows + thread / kThreadsPerRow;
    int64_t row = -1;
    if (out_row < params.rows) row = params.chosen == nullptr ? out_row : params.chosen[out_row];

#pragma unroll 1
    for (int first_mix = 0; first_mix < weights.mixes; first_mix += kMixesAtOnce) {
      MultiplyPart(weights, params, row, first_mix, tiles, own);
    }
    // Another block's shared memory may be written once that block has started; also a barrier of this block.
    cluster.sync();
#pragma unroll 1
    for (int i = thread; i < kCluster * kRows * sums; i += kThreads) {
      const int to = i / (kRows * sums), from = i % (kRows * sums);
      *cluster.map_shared_rank(&all[Rank() * kRows * sums + from], to) = own[from];
    }
    cluster.sync();
    for (int i = thread; i < kRows * sums; i += kThreads) {
      float sum = all[i];
#pragma unroll
      for (int rank = 1; rank < kCluster; ++rank) sum += all[rank * kRows * sums + i];
      total[i] = sum;
    }
    __syncthreads();
    float* const coefficients = all;  // [kRows][sums]; what it held is in `total`
    const float size = static_cast<float>(weights.streams * weights.channels);
#pragma unroll 1
    for (int i = thread; i < kRows * sums; i += kThreads) {
      const int mix = i % sums;
      if (mix == sums - 1) continue;
      const float factor = 1.0f / sqrtf(total[i - mix + sums - 1] / size + params.rms_eps);
      coefficients[i] = Coefficient(weights, params, total[i] * factor, mix);
    }
    __syncthreads();

    if (row >= 0) MixPart(weights, params, row, out_row, coefficients + thread / kThreadsPerRow * sums);
    if (params.post != nullptr && Rank() == 0) StoreMixing(weights, params, coefficients, sums);
  }

 private:
  struct TilePlace {
    int stream;
    int64_t channel;
    int count;  // channels; 0: no such tile
  };
  static __device__ __forceinline__ TilePlace PlaceOf(const Weights& weights, const Range& part, int tile) {
    const int tiles_of_stream = static_cast<int>((part.end - part.begin + kTile - 1) / kTile);
    const int stream = tiles_of_stream > 0 ? tile / tiles_of_stream : weights.streams;
    if (stream >= weights.streams) return {0, 0, 0};
    const int64_t channel = part.begin + int64_t{tile % tiles_of_stream} * kTile;
    return {stream, channel, static_cast<int>(min(int64_t{kTile}, part.end - channel))};
  }

  // own[r][m] of kMixesPerWarp mixes a warp, from first_mix on; and, in the first pass, of the squares.
  static __device__ __forceinline__ void MultiplyPart(const Weights& weights, const Params& params, int64_t row,
                                                      int first_mix, float* tiles, float* own) {
    __shared__ float square_sums[kWarps];
    const int sums = weights.mixes + 1, mix = first_mix + Warp() * kMixesPerWarp;
    int64_t fn_rows[kMixesPerWarp];
#pragma unroll
    for (int m = 0; m < kMixesPerWarp; ++m) fn_rows[m] = min(mix + m, weights.mixes - 1) * weights.fn_stride;
    float products[kMixesPerWarp][kRows] = {};
    float square_sum = 0.0f;
    const Range part = Part(weights);
#pragma unroll 1
    for (int first = 0; PlaceOf(weights, part, first).count > 0; first += kTiles) {
      __syncthreads();  // the last tiles have been read
      square_sum += LoadTiles(weights, params, row, part, first, tiles);
      __syncthreads();
#pragma unroll 1
      for (int t = 0; t < kTiles; ++t) {
        MultiplyTile(weights, PlaceOf(weights, part, first + t), fn_rows, tiles + t * kRows * kTile, products);
      }
    }
#pragma unroll
    for (int m = 0; m < kMixesPerWarp; ++m) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float sum = WarpSum(products[m][r]);
        if (Lane() == 0 && mix + m < weights.mixes) own[r * sums + mix + m] = sum;
      }
    }
    if (first_mix > 0) return;
    square_sum = WarpSum(square_sum);
    if (Lane() == 0) square_sums[Warp()] = square_sum;
    __syncthreads();
    if (threadIdx.x < kRows) {
      constexpr int kWarpsPerRow = kWarps / kRows;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarpsPerRow; ++w) sum += square_sums[threadIdx.x * kWarpsPerRow + w];
      own[threadIdx.x * sums + sums - 1] = sum;
    }
  }

  // Brings kTiles tiles of all rows into shared memory, with zeros where there is no row and up to a whole number of
  // steps. Returns the sum of this thread's squares, which are of one row.
  static __device__ __forceinline__ float LoadTiles(const Weights& weights, const Params& params, int64_t row,
                                                    const Range& part, int first, float* tiles) {
    const int vector = static_cast<int>(threadIdx.x % kThreadsPerRow) * kWidth;
    float* const destination = tiles + threadIdx.x / kThreadsPerRow * kTile + vector;
    float square_sum = 0.0f;
#pragma unroll 1
    for (int64_t begin = 0; begin < min(int64_t{kTile}, part.end - part.begin); begin += kThreadsPerRow * kWidth) {
      typename Access::Data::template Stored<kWidth> stored[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const TilePlace place = PlaceOf(weights, part, first + t);
        const int64_t count = place.count - begin - vector;
        stored[t] = {};
        if (row >= 0 && count > 0) {
          stored[t] = params.streams.template LoadStored<kWidth>(
              row * params.row_stride + place.stream * params.stream_stride + place.channel + begin + vector, count);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const Vector<float, kWidth> x = ToFloats(stored[t]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) square_sum += x.values[i] * x.values[i];
#pragma unroll
        for (int half = 0; half < kWidth; half += 4) {
          StoreVector(destination + t * kRows * kTile + begin + half,
                      Vector<float, 4>{x.values[half], x.values[half + 1], x.values[half + 2], x.values[half + 3]});
        }
      }
    }
    return square_sum;
  }

  static __device__ __forceinline__ void MultiplyTile(const Weights& weights, const TilePlace& place,
                                                      const int64_t (&fn_rows)[kMixesPerWarp], const float* tile,
                                                      float (&products)[kMixesPerWarp][kRows]) {
    const int64_t fn = place.stream * weights.channels + place.channel;
#pragma unroll 1
    for (int begin = 0; begin < place.count; begin += kSteps * kStepChannels) {
      // All loads before the first use, and no branch among them: past the end they read what meets zeros.
      Vector<float, 4> w[kSteps][kMixesPerWarp];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k = begin + step * kStepChannels + Lane() * 4;
#pragma unroll
        for (int m = 0; m < kMixesPerWarp; ++m) {
          if constexpr (kWideFn) {
            w[step][m] = weights.fn.template Load<4>(fn_rows[m] + fn + min(k, place.count - 4));
          } else {
            w[step][m] = weights.fn.template Load<4>(fn_rows[m] + fn + k, place.count - k);
          }
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k = begin + step * kStepChannels + Lane() * 4;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Vector<float, 4> x = LoadVector<float, 4>(tile + r * kTile + k);
#pragma unroll
          for (int m = 0; m < kMixesPerWarp; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) products[m][r] += w[step][m].values[i] * x.values[i];
          }
        }
      }
    }
  }

  // What the mix stands for: an input weight, a post weight, or the argument of Sinkhorn's exponential.
  static __device__ __forceinline__ float Coefficient(const Weights& weights, const Params& params, float m, int mix) {
    const int kind = mix < weights.streams ? 0 : mix < 2 * weights.streams ? 1 : 2;
    const float x = m * weights.scale.Load(kind) + weights.base.Load(mix);
    return kind == 0 ? Sigmoid(x) + params.hc_eps : kind == 1 ? 2.0f * Sigmoid(x) : x;
  }

  // This block's channels of out = sum_a in_a X_a, of the thread's row.
  static __device__ __forceinline__ void MixPart(const Weights& weights, const Params& params, int64_t row,
                                                 int64_t out_row, const float* coefficients) {
    const Range part = Part(weights);
#pragma unroll 1
    for (int64_t channel = part.begin + threadIdx.x % kThreadsPerRow * kWidth; channel < part.end;
         channel += kThreadsPerRow * kWidth) {
      const int64_t count = part.end - channel;
      Vector<float, kWidth> out = {};
#pragma unroll 1
      for (int first = 0; first < weights.streams; first += kTiles) {
        typename Access::Data::template Stored<kWidth> stored[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          stored[t] = {};
          if (first + t < weights.streams) {
            stored[t] = params.streams.template LoadStored<kWidth>(
                row * params.row_stride + (first + t) * params.stream_stride + channel, count);
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (first + t >= weights.streams) continue;
          const float in = coefficients[first + t];
          const Vector<float, kWidth> x = ToFloats(stored[t]);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) out.values[i] += in * x.values[i];
        }
      }
      params.out.template Store<kWidth>(out_row * params.out_stride + channel, out, count);
    }
  }

  // post and comb of the cluster's rows, by the first block.
  static __device__ __forceinline__ void StoreMixing(const Weights& weights, const Params& params, float* coefficients,
                                                     int sums) {
    const int64_t first_row = int64_t{blockIdx.x} / kCluster * kRows;
    const int streams = weights.streams;
    if (Warp() >= kRows || first_row + Warp() >= params.rows) return;
    const int64_t row = first_row + Warp();
    float* const own = coefficients + Warp() * sums;
    for (int a = Lane(); a < streams; a += kWarpThreads) params.post[row * params.post_stride + a] = own[streams + a];
    float* const c = own + 2 * streams;
    if (streams == 4) {
      if (Lane() == 0) Sinkhorn4(c, params.sinkhorn_iters, params.hc_eps);
      __syncwarp();
    } else {
      Sinkhorn(c, streams, params.sinkhorn_iters, params.hc_eps);
    }
    for (int i = Lane(); i < streams * streams; i += kWarpThreads) {
      params.comb[row * params.comb_row_stride + i / streams * params.comb_stride + i % streams] = c[i];
    }
  }

  // In place, by one thread in registers: a chain of some forty dependent steps, which no exchange between lanes makes
  // shorter. Multiplies by reciprocals, each right to the last bit but one.
  static __device__ __forceinline__ void Sinkhorn4(float* values, int64_t iterations, float eps) {
    float c[4][4];
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) c[a][b] = values[4 * a + b];
      const float largest = fmaxf(fmaxf(c[a][0], c[a][1]), fmaxf(c[a][2], c[a][3]));
#pragma unroll
      for (int b = 0; b < 4; ++b) c[a][b] = expf(c[a][b] - largest);
      const float inverse = 1.0f / ((c[a][0] + c[a][1]) + (c[a][2] + c[a][3]));
#pragma unroll
      for (int b = 0; b < 4; ++b) c[a][b] = c[a][b] * inverse + eps;
    }
    NormalizeColumns4(c, eps);
#pragma unroll 1
    for (int64_t iteration = 1; iteration < iterations; ++iteration) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float inverse = __fdividef(1.0f, (c[a][0] + c[a][1]) + (c[a][2] + c[a][3]) + eps);
#pragma unroll
        for (int b = 0; b < 4; ++b) c[a][b] *= inverse;
      }
      NormalizeColumns4(c, eps);
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) values[4 * a + b] = c[a][b];
    }
  }
  static __device__ __forceinline__ void NormalizeColumns4(float (&c)[4][4], float eps) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float inverse = __fdividef(1.0f, (c[0][b] + c[1][b]) + (c[2][b] + c[3][b]) + eps);
#pragma unroll
      for (int a = 0; a < 4; ++a) c[a][b] *= inverse;
    }
  }

  // In place in shared memory, by a warp: a lane a row or a column.
  static __device__ __forceinline__ void Sinkhorn(float* c, int streams, int64_t iterations, float eps) {
#pragma unroll 1
    for (int a = Lane(); a < streams; a += kWarpThreads) {
      float* const row = c + a * streams;
      float largest = row[0];
#pragma unroll 1
      for (int b = 1; b < streams; ++b) largest = fmaxf(largest, row[b]);
      float sum = 0.0f;
#pragma unroll 1
      for (int b = 0; b < streams; ++b) sum += row[b] = expf(row[b] - largest);
#pragma unroll 1
      for (int b = 0; b < streams; ++b) row[b] = row[b] / sum + eps;
    }
    __syncwarp();
#pragma unroll 1
    for (int64_t iteration = 0; iteration < iterations; ++iteration) {
      if (iteration > 0) {
#pragma unroll 1
        for (int a = Lane(); a < streams; a += kWarpThreads) Normalize(c + a * streams, streams, 1, eps);
        __syncwarp();
      }
#pragma unroll 1
      for (int b = Lane(); b < streams; b += kWarpThreads) Normalize(c + b, streams, streams, eps);
      __syncwarp();
    }
  }
  static __device__ __forceinline__ void Normalize(float* values, int count, int stride, float eps) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) sum += values[i * stride];
#pragma unroll 1
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
    const auto stored_y = params.y.template LoadStored<kWidth>(row * params.y_stride + channel, left);
    typename Access::Data::template Stored<kWidth> stored[kMostHeldStreams] = {};
#pragma unroll
    for (int a = 0; a < kMostHeldStreams; ++a) {
      if (a < params.count) {
        stored[a] = params.streams.template LoadStored<kWidth>(
            row * params.row_stride + a * params.stream_stride + channel, left);
      }
    }
    const Floats y = ToFloats(stored_y);
    Floats x[kMostHeldStreams];
#pragma unroll
    for (int a = 0; a < kMostHeldStreams; ++a) x[a] = ToFloats(stored[a]);
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
  // fn's rows are read from the start of each stream on.
  const WeightView fn_by_stream(TensorView{.data = fn.view().data,
                                           .dtype = fn.dtype(),
                                           .rank = 3,
                                           .extents = {fn.extent(0), count, channels},
                                           .strides = {fn.stride(0), channels, 1}});
  const auto launch = [&](auto access) {
    using Access = decltype(access);
    using Kernel = MixStreams<Access>;
    const typename Kernel::Weights weights = {.fn = Kernel::Fn::Make(fn_by_stream, 4),
                                              .scale = WeightPointer<float>(scale),
                                              .base = WeightPointer<float>(base),
                                              .fn_stride = fn.stride(0),
                                              .mixes = static_cast<int32_t>(fn.extent(0)),
                                              .streams = static_cast<int32_t>(count),
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
  if (!AllowsVectors(fn_by_stream.view(), 4)) return launch(AnyAccess());
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
