#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ops/output_projection/output_projection_cuda.h"
#include "ops/rope/rope.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"

namespace dsv4::output_projection {
namespace {

constexpr int kWidth = 8;

struct RotationWeights {
  WeightPointer<float> cos_sin;
  int64_t stride;
};

struct RotationParams {
  FloatData o;
  FloatData rotated;
  const int64_t* positions;
  int64_t row_stride, head_stride;  // of o
  uint32_t heads, channels, rotary;
};

// A block works on a part of one row. With kVectors a thread takes eight channels, otherwise one channel of those that
// are copied or one pair of those that are rotated.
template <bool kVectors>
struct RotateBack {
  static constexpr char kName[] = "inverse_rope";
  static constexpr int kThreads = 256;
  using Weights = RotationWeights;
  using Params = RotationParams;

  static __host__ __device__ uint32_t ItemsPerHead(const Params& params) {
    return kVectors ? params.channels / kWidth : params.channels - params.rotary / 2;
  }

  static __device__ void Prefetch(const Weights&) {}

  static __device__ void Run(const Weights& weights, const Params& params) {
    const uint32_t items = ItemsPerHead(params);
    const uint32_t item_of_row = blockIdx.y * kThreads + threadIdx.x;
    if (item_of_row >= items * params.heads) return;
    const int64_t row = blockIdx.x;
    const uint32_t head = item_of_row / items;
    const uint32_t item = item_of_row % items;
    const uint32_t plain = params.channels - params.rotary;
    const int64_t source = row * params.row_stride + head * params.head_stride;
    const int64_t destination = (row * params.heads + head) * params.channels;
    const uint32_t pairs = params.rotary / 2;
    if constexpr (kVectors) {
      const uint32_t channel = item * kWidth;
      Vector<float, kWidth> v = params.o.Load<kWidth>(source + channel);
      if (channel >= plain) {
        const int64_t cosines = params.positions[row] * weights.stride + (channel - plain) / 2;
        const auto cosine = weights.cos_sin.template LoadVector<kWidth / 2>(cosines);
        const auto sine = weights.cos_sin.template LoadVector<kWidth / 2>(cosines + pairs);
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) {
          RotatePairInverse(v.values[2 * i], v.values[2 * i + 1], cosine.values[i], sine.values[i]);
        }
      }
      params.rotated.Store(destination + channel, v);
    } else if (item < plain) {
      params.rotated.StoreOne(destination + item, params.o.LoadOne(source + item));
    } else {
      const uint32_t pair = item - plain;
      const uint32_t channel = plain + 2 * pair;
      const int64_t cosines = params.positions[row] * weights.stride;
      float a = params.o.LoadOne(source + channel);
      float b = params.o.LoadOne(source + channel + 1);
      RotatePairInverse(a, b, weights.cos_sin.Load(cosines + pair), weights.cos_sin.Load(cosines + pairs + pair));
      params.rotated.StoreOne(destination + channel, a);
      params.rotated.StoreOne(destination + channel + 1, b);
    }
  }
};

template <bool kVectors>
absl::Status LaunchRotation(Stream& stream, int64_t rows, const RotationWeights& weights,
                            const RotationParams& params) {
  using Op = RotateBack<kVectors>;
  const int64_t items = int64_t{Op::ItemsPerHead(params)} * params.heads;
  return Launch<Op>(stream, {.x = rows, .y = (items + Op::kThreads - 1) / Op::kThreads}, weights, params);
}

}  // namespace

absl::Status RecordRotationCuda(Stream& stream, const Params& params) {
  const int64_t rows = params.o.extents[0];
  const int64_t heads = params.o.extents[1];
  const int64_t channels = params.o.extents[2];
  const int64_t rotary = params.cos_sin.extent(1);
  if (heads * channels > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("o: expected rows of fewer than 2^31 elements, got ", heads, " x ", channels));
  }
  const RotationWeights weights = {WeightPointer<float>(params.cos_sin), params.cos_sin.stride(0)};
  const RotationParams rotation = {.o = FloatData::Make(params.o, kWidth),
                                   .rotated = FloatData::Make(params.rotated, kWidth),
                                   .positions = params.positions.As<int64_t>(),
                                   .row_stride = params.o.strides[0],
                                   .head_stride = params.o.strides[1],
                                   .heads = static_cast<uint32_t>(heads),
                                   .channels = static_cast<uint32_t>(channels),
                                   .rotary = static_cast<uint32_t>(rotary)};
  const bool vectors = rotation.o.vectors && rotation.rotated.vectors && rotary % kWidth == 0 &&
                       (rotary == 0 || AllowsVectors(params.cos_sin.view(), kWidth / 2));
  return vectors ? LaunchRotation<true>(stream, rows, weights, rotation)
                 : LaunchRotation<false>(stream, rows, weights, rotation);
}

}  // namespace dsv4::output_projection
