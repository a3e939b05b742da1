// Attention on the tensor cores: bf16 q, rows of 512 channels in fp8 pages with 64 rotary channels or in bf16 pages.
//
// A block takes up to 64 heads of one query row and one split of its list, 64 listed rows at a time:
//   1. each four threads bring a cached row's bytes to shared memory (a tile ahead, while the tensor cores work), and
//      convert them to bf16 there, once for all heads;
//   2. scores[64 heads][64 rows] = q . keys: eight warps, each 32 heads x 32 rows x half of the channels;
//   3. softmax, four threads a head; the weights go to shared memory in bf16;
//   4. out[64 heads][512] += weights . keys: each warp 64 channels, in registers.
// Keys lie in shared memory as eight chunks of 64 channels, each a matrix of 64 rows of 128 bytes, swizzled: the rows of
// the second operand in step 2, the columns of the second operand in step 4. Heads past the last are zero.
#ifndef DSV4_OPS_SPARSE_ATTENTION_ATTEND_TENSOR_CORES_CUH_
#define DSV4_OPS_SPARSE_ATTENTION_ATTEND_TENSOR_CORES_CUH_

#include <cstdint>

#include "ops/sparse_attention/attend.cuh"
#include "runtime/async_copy.cuh"
#include "runtime/launch.cuh"
#include "runtime/packed_convert.cuh"
#include "runtime/shared_memory.cuh"
#include "runtime/tensor_core.cuh"
#include "runtime/vector_access.cuh"

namespace dsv4::sparse_attention {

// Grid: x = row * splits + split, y = group of kHeads heads.
template <RowFormat kFormat>
struct AttendTensorCores {
  static_assert(kFormat == RowFormat::kFp8 || kFormat == RowFormat::kBf16);
  static constexpr char kName[] = "sparse_attention";
  static constexpr int kThreads = 256;
  using Weights = SinkWeights;
  using Params = AttendParams;

  static constexpr int kHeads = kHeadsPerBlock;
  static constexpr int kChannels = 512;
  static constexpr int kRotary = 64;                             // of the fp8 format
  static constexpr int kChunks = kChannels / 64;
  static constexpr int kUnit = 16;                               // bytes of an access
  static constexpr int kUnitsPerLine = 8;                        // of a swizzled line of 64 bf16
  static constexpr int kRowBytes = kFormat == RowFormat::kFp8 ? kChannels - kRotary + 2 * kRotary : 2 * kChannels;
  static constexpr int kThreadsPerRow = 4;                       // and per head, in the softmax
  static constexpr int kUnitsPerThread = kRowBytes / kUnit / kThreadsPerRow;
  static constexpr int kFp8UnitsPerThread = (kChannels - kRotary) / kUnit / kThreadsPerRow;  // one a group of 64
  // So that the eight threads of two rows meet different banks.
  static constexpr int kRawStride = kFormat == RowFormat::kFp8 ? kRowBytes : kRowBytes + 64;
  static constexpr int kScoreStride = kTileRows + 8;             // likewise
  static_assert(kThreads == kThreadsPerRow * kTileRows && kThreads == kThreadsPerRow * kHeads);

  struct alignas(1024) Shared {
    uint8_t q[kChunks][kHeads][128];
    uint8_t keys[kChunks][kTileRows][128];
    uint8_t weights[kHeads][128];
    uint8_t raw[kTileRows][kRawStride];
    float scores[kHeads][kScoreStride];
    float factors[kHeads];
    uint8_t is_valid[kTileRows];
  };

  static __device__ __forceinline__ void Prefetch(const Weights& weights) { weights.sink.PrefetchToL2(0); }

  // A thread's part of a cached row on its way.
  struct Incoming {
    bool is_valid = false;
    uint2 scales = {0, 0};
  };

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t row = blockIdx.x / params.splits;
    const int32_t split = static_cast<int32_t>(blockIdx.x - row * params.splits);
    const RowList list = ListOf(params, row);
    const int32_t begin = split * list.split_length;
    const int32_t end = min(begin + list.split_length, list.listed);
    const int first_head = static_cast<int>(blockIdx.y) * kHeads;
    const int heads = min(kHeads, params.heads - first_head);
    if (begin >= end && split > 0) return;  // split 0 also writes the result of an empty list

    Shared& shared = DynamicShared<Shared>();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int key_row = thread / kThreadsPerRow, quarter = thread % kThreadsPerRow;

    const auto slot_of = [&](int32_t tile) {
      const int32_t t = tile + key_row;
      return t < end ? SlotAt(params, list, row, t) : -1;
    };
    if (begin < end) LoadQuery(params, row, first_head, heads, shared);
    Incoming incoming = StartRow(params, list, begin + key_row, slot_of(begin), shared);
    CommitAsyncCopies();
    int32_t next_slot = slot_of(begin + kTileRows);

    float out[4][8][4] = {};  // [16 heads][8 channels][of the fragment], of the warp's 64 channels
    RunningSoftmax softmax;   // of head key_row, the same in its four threads, but `sum` of this thread's rows alone
    for (int32_t tile = begin; tile < end; tile += kTileRows) {
      WaitForAsyncCopies<0>();
      __syncthreads();  // the last tile's keys are no longer in use
      StoreKeys(incoming, shared);
      // A thread converts what it has brought itself, so its part of `raw` is free again.
      if (tile + kTileRows < end) {
        incoming = StartRow(params, list, tile + kTileRows + key_row, next_slot, shared);
        CommitAsyncCopies();
        next_slot = slot_of(tile + 2 * kTileRows);
      }
      __syncthreads();
      ComputeScores(warp, lane, params.scale, shared);
      __syncthreads();
      UpdateSoftmax(key_row, quarter, softmax, shared);
      __syncthreads();
      AddValues(warp, lane, out, shared);
    }

#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2) {
      softmax.sum += __shfl_xor_sync(0xffffffffu, softmax.sum, lanes);
    }
    const int head = first_head + key_row;
    const bool is_head = key_row < heads && quarter == 0;
    if (list.splits() > 1) {
      if (is_head) {
        float* const sums = params.split_sums + row * params.split_sums_row_stride +
                            split * params.split_sums_split_stride + head * params.split_sums_head_stride;
        sums[0] = softmax.maximum;
        sums[1] = softmax.sum;
      }
      float* const part = params.split_out + row * params.split_out_row_stride + split * params.split_out_split_stride +
                          first_head * params.split_out_head_stride;
      ForEachPair(warp, lane, heads, out, [&](int h, int channel, float a, float b) {
        StoreVector(part + h * params.split_out_head_stride + channel, Vector<float, 2>{a, b});
      });
      return;
    }

    __syncthreads();  // the factors of the last tile are no longer in use
    if (quarter == 0) shared.factors[key_row] = is_head ? softmax.Normaliser(weights.sink.Load(head)) : 0.0f;
    if (is_head) params.lse[row * params.lse_row_stride + head] = softmax.LogSumExp();
    __syncthreads();
    const int64_t first = row * params.out_row_stride + first_head * params.out_head_stride;
    ForEachPair(warp, lane, heads, out, [&](int h, int channel, float a, float b) {
      const Vector<float, 2> pair = {a * shared.factors[h], b * shared.factors[h]};
      const int64_t index = first + h * params.out_head_stride + channel;
      if (params.out_is_bf16) {
        StoreVector(static_cast<Bf16*>(params.out) + index, FromFloats<Bf16>(pair));
      } else {
        StoreVector(static_cast<float*>(params.out) + index, pair);
      }
    });
  }

 private:
  static __device__ __forceinline__ void LoadQuery(const Params& params, int64_t row, int first_head, int heads,
                                                   Shared& shared) {
    constexpr int kUnits = kChannels * 2 / kUnit;  // of a head
    const Bf16* const q = static_cast<const Bf16*>(params.q) + row * params.q_row_stride;
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * kUnits; i += kThreads) {
      const int head = i / kUnits, unit = i % kUnits;
      uint8_t* const target =
          shared.q[unit / kUnitsPerLine][head] + tensor_core::SwizzledByte(head, unit % kUnitsPerLine);
      if (head < heads) {
        CopyAsync<16>(target, q + (first_head + head) * params.q_head_stride + unit * (kUnit / 2), 16);
      } else {
        *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Starts to bring this thread's part of a cached row: units quarter, quarter + 4, ...
  static __device__ __forceinline__ Incoming StartRow(const Params& params, const RowList& list, int32_t t,
                                                      int32_t slot, Shared& shared) {
    Incoming incoming;
    if (slot < 0) return incoming;
    incoming.is_valid = true;
    const RowAddress at = AddressAt(params, list, t, slot);
    const int key_row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const int quarter = static_cast<int>(threadIdx.x) % kThreadsPerRow;
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      const int byte = (quarter + kThreadsPerRow * j) * kUnit;
      CopyAsync<16>(shared.raw[key_row] + byte, at.values + byte, 16);
    }
    if constexpr (kFormat == RowFormat::kFp8) incoming.scales = *reinterpret_cast<const uint2*>(at.scales);
    return incoming;
  }

  // Converts what StartRow has brought; what is invalid becomes zero.
  static __device__ __forceinline__ void StoreKeys(const Incoming& incoming, Shared& shared) {
    const int key_row = static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const int quarter = static_cast<int>(threadIdx.x) % kThreadsPerRow;
    if (quarter == 0) shared.is_valid[key_row] = incoming.is_valid;
    const auto store = [&](int chunk, int unit, const uint4& value) {
      *reinterpret_cast<uint4*>(shared.keys[chunk][key_row] + tensor_core::SwizzledByte(key_row, unit)) = value;
    };
    if (!incoming.is_valid) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        store(chunk, quarter, make_uint4(0, 0, 0, 0));
        store(chunk, quarter + kThreadsPerRow, make_uint4(0, 0, 0, 0));
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      const int unit = quarter + kThreadsPerRow * j;
      const uint4 raw = *reinterpret_cast<const uint4*>(shared.raw[key_row] + unit * kUnit);
      if (kFormat == RowFormat::kFp8 && j < kFp8UnitsPerThread) {
        // A thread's j'th unit is of the j'th group of 64 channels, which is the j'th chunk.
        const uint32_t word = j < 4 ? incoming.scales.x : incoming.scales.y;
        const ScaledE4m3 scaled((word >> 8 * (j % 4)) & 0xff);
        const TwoPairs a = scaled.ToBf16(raw.x), b = scaled.ToBf16(raw.y);
        const TwoPairs c = scaled.ToBf16(raw.z), d = scaled.ToBf16(raw.w);
        store(j, 2 * quarter, make_uint4(a.low, a.high, b.low, b.high));
        store(j, 2 * quarter + 1, make_uint4(c.low, c.high, d.low, d.high));
      } else {
        // Already bf16. In fp8 rows the rotary channels are the last chunk.
        const int bf16_unit = kFormat == RowFormat::kFp8
                                  ? (kChunks - 1) * kUnitsPerLine + unit - kFp8UnitsPerThread * kThreadsPerRow
                                  : unit;
        store(bf16_unit / kUnitsPerLine, bf16_unit % kUnitsPerLine, raw);
      }
    }
  }

  // scores = scale * q . keys. The block calls this between barriers.
  static __device__ __forceinline__ void ComputeScores(int warp, int lane, float scale, Shared& shared) {
    const int head_base = warp % 2 * 32, row_base = warp / 2 % 2 * 32, half = warp / 4;
    float scores[2][4][4] = {};  // [16 heads][8 rows][of the fragment]
#pragma unroll 1
    for (int chunk = half * (kChunks / 2); chunk < (half + 1) * (kChunks / 2); ++chunk) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {  // of 16 channels
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int head = head_base + m * 16 + lane % 16;
          tensor_core::LoadMatrices(
              a[m], shared.q[chunk][head] + tensor_core::SwizzledByte(head, 2 * step + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = row_base + n * 16 + lane / 16 * 8 + lane % 8;
          uint32_t b[4];
          tensor_core::LoadMatrices(
              b, shared.keys[chunk][key] + tensor_core::SwizzledByte(key, 2 * step + lane / 8 % 2));
          const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            tensor_core::MultiplyBf16(scores[m][2 * n], a[m], first);
            tensor_core::MultiplyBf16(scores[m][2 * n + 1], a[m], second);
          }
        }
      }
    }
    const auto for_each_pair = [&](const auto& visit) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int head = head_base + m * 16 + lane / 4, key = row_base + n * 8 + lane % 4 * 2;
          visit(&shared.scores[head][key], scores[m][n][0], scores[m][n][1]);
          visit(&shared.scores[head + 8][key], scores[m][n][2], scores[m][n][3]);
        }
      }
    };
    if (half == 1) {
      for_each_pair([&](float* p, float a, float b) { StoreVector(p, Vector<float, 2>{a, b}); });
    }
    __syncthreads();
    if (half == 0) {
      for_each_pair([&](float* p, float a, float b) {
        const Vector<float, 2> other = LoadVector<float, 2>(p);
        StoreVector(p, Vector<float, 2>{(a + other.values[0]) * scale, (b + other.values[1]) * scale});
      });
    }
  }

  static __device__ __forceinline__ void UpdateSoftmax(int head, int quarter, RunningSoftmax& softmax, Shared& shared) {
    float scores[4][4];
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = 16 * j + 4 * quarter;
      const Vector<float, 4> four = LoadVector<float, 4>(&shared.scores[head][key]);
      const uint32_t valid = *reinterpret_cast<const uint32_t*>(&shared.is_valid[key]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Selected, not multiplied: an invalid row's score may be NaN where q is.
        scores[j][i] = (valid >> 8 * i & 1) != 0 ? four.values[i] : -INFINITY;
        largest = fmaxf(largest, scores[j][i]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const float factor = softmax.Raise(largest);
    const float maximum = softmax.finite_maximum();
    if (quarter == 0) shared.factors[head] = factor;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i] = exp2f(scores[j][i] - maximum);
        softmax.sum += weights[i];
      }
      uint8_t* const line = shared.weights[head] + tensor_core::SwizzledByte(head, 2 * j + quarter / 2);
      *reinterpret_cast<uint2*>(line + quarter % 2 * 8) =
          make_uint2(PackBf16(weights[0], weights[1]), PackBf16(weights[2], weights[3]));
    }
  }

  // out = out * factors + weights . keys, of the warp's chunk of channels.
  static __device__ __forceinline__ void AddValues(int warp, int lane, float (&out)[4][8][4], const Shared& shared) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float low = shared.factors[m * 16 + lane / 4], high = shared.factors[m * 16 + 8 + lane / 4];
      if (__any_sync(0xffffffffu, low != 1.0f || high != 1.0f)) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          out[m][n][0] *= low;
          out[m][n][1] *= low;
          out[m][n][2] *= high;
          out[m][n][3] *= high;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 16 listed rows
      uint32_t a[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int head = m * 16 + lane % 16;
        tensor_core::LoadMatrices(a[m],
                                  shared.weights[head] + tensor_core::SwizzledByte(head, 2 * step + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int key = step * 16 + lane % 16;
        uint32_t b[4];
        tensor_core::LoadTransposedMatrices(
            b, shared.keys[warp][key] + tensor_core::SwizzledByte(key, 2 * n + lane / 16));
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          tensor_core::MultiplyBf16(out[m][2 * n], a[m], first);
          tensor_core::MultiplyBf16(out[m][2 * n + 1], a[m], second);
        }
      }
    }
  }

  // Calls visit(head, channel, value, value of channel + 1) for what the lane holds of the block's first `heads` heads.
  template <typename Visit>
  static __device__ __forceinline__ void ForEachPair(int warp, int lane, int heads, const float (&out)[4][8][4],
                                                     const Visit& visit) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int head = m * 16 + lane / 4;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int channel = warp * 64 + n * 8 + lane % 4 * 2;
        if (head < heads) visit(head, channel, out[m][n][0], out[m][n][1]);
        if (head + 8 < heads) visit(head + 8, channel, out[m][n][2], out[m][n][3]);
      }
    }
  }
};

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_ATTEND_TENSOR_CORES_CUH_
