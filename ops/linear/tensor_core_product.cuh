// The matrix product on tensor cores, for few rows: it streams the weights once, and is bound by their bytes.
//
// A block computes up to 4 tiles of 16 output channels for up to 32 rows. The input channels are cut into blocks of 128
// and these into eight runs, one for each of its warps. A warp has a ring of stages in shared memory, which no other
// warp touches: a stage is one block of 128 input channels, of the weights' tiles and of the rows, as they are stored.
// It is filled by asynchronous copies, for the first stages' weights before the wait. From there the warp takes the
// operands into registers, quantises and dequantises them, and multiplies with the weights as the operand of 16 rows
// and the activations as that of 8 columns. At the end the warps' sums are added in the order of the runs.
//
// So for each pair of a row and an output channel the sequence of operations depends on the weight's shape and type
// alone: not on the number of rows, not on how many tiles a block has, and not on the ring's depth.
//
// Arithmetic: products of a block of 128 (of 32, where each weight row has a scale for 32 columns) are summed by the
// tensor core in fp32, beginning from zero. The sum is multiplied by the product of the scales and added in fp32.
// Quantised operands are held as the f16 values of their codes, others as bf16; both are exact.
#ifndef DSV4_OPS_LINEAR_TENSOR_CORE_PRODUCT_CUH_
#define DSV4_OPS_LINEAR_TENSOR_CORE_PRODUCT_CUH_

#include <algorithm>
#include <cstdint>

#include "ops/linear/product_kernel.cuh"
#include "ops/linear/tensor_core.cuh"
#include "runtime/async_copy.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/block_scale.h"
#include "runtime/launch.cuh"

namespace dsv4::tensor_core_product {

// Lane 4g + t of a warp works on rows g and g + 8 of a tile of weights and on row g of eight rows of x. Of each 32 of
// the 128 input channels it holds the eight from 8t on, as four pairs. This is where they lie in shared memory: rows
// follow each other, and 16-byte pieces change places within a row so that no two lanes of an access meet in a bank.
//
// A weight type says
//   kRowBytes          of 128 input channels
//   Piece(piece, row)  where a 16-byte piece of a row goes
//   LoadPairs          the eight channels of block `b` of 32 as pairs of bf16, or of f16 where kF16
//   kPairsApart        whether the pairs are channels (i, i + 4) instead of (2i, 2i + 1)
//   kScalesPerTile, kScalesPerRow   a scale for the whole block, or one for each row and 32 channels
struct Bf16Weight {
  static constexpr DType kDType = DType::kBf16;
  static constexpr bool kF16 = false;
  static constexpr bool kPairsApart = false;
  static constexpr bool kScalePerTile = false;
  static constexpr bool kScalesPerRow = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kRowBytes = 256;
  static __device__ __forceinline__ int Piece(int piece, int row) { return piece ^ ((row & 1) << 2); }
  static __device__ __forceinline__ void LoadPairs(const uint8_t* rows, int row, int b, int t, uint32_t (&pairs)[4]) {
    const uint4 v = *reinterpret_cast<const uint4*>(rows + row * kRowBytes + Piece(4 * b + t, row) * 16);
    pairs[0] = v.x;
    pairs[1] = v.y;
    pairs[2] = v.z;
    pairs[3] = v.w;
  }
};

template <bool kAsF16>
struct E4m3Weight {
  static constexpr DType kDType = DType::kE4m3;
  static constexpr bool kF16 = kAsF16;
  static constexpr bool kPairsApart = false;
  static constexpr bool kScalePerTile = true;
  static constexpr bool kScalesPerRow = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kRowBytes = 128;
  static __device__ __forceinline__ int Piece(int piece, int row) { return piece ^ ((row & 3) << 1); }
  static __device__ __forceinline__ void LoadPairs(const uint8_t* rows, int row, int b, int t, uint32_t (&pairs)[4]) {
    const uint2 v =
        *reinterpret_cast<const uint2*>(rows + row * kRowBytes + Piece(2 * b + t / 2, row) * 16 + t % 2 * 8);
    pairs[0] = F16PairFromE4m3(static_cast<uint16_t>(v.x));
    pairs[1] = F16PairFromE4m3(static_cast<uint16_t>(v.x >> 16));
    pairs[2] = F16PairFromE4m3(static_cast<uint16_t>(v.y));
    pairs[3] = F16PairFromE4m3(static_cast<uint16_t>(v.y >> 16));
    if constexpr (!kAsF16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = Bf16PairFromF16(pairs[i]);
    }
  }
};

template <bool kAsF16>
struct E2m1Weight {
  static constexpr DType kDType = DType::kE2m1x2;
  static constexpr bool kF16 = kAsF16;
  static constexpr bool kPairsApart = true;
  static constexpr bool kScalePerTile = false;
  static constexpr bool kScalesPerRow = true;
  // The code's bits, put where f16 has its sign, the low bits of its exponent and the first of its mantissa, are the
  // value times 2^-14: e2m1 has an exponent bias of 1, f16 of 15, and both have subnormals.
  static constexpr float kFactor = 16384.0f;
  static constexpr int kRowBytes = 64;
  static __device__ __forceinline__ int Piece(int piece, int row) { return piece ^ ((row >> 1) & 3); }
  static __device__ __forceinline__ void LoadPairs(const uint8_t* rows, int row, int b, int t, uint32_t (&pairs)[4]) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(rows + row * kRowBytes + Piece(b, row) * 16 + t * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t v = codes << (12 - 4 * i);  // codes i and i + 4 on top of each half
      pairs[i] = (v & 0x80008000u) | ((v >> 3) & 0x0e000e00u);
      if constexpr (!kAsF16) pairs[i] = Bf16PairFromF16(pairs[i]);
    }
  }
};

inline constexpr int kWarps = static_cast<int>(kProductSlices);
inline constexpr int kBlock = static_cast<int>(kProductBlock);
inline constexpr int kTileRows = static_cast<int>(kChannelsPerTile);
inline constexpr int kXRowBytes = kBlock * 2;

template <class Weight, int kRowTiles>
struct Product {
  static constexpr char kName[] = "linear";
  static constexpr int kThreads = kWarps * kWarpThreads;
  static constexpr int kMinBlocksPerMultiprocessor = kRowTiles == 1 ? 2 : 1;
  using Weights = ProductWeights;
  using Params = ProductParams;

  static constexpr int kMaxRows = 8 * kRowTiles;
  static constexpr int kTileBytes = kTileRows * Weight::kRowBytes;
  static constexpr int kTileScaleBytes = Weight::kScalesPerRow ? kTileRows * 4 : 0;
  static_assert(kTileBytes == ProductTileBytes(Weight::kDType));
  static_assert(kTileScaleBytes == ProductTileScaleBytes(Weight::kDType));

  // A warp's copies of a tile: each lane one 16-byte piece of every kRowsPerCopy-th row.
  static constexpr int kPieces = Weight::kRowBytes / 16;
  static constexpr int kRowsPerCopy = kWarpThreads / kPieces;
  static constexpr int kCopies = kTileRows / kRowsPerCopy;

  // Where a warp works, and its ring.
  struct Place {
    int lane, g, t;
    int64_t group;
    int64_t first_channel;  // of the group
    int channels;           // that the block's tiles have; past them are zeros
    int begin, end;         // its run of blocks of input channels
    int64_t values;         // the lane's first piece, of block 0
    int64_t scales;         // the first scale of the lane's row, if it is one of a tile's 16
    int stage_bytes;
    uint8_t* ring;
  };
  static __device__ __forceinline__ Place PlaceOfWarp(const Weights& weights, int64_t matrix) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const int blocks = static_cast<int>((weights.inputs + kBlock - 1) / kBlock);
    const int slices = min(blocks, kWarps);
    Place place;
    place.lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    place.g = place.lane / 4;
    place.t = place.lane % 4;
    place.group = GroupOfBlock(weights);
    place.first_channel = int64_t{blockIdx.x} * weights.channel_tiles * kTileRows;
    place.channels =
        static_cast<int>(min(weights.outputs - place.first_channel, int64_t{weights.channel_tiles} * kTileRows));
    place.begin = warp < slices ? warp * blocks / slices : 0;
    place.end = warp < slices ? (warp + 1) * blocks / slices : 0;
    const int64_t row = place.group * weights.outputs + place.first_channel;
    place.values =
        matrix * weights.matrix_bytes + (row + place.lane / kPieces) * weights.row_bytes + place.lane % kPieces * 16;
    place.scales = matrix * weights.scale_matrix_bytes + (row + place.lane) * weights.scale_row_bytes;
    place.stage_bytes = weights.channel_tiles * (kTileBytes + kTileScaleBytes) + weights.x_rows * kXRowBytes;
    place.ring = shared + warp * weights.stages * place.stage_bytes;
    return place;
  }

  // Parts of a stage: the tiles, the tiles' scales, the rows of x.
  static __device__ __forceinline__ uint8_t* Stage(const Place& place, int stage) {
    return place.ring + stage * place.stage_bytes;
  }
  static __device__ __forceinline__ uint8_t* StageScales(const Weights& weights, uint8_t* stage) {
    return stage + weights.channel_tiles * kTileBytes;
  }
  static __device__ __forceinline__ uint8_t* StageX(const Weights& weights, uint8_t* stage) {
    return stage + weights.channel_tiles * (kTileBytes + kTileScaleBytes);
  }

  static __device__ __forceinline__ int Valid(int64_t bytes) {
    return static_cast<int>(bytes < 0 ? 0 : bytes > 16 ? 16 : bytes);
  }

  // Starts the copies of one block of input channels of the block's tiles. Channels past the last are zeros.
  static __device__ __forceinline__ void CopyWeights(const Weights& weights, const Place& place, int block,
                                                     uint8_t* stage) {
    const int64_t row_bytes_used =
        Weight::kDType == DType::kE2m1x2 ? weights.inputs / 2 : weights.inputs * DTypeBytes(Weight::kDType);
    const int64_t offset = int64_t{block} * Weight::kRowBytes;
    const int piece = place.lane % kPieces;
    const int valid_bytes = Valid(row_bytes_used - offset - piece * 16);
    int64_t source = place.values + offset;
    for (int tile = 0; tile < weights.channel_tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int row = i * kRowsPerCopy + place.lane / kPieces;
        const bool valid = valid_bytes > 0 && tile * kTileRows + row < place.channels;
        weights.values.template CopyAsync<16>(
            stage + tile * kTileBytes + row * Weight::kRowBytes + Weight::Piece(piece, row) * 16, valid ? source : 0,
            valid ? valid_bytes : 0);
        source += kRowsPerCopy * weights.row_bytes;
      }
      if constexpr (Weight::kScalesPerRow) {
        if (place.lane < kTileRows) {
          const bool valid = tile * kTileRows + place.lane < place.channels;
          const int64_t scales = place.scales + tile * kTileRows * weights.scale_row_bytes + int64_t{block} * 4;
          weights.scales.template CopyAsync<4>(StageScales(weights, stage) + (tile * kTileRows + place.lane) * 4,
                                               valid ? scales : 0, valid ? 4 : 0);
        }
      }
    }
  }

  // Fills the ring, as far as the run reaches. One group of copies.
  static __device__ __forceinline__ void FillRing(const Weights& weights, const Place& place) {
    for (int stage = 0; stage < weights.stages && place.begin + stage < place.end; ++stage) {
      CopyWeights(weights, place, place.begin + stage, Stage(place, stage));
    }
    CommitAsyncCopies();
  }

  // Of a weight with a scale for each block of a tile: lane i holds that of block i of the warp's run, for each tile.
  struct TileScales {
    float values[Weight::kScalePerTile ? kMaxChannelTiles : 1];
  };
  static __device__ __forceinline__ TileScales LoadTileScales(const Weights& weights, const Place& place,
                                                              int64_t matrix) {
    TileScales scales = {};
    if constexpr (Weight::kScalePerTile) {
      const int block = place.begin + place.lane;
#pragma unroll
      for (int tile = 0; tile < kMaxChannelTiles; ++tile) {
        const int64_t channel = place.first_channel + tile * kTileRows;
        if (tile >= weights.channel_tiles || channel >= weights.outputs || block >= place.end) continue;
        const int scale_row = static_cast<int>(place.group * weights.outputs + channel) / weights.block_rows;
        const int64_t row = matrix * weights.scale_matrix_bytes + scale_row * weights.scale_row_bytes;
        const int col = block * kBlock / weights.block_cols;
        scales.values[tile] = weights.float_scales
                                  ? __builtin_bit_cast(float, weights.scales.template LoadVector<4>(row + col * 4))
                                  : ToFloat(E8m0{weights.scales.Load(row + col)});
      }
    }
    return scales;
  }

  static __device__ __forceinline__ TileScales Prefetch(const Weights& weights) {
    if (weights.by_expert) return {};
    const Place place = PlaceOfWarp(weights, 0);
    FillRing(weights, place);
    return LoadTileScales(weights, place, 0);
  }

  // Starts the copies of one block of input channels of the live rows. Input channels past the last are zeros.
  static __device__ __forceinline__ void CopyX(const Weights& weights, const Params& params, const Place& place,
                                               const int64_t* x_rows, int count, int block, uint8_t* x_stage) {
    constexpr int kXPieces = kXRowBytes / 16;
    const auto* const x = static_cast<const Bf16*>(params.x);
    for (int i = place.lane; i < count * kXPieces; i += kWarpThreads) {
      const int row = i / kXPieces;
      const int piece = i % kXPieces;
      if (x_rows[row] < 0) continue;
      const int64_t k = int64_t{block} * kBlock + piece * 8;
      const int valid = Valid((weights.inputs - k) * 2);
      const Bf16* const source = valid > 0 ? x + x_rows[row] * params.x_stride + place.group * weights.inputs + k : x;
      uint8_t* const destination = x_stage + row * kXRowBytes + Bf16Weight::Piece(piece, row) * 16;
      if (params.x_vectors) {
        CopyAsync<16>(destination, source, valid);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          reinterpret_cast<uint16_t*>(destination)[j] = 2 * j < valid ? source[j].bits : uint16_t{0};
        }
      }
    }
  }

  // The lane's 32 input channels of its row of x, as pairs; the row's scale where it is quantised.
  static __device__ __forceinline__ float LoadX(const uint8_t* x_stage, int row, int t, bool live,
                                                uint32_t (&pairs)[16]) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      uint32_t four[4] = {};
      if (live) Bf16Weight::LoadPairs(x_stage, row, b, t, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[4 * b + i] = four[i];
    }
    float scale = 1.0f;
    if constexpr (Weight::kF16) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) largest = LargerBf16(largest, pairs[i]);
      const float of_lane =
          fmaxf(ToFloat(Bf16{static_cast<uint16_t>(largest)}), ToFloat(Bf16{static_cast<uint16_t>(largest >> 16)}));
      const int exponent = Fp8ScaleExponent(WarpMax<4>(of_lane));
      scale = PowerOfTwo(exponent);
      const float inverse = PowerOfTwo(-exponent);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float first = ToFloat(Bf16{static_cast<uint16_t>(pairs[i])});
        const float second = ToFloat(Bf16{static_cast<uint16_t>(pairs[i] >> 16)});
        pairs[i] = F16PairFromE4m3(E4m3PairFromFloats(first * inverse, second * inverse));
      }
    }
    if constexpr (Weight::kPairsApart) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t v0 = pairs[4 * b], v1 = pairs[4 * b + 1], v2 = pairs[4 * b + 2], v3 = pairs[4 * b + 3];
        pairs[4 * b] = __byte_perm(v0, v2, 0x5410);
        pairs[4 * b + 1] = __byte_perm(v0, v2, 0x7632);
        pairs[4 * b + 2] = __byte_perm(v1, v3, 0x5410);
        pairs[4 * b + 3] = __byte_perm(v1, v3, 0x7632);
      }
    }
    return scale;
  }

  static __device__ __forceinline__ void Multiply(float (&sums)[4], const uint32_t (&low)[4], const uint32_t (&high)[4],
                                                  const uint32_t* x) {
    // low: of weight row g, high: of row g + 8.
    const uint32_t first[4] = {low[0], high[0], low[1], high[1]};
    const uint32_t second[4] = {low[2], high[2], low[3], high[3]};
    if constexpr (Weight::kF16) {
      MultiplyF16(sums, first, x[0], x[1]);
      MultiplyF16(sums, second, x[2], x[3]);
    } else {
      MultiplyBf16(sums, first, x[0], x[1]);
      MultiplyBf16(sums, second, x[2], x[3]);
    }
  }

  using Sums = float[kMaxChannelTiles][kRowTiles][4];

  // One stage: adds its products to the sums.
  static __device__ __forceinline__ void Accumulate(const Weights& weights, const Place& place,
                                                    const TileScales& tile_scales, int index_in_run, uint8_t* stage,
                                                    unsigned live, int row_tiles, Sums& sums) {
    uint32_t x[kRowTiles][16];
    float x_scales[kRowTiles][2];  // of the columns 2t and 2t + 1 of the sums
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (r >= row_tiles) continue;
      const int row = 8 * r + place.g;
      const float scale = LoadX(StageX(weights, stage), row, place.t, (live >> row & 1u) != 0, x[r]) * Weight::kFactor;
      x_scales[r][0] = __shfl_sync(kFullWarp, scale, 8 * place.t);
      x_scales[r][1] = __shfl_sync(kFullWarp, scale, 8 * place.t + 4);
    }
#pragma unroll
    for (int tile = 0; tile < kMaxChannelTiles; ++tile) {
      if (tile >= weights.channel_tiles) continue;
      const uint8_t* const rows = stage + tile * kTileBytes;
      [[maybe_unused]] uint32_t row_scales[2] = {};
      if constexpr (Weight::kScalesPerRow) {
        const auto* const scales = reinterpret_cast<const uint32_t*>(StageScales(weights, stage)) + tile * kTileRows;
        row_scales[0] = scales[place.g];
        row_scales[1] = scales[place.g + 8];
      }
      float partial[kRowTiles][4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t low[4], high[4];
        Weight::LoadPairs(rows, place.g, b, place.t, low);
        Weight::LoadPairs(rows, place.g + 8, b, place.t, high);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if (r >= row_tiles) continue;
          Multiply(partial[r], low, high, x[r] + 4 * b);
        }
        if constexpr (Weight::kScalesPerRow) {
          const float low_scale = ToFloat(E8m0{static_cast<uint8_t>(row_scales[0] >> (8 * b))});
          const float high_scale = ToFloat(E8m0{static_cast<uint8_t>(row_scales[1] >> (8 * b))});
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            if (r >= row_tiles) continue;
            AddScaled(sums[tile][r], partial[r], low_scale, high_scale, x_scales[r]);
#pragma unroll
            for (int i = 0; i < 4; ++i) partial[r][i] = 0.0f;
          }
        }
      }
      if constexpr (!Weight::kScalesPerRow) {
        float scale = 1.0f;
        if constexpr (Weight::kScalePerTile) scale = __shfl_sync(kFullWarp, tile_scales.values[tile], index_in_run);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if (r >= row_tiles) continue;
          AddScaled(sums[tile][r], partial[r], scale, scale, x_scales[r]);
        }
      }
    }
  }

  static __device__ __forceinline__ void AddScaled(float (&sums)[4], const float (&partial)[4], float low_scale,
                                                   float high_scale, const float (&x_scales)[2]) {
    sums[0] = fmaf(__fmul_rn(low_scale, x_scales[0]), partial[0], sums[0]);
    sums[1] = fmaf(__fmul_rn(low_scale, x_scales[1]), partial[1], sums[1]);
    sums[2] = fmaf(__fmul_rn(high_scale, x_scales[0]), partial[2], sums[2]);
    sums[3] = fmaf(__fmul_rn(high_scale, x_scales[1]), partial[3], sums[3]);
  }

  // A stage is complete when all but the groups of the stages after it are.
  static __device__ __forceinline__ void WaitForStage(int stages) {
    switch (stages) {
      case 1:
        return WaitForAsyncCopies<0>();
      case 2:
        return WaitForAsyncCopies<1>();
      case 3:
        return WaitForAsyncCopies<2>();
      case 4:
        return WaitForAsyncCopies<3>();
      case 5:
        return WaitForAsyncCopies<4>();
      default:
        return WaitForAsyncCopies<5>();
    }
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params, TileScales tile_scales) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int64_t x_rows[kMaxRows];
    __shared__ int64_t out_rows[kMaxRows];
    const ProductRows rows = RowsOfBlock(params);
    if (rows.matrix < 0) return;
    const Place place = PlaceOfWarp(weights, rows.matrix);
    bool ring_filled = !weights.by_expert;
    if (weights.by_expert) tile_scales = LoadTileScales(weights, place, rows.matrix);

    for (int64_t first_row = int64_t{blockIdx.y} * weights.x_rows; first_row < rows.count;
         first_row += int64_t{gridDim.y} * weights.x_rows) {
      const int count = static_cast<int>(min(int64_t{weights.x_rows}, rows.count - first_row));
      if (threadIdx.x < kMaxRows) {
        const int i = static_cast<int>(threadIdx.x);
        const ProductRow row = i < count ? RowOfProduct(params, rows, first_row + i) : ProductRow{-1, -1};
        x_rows[i] = row.x;
        out_rows[i] = row.out;
      }
      __syncthreads();
      const unsigned live = __ballot_sync(kFullWarp, place.lane < kMaxRows && x_rows[place.lane % kMaxRows] >= 0);
      if (live != 0) {
        Sums sums = {};
        if (!ring_filled) FillRing(weights, place);
        ring_filled = false;
        for (int stage = 0; stage < weights.stages; ++stage) {
          if (place.begin + stage < place.end) {
            CopyX(weights, params, place, x_rows, count, place.begin + stage, StageX(weights, Stage(place, stage)));
          }
          CommitAsyncCopies();
        }
        const int row_tiles = (count + 7) / 8;
        int stage_index = 0;
        for (int block = place.begin; block < place.end; ++block) {
          WaitForStage(weights.stages);
          __syncwarp();
          uint8_t* const stage = Stage(place, stage_index);
          Accumulate(weights, place, tile_scales, block - place.begin, stage, live, row_tiles, sums);
          __syncwarp();  // all lanes have read the stage
          if (block + weights.stages < place.end) {
            CopyWeights(weights, place, block + weights.stages, stage);
            CopyX(weights, params, place, x_rows, count, block + weights.stages, StageX(weights, stage));
          }
          CommitAsyncCopies();
          if (++stage_index == weights.stages) stage_index = 0;
        }
        __syncthreads();  // all warps are done with their rings
        AddSlices(weights, params, place, row_tiles, out_rows, sums, reinterpret_cast<float*>(shared));
      }
      __syncthreads();  // the sums and the rows' numbers may be overwritten
    }
    WaitForAsyncCopies<0>();
  }

  // Adds the warps' sums in order and stores them.
  static __device__ __forceinline__ void AddSlices(const Weights& weights, const Params& params, const Place& place,
                                                   int row_tiles, const int64_t* out_rows, const Sums& sums,
                                                   float* shared) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
    const int channels = weights.channel_tiles * kTileRows;
    const int rows = row_tiles * 8;
    const int pitch = channels + 4;  // for the banks
    if (place.begin < place.end) {
      float* const own = shared + warp * rows * pitch;
#pragma unroll
      for (int tile = 0; tile < kMaxChannelTiles; ++tile) {
        if (tile >= weights.channel_tiles) continue;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if (r >= row_tiles) continue;
          float* const corner = own + (8 * r + 2 * place.t) * pitch + tile * kTileRows + place.g;
          corner[0] = sums[tile][r][0];
          corner[pitch] = sums[tile][r][1];
          corner[8] = sums[tile][r][2];
          corner[pitch + 8] = sums[tile][r][3];
        }
      }
    }
    __syncthreads();
    const int slices = static_cast<int>(min((weights.inputs + kBlock - 1) / kBlock, int64_t{kWarps}));
    for (int i = static_cast<int>(threadIdx.x); i < rows * channels; i += kThreads) {
      const int row = i / channels;
      const int64_t channel = place.first_channel + i % channels;
      if (out_rows[row] < 0 || channel >= weights.outputs) continue;
      const float* const slice = shared + row * pitch + i % channels;
      float sum = slice[0];
      for (int s = 1; s < slices; ++s) sum += slice[s * rows * pitch];
      StoreProduct(params, out_rows[row] * params.out_stride + place.group * weights.outputs + channel, sum);
    }
  }
};

template <class Op>
absl::Status LaunchOp(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                      int64_t groups_or_slots, const ProductTiles& tiles) {
  const int64_t channels = kChannelsPerTile * tiles.channel_tiles;
  const int64_t row_sets = std::min<int64_t>((params.rows + tiles.x_rows - 1) / tiles.x_rows, 65535);
  return Launch<Op>(
      stream,
      {.x = (weights.outputs + channels - 1) / channels, .y = weights.by_expert ? 1 : row_sets, .z = groups_or_slots},
      weights, params, tiles.shared_bytes);
}

template <class Weight>
absl::Status LaunchWeight(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                          int64_t groups_or_slots, const ProductTiles& tiles) {
  return tiles.rows_per_block == 8 ? LaunchOp<Product<Weight, 1>>(stream, weights, params, groups_or_slots, tiles)
                                   : LaunchOp<Product<Weight, 4>>(stream, weights, params, groups_or_slots, tiles);
}

}  // namespace dsv4::tensor_core_product

#endif  // DSV4_OPS_LINEAR_TENSOR_CORE_PRODUCT_CUH_
