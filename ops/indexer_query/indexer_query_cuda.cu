#include "ops/indexer_query/indexer_query_cuda.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ops/rope/rope.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/division.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/paged_rows.cuh"

namespace dsv4::indexer_query {
namespace {

struct KernelWeights {
  FloatWeight cos_sin;
  int64_t cos_sin_stride;
};

struct KernelParams {
  FloatData q;
  int64_t q_row_stride, q_head_stride;
  const float* weights;
  int64_t weights_stride;
  const int64_t* positions;
  FloatData out;  // kF32 and kBf16
  uint8_t* out_values;  // kFp8Key and kMxfp4Key
  int64_t out_row_stride, out_head_stride;
  uint8_t* out_scales;
  int64_t scales_row_stride, scales_head_stride;
  float* out_weights;
  int64_t out_weights_stride;
  int64_t rows, heads;
  int32_t channels, rotary;
  bool hadamard;
  RowFormat format;
  float weight_scale;
};

// A warp's head of a row, and where it is.
struct Unit {
  int64_t row;
  int64_t head;
};

__device__ __forceinline__ Unit UnitOf(const KernelParams& params, int64_t index) {
  const auto [row, head] = Divide(index, params.heads);
  return {row, head};
}

// By one lane.
__device__ __forceinline__ void StoreWeight(const KernelParams& params, const Unit& unit, float query_scale) {
  params.out_weights[unit.row * params.out_weights_stride + unit.head] =
      params.weights[unit.row * params.weights_stride + unit.head] * params.weight_scale * query_scale;
}

// Heads of 128 channels: a warp a head, four channels a lane.
struct Query128 {
  static constexpr char kName[] = "indexer_query";
  static constexpr int kThreads = 128;
  static constexpr int kUnitsPerBlock = kThreads / kWarpThreads;
  static constexpr int kChannels = 128;
  static constexpr int kWidth = 4;
  static_assert(kWidth * kWarpThreads == kChannels);

  using Weights = KernelWeights;
  using Params = KernelParams;
  using Quad = Vector<float, kWidth>;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t index = int64_t{blockIdx.x} * kUnitsPerBlock + threadIdx.x / kWarpThreads;
    if (index >= params.rows * params.heads) return;
    const Unit unit = UnitOf(params, index);
    const int lane = static_cast<int>(threadIdx.x % kWarpThreads), channel = lane * kWidth;
    const int64_t position = params.positions[unit.row];
    Quad q = params.q.Load<kWidth>(unit.row * params.q_row_stride + unit.head * params.q_head_stride + channel);
    const int first = kChannels - params.rotary;
    if (channel >= first) {
      const int64_t pair = position * weights.cos_sin_stride + (channel - first) / 2;
      const Vector<float, 2> cosines = weights.cos_sin.Load<2>(pair);
      const Vector<float, 2> sines = weights.cos_sin.Load<2>(pair + params.rotary / 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RotatePair(q.values[2 * i], q.values[2 * i + 1], cosines.values[i], sines.values[i]);
      }
    }
    if (params.q.is_bf16) q = RoundVectorToBf16(q);
    if (params.hadamard) {
      HadamardWarp<kWidth>(q);
      if (params.q.is_bf16) q = RoundVectorToBf16(q);
    }

    const int64_t out = unit.row * params.out_row_stride + unit.head * params.out_head_stride;
    float query_scale = 1.0f;
    if (params.format == RowFormat::kFp8Key) {
      const int exponent = Fp8ScaleExponent(WarpMax(LargestMagnitude(q)));
      StoreE4m3(params.out_values + out + channel, q, exponent);
      query_scale = PowerOfTwo(exponent);
    } else if (params.format == RowFormat::kMxfp4Key) {
      const int exponent = Mxfp4ScaleExponent(WarpMax<kMxfp4GroupChannels / kWidth>(LargestMagnitude(q)));
      StoreE2m1(params.out_values + out + channel / 2, q, exponent);
      if (channel % kMxfp4GroupChannels == 0) {
        params.out_scales[unit.row * params.scales_row_stride + unit.head * params.scales_head_stride +
                          channel / kMxfp4GroupChannels] = E8m0FromExponent(exponent).bits;
      }
    } else {
      params.out.Store<kWidth>(out + channel, q);
    }
    if (lane == 0) StoreWeight(params, unit, query_scale);
  }
};

// Any sizes: a warp a head, which it holds in shared memory.
struct Query {
  static constexpr char kName[] = "indexer_query";
  static constexpr int kThreads = 128;
  static constexpr int kUnitsPerBlock = kThreads / kWarpThreads;
  using Weights = KernelWeights;
  using Params = KernelParams;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    extern __shared__ float rows[];
    const int64_t index = int64_t{blockIdx.x} * kUnitsPerBlock + threadIdx.x / kWarpThreads;
    if (index >= params.rows * params.heads) return;
    const Unit unit = UnitOf(params, index);
    const int lane = static_cast<int>(threadIdx.x % kWarpThreads), channels = params.channels;
    float* const q = rows + threadIdx.x / kWarpThreads * channels;
    const int64_t q_begin = unit.row * params.q_row_stride + unit.head * params.q_head_stride;
    for (int channel = lane; channel < channels; channel += kWarpThreads) q[channel] = params.q.LoadOne(q_begin + channel);
    __syncwarp();
    const int64_t angles = params.positions[unit.row] * weights.cos_sin_stride;
    for (int pair = lane; pair < params.rotary / 2; pair += kWarpThreads) {
      float* const rotary = q + channels - params.rotary + 2 * pair;
      RotatePair(rotary[0], rotary[1], weights.cos_sin.LoadOne(angles + pair),
                 weights.cos_sin.LoadOne(angles + params.rotary / 2 + pair));
    }
    __syncwarp();
    RoundRow(params, q, lane);
    if (params.hadamard) {
      HadamardShared(q, channels, lane, kWarpThreads, [] { __syncwarp(); });
      RoundRow(params, q, lane);
    }
    const float query_scale = StoreRow(params, unit, q, lane);
    if (lane == 0) StoreWeight(params, unit, query_scale);
  }

 private:
  static __device__ __forceinline__ void RoundRow(const Params& params, float* q, int lane) {
    if (params.q.is_bf16) {
      for (int channel = lane; channel < params.channels; channel += kWarpThreads) q[channel] = RoundToBf16(q[channel]);
    }
    __syncwarp();
  }

  // Returns the scale that belongs into the head's weight.
  static __device__ __forceinline__ float StoreRow(const Params& params, const Unit& unit, const float* q, int lane) {
    const int64_t out = unit.row * params.out_row_stride + unit.head * params.out_head_stride;
    if (params.format == RowFormat::kFp8Key) {
      float largest = 0.0f;
      for (int channel = lane; channel < params.channels; channel += kWarpThreads) {
        largest = fmaxf(largest, fabsf(q[channel]));
      }
      const int exponent = Fp8ScaleExponent(WarpMax(largest));
      for (int channel = lane; channel < params.channels; channel += kWarpThreads) {
        params.out_values[out + channel] = E4m3FromFloat(q[channel] * PowerOfTwo(-exponent)).bits;
      }
      return PowerOfTwo(exponent);
    }
    if (params.format == RowFormat::kMxfp4Key) {
      uint8_t* const scales =
          params.out_scales + unit.row * params.scales_row_stride + unit.head * params.scales_head_stride;
      for (int group = 0; group < params.channels / kMxfp4GroupChannels; ++group) {
        const int channel = group * kMxfp4GroupChannels + lane;
        const int exponent = Mxfp4ScaleExponent(WarpMax(fmaxf(0.0f, fabsf(q[channel]))));
        const unsigned code = E2m1FromFloat(q[channel] * PowerOfTwo(-exponent)).bits;
        const unsigned next = __shfl_down_sync(kFullWarp, code, 1);
        if (lane % 2 == 0) params.out_values[out + channel / 2] = static_cast<uint8_t>(code | next << 4);
        if (lane == 0) scales[group] = E8m0FromExponent(exponent).bits;
      }
      return 1.0f;
    }
    for (int channel = lane; channel < params.channels; channel += kWarpThreads) {
      params.out.StoreOne(out + channel, q[channel]);
    }
    return 1.0f;
  }
};

// What fits into a block's shared memory.
constexpr int64_t kMostChannels = 12 * 1024;

// Whether the quantised rows allow the accesses of Query128: four e4m3, or four e2m1 in two bytes, at a time.
bool AllowsWideOutput(const Params& params) {
  const int64_t bytes = params.format == RowFormat::kFp8Key ? 4 : 2;
  const TensorView& view = params.out_values;
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 && view.strides[0] % bytes == 0 &&
         view.strides[1] % bytes == 0;
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t rows = params.q.extents[0], heads = params.q.extents[1], channels = params.q.extents[2];
  const int64_t rotary = params.cos_sin.extent(1);
  const bool quantised = params.format == RowFormat::kFp8Key || params.format == RowFormat::kMxfp4Key;
  if (channels > kMostChannels) {
    return absl::InvalidArgumentError(
        absl::StrCat("q: expected at most ", kMostChannels, " channels on cuda, got ", channels));
  }
  const KernelWeights weights = {.cos_sin = FloatWeight::Make(params.cos_sin, 2),
                                 .cos_sin_stride = params.cos_sin.stride(0)};
  KernelParams kernel_params = {};
  kernel_params.q = FloatData::Make(params.q, Query128::kWidth);
  kernel_params.q_row_stride = params.q.strides[0];
  kernel_params.q_head_stride = params.q.strides[1];
  kernel_params.weights = params.weights.As<float>();
  kernel_params.weights_stride = params.weights.strides[0];
  kernel_params.positions = params.positions.As<int64_t>();
  if (!quantised) kernel_params.out = FloatData::Make(params.out_values, Query128::kWidth);
  kernel_params.out_values = params.out_values.As<uint8_t>();
  kernel_params.out_row_stride = params.out_values.strides[0];
  kernel_params.out_head_stride = params.out_values.strides[1];
  if (params.format == RowFormat::kMxfp4Key) {
    kernel_params.out_scales = params.out_scales.As<uint8_t>();
    kernel_params.scales_row_stride = params.out_scales.strides[0];
    kernel_params.scales_head_stride = params.out_scales.strides[1];
  }
  kernel_params.out_weights = params.out_weights.As<float>();
  kernel_params.out_weights_stride = params.out_weights.strides[0];
  kernel_params.rows = rows;
  kernel_params.heads = heads;
  kernel_params.channels = static_cast<int32_t>(channels);
  kernel_params.rotary = static_cast<int32_t>(rotary);
  kernel_params.hadamard = params.hadamard;
  kernel_params.format = params.format;
  kernel_params.weight_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(channels * heads)));

  const int64_t units = rows * heads;
  const Grid grid = {.x = (units + Query::kUnitsPerBlock - 1) / Query::kUnitsPerBlock};
  static_assert(Query::kUnitsPerBlock == Query128::kUnitsPerBlock);
  if (channels == Query128::kChannels && rotary % 4 == 0 && kernel_params.q.vectors &&
      (quantised ? AllowsWideOutput(params) : kernel_params.out.vectors)) {
    return Launch<Query128>(stream, grid, weights, kernel_params);
  }
  return Launch<Query>(stream, grid, weights, kernel_params,
                       Query::kUnitsPerBlock * channels * static_cast<int64_t>(sizeof(float)));
}

}  // namespace dsv4::indexer_query
