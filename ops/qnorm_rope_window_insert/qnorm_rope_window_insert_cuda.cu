#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert_cuda.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "ops/rope/rope.cuh"
#include "runtime/block_reduce.cuh"
#include "runtime/division.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/paged_rows.cuh"

namespace dsv4::qnorm_rope_window_insert {
namespace {

struct KernelWeights {
  FloatWeight cos_sin;
  int64_t cos_sin_stride;
};

// A row has heads + 1 units of work: its query's heads and its window row.
struct KernelParams {
  FloatData q;
  int64_t q_row_stride, q_head_stride;
  FloatData kv;
  int64_t kv_stride;
  const int64_t* slots;
  const int64_t* positions;
  int64_t rows, heads;
  float eps;
  PagedRowsPointer window;
};

struct Unit {
  int64_t row;
  int64_t head;  // `heads`: the window row
};

__device__ __forceinline__ Unit UnitOf(const KernelParams& params, int64_t index) {
  const auto [row, head] = Divide(index, params.heads + 1);
  return {row, head};
}

__device__ __forceinline__ float InverseNorm(float square_sum, int head_size, float eps) {
  return 1.0f / sqrtf(square_sum / static_cast<float>(head_size) + eps);
}

// Heads of 512 channels, the last 64 rotary: a warp a unit, which holds it in registers.
struct QueryAndWindow512 {
  static constexpr char kName[] = "qnorm_rope_window_insert";
  static constexpr int kThreads = 128;
  static constexpr int kUnitsPerBlock = kThreads / kWarpThreads;
  static constexpr int kHead = 512;
  static constexpr int kRope = 64;
  static constexpr int kWidth = 8;  // consecutive channels of a lane
  static constexpr int kSlices = kHead / (kWarpThreads * kWidth);

  using Weights = KernelWeights;
  using Params = KernelParams;
  using Slice = Vector<float, kWidth>;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ int Channel(int slice) {
    return (slice * kWarpThreads + static_cast<int>(threadIdx.x % kWarpThreads)) * kWidth;
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t index = int64_t{blockIdx.x} * kUnitsPerBlock + threadIdx.x / kWarpThreads;
    if (index >= params.rows * (params.heads + 1)) return;
    const Unit unit = UnitOf(params, index);
    const int64_t slot = params.slots[unit.row], position = params.positions[unit.row];
    if (slot < 0) return;  // a pad

    const bool is_window = unit.head == params.heads;
    const int64_t q_begin = unit.row * params.q_row_stride + unit.head * params.q_head_stride;
    Slice values[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      values[s] = is_window ? params.kv.Load<kWidth>(unit.row * params.kv_stride + Channel(s))
                            : params.q.Load<kWidth>(q_begin + Channel(s));
    }
    // The rotary channels are in the last slice of the last lanes.
    const int first_pair = (Channel(kSlices - 1) - (kHead - kRope)) / 2;
    const bool rotary = Channel(kSlices - 1) >= kHead - kRope;
    Vector<float, kWidth / 2> cosines = {}, sines = {};
    if (rotary) {
      cosines = weights.cos_sin.Load<kWidth / 2>(position * weights.cos_sin_stride + first_pair);
      sines = weights.cos_sin.Load<kWidth / 2>(position * weights.cos_sin_stride + kRope / 2 + first_pair);
    }

    if (!is_window) {
      float square_sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) square_sum += values[s].values[i] * values[s].values[i];
      }
      const float norm = InverseNorm(WarpSum(square_sum), kHead, params.eps);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[s].values[i] *= norm;
      }
    }
    if (rotary) {
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) {
        RotatePair(values[kSlices - 1].values[2 * i], values[kSlices - 1].values[2 * i + 1], cosines.values[i],
                   sines.values[i]);
      }
    }

    if (!is_window) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) params.q.Store<kWidth>(q_begin + Channel(s), values[s]);
      return;
    }
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) largest = fmaxf(largest, LargestEncodedMagnitude(values[s]));
    largest = WarpMax(largest);
    const RowAddress at = LocateRow(params.window, slot);
#pragma unroll
    for (int s = 0; s < kSlices; ++s) EncodeSlice<kWidth>(params.window, at, Channel(s), values[s], largest);
  }
};

// Any sizes: a block a unit; the window row is put together in shared memory.
struct QueryAndWindow {
  static constexpr char kName[] = "qnorm_rope_window_insert";
  static constexpr int kThreads = 128;
  using Weights = KernelWeights;
  using Params = KernelParams;

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const Unit unit = UnitOf(params, blockIdx.x);
    const int64_t slot = params.slots[unit.row];
    if (slot < 0) return;  // a pad
    const int64_t angles = params.positions[unit.row] * weights.cos_sin_stride;
    if (unit.head == params.heads) {
      InsertWindowRow(weights, params, unit.row, slot, angles);
    } else {
      NormAndRotateHead(weights, params, unit, angles);
    }
  }

  static __device__ __forceinline__ void NormAndRotateHead(const Weights& weights, const Params& params,
                                                           const Unit& unit, int64_t angles) {
    __shared__ float sums[kThreads / kWarpThreads];
    const int thread = static_cast<int>(threadIdx.x);
    const int head_size = params.window.row_size, rope_size = params.window.rope_size;
    const int64_t begin = unit.row * params.q_row_stride + unit.head * params.q_head_stride;
    float square_sum = 0.0f;
    for (int channel = thread; channel < head_size; channel += kThreads) {
      const float x = params.q.LoadOne(begin + channel);
      square_sum += x * x;
    }
    // The barrier in this sum comes after the last read of it all; from here on a thread reads what it writes itself.
    const float norm = InverseNorm(BlockSum<kThreads>(square_sum, sums), head_size, params.eps);
    for (int channel = thread; channel < head_size - rope_size; channel += kThreads) {
      params.q.StoreOne(begin + channel, params.q.LoadOne(begin + channel) * norm);
    }
    for (int pair = thread; pair < rope_size / 2; pair += kThreads) {
      const int64_t first = begin + head_size - rope_size + 2 * pair;
      float a = params.q.LoadOne(first) * norm, b = params.q.LoadOne(first + 1) * norm;
      RotatePair(a, b, weights.cos_sin.LoadOne(angles + pair), weights.cos_sin.LoadOne(angles + rope_size / 2 + pair));
      params.q.StoreOne(first, a);
      params.q.StoreOne(first + 1, b);
    }
  }

  static __device__ __forceinline__ void InsertWindowRow(const Weights& weights, const Params& params, int64_t row,
                                                         int64_t slot, int64_t angles) {
    extern __shared__ float values[];
    const int thread = static_cast<int>(threadIdx.x);
    const int head_size = params.window.row_size, rope_size = params.window.rope_size;
    for (int channel = thread; channel < head_size; channel += kThreads) {
      values[channel] = params.kv.LoadOne(row * params.kv_stride + channel);
    }
    __syncthreads();
    for (int pair = thread; pair < rope_size / 2; pair += kThreads) {
      float* const channels = values + head_size - rope_size + 2 * pair;
      RotatePair(channels[0], channels[1], weights.cos_sin.LoadOne(angles + pair),
                 weights.cos_sin.LoadOne(angles + rope_size / 2 + pair));
    }
    __syncthreads();
    EncodeRowFromShared(params.window, LocateRow(params.window, slot), values);
  }
};

// What fits into a block's shared memory.
constexpr int64_t kLargestRow = 48 * 1024;

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const PagedRows& window = params.window;
  const int64_t rows = params.q.extents[0], heads = params.q.extents[1];
  const KernelWeights weights = {.cos_sin = MakeFloatWeight(params.cos_sin, 4),
                                 .cos_sin_stride = params.cos_sin.stride(0)};
  const KernelParams kernel_params = {.q = MakeFloatData(params.q, 8),
                                      .q_row_stride = params.q.strides[0],
                                      .q_head_stride = params.q.strides[1],
                                      .kv = MakeFloatData(params.kv, 8),
                                      .kv_stride = params.kv.strides[0],
                                      .slots = params.slots.As<int64_t>(),
                                      .positions = params.positions.As<int64_t>(),
                                      .rows = rows,
                                      .heads = heads,
                                      .eps = params.eps,
                                      .window = MakePagedRowsPointer(window)};
  const int64_t units = rows * (heads + 1);
  if (window.row_size == QueryAndWindow512::kHead && window.rope_size == QueryAndWindow512::kRope &&
      kernel_params.q.vectors && kernel_params.kv.vectors) {
    constexpr int64_t kUnits = QueryAndWindow512::kUnitsPerBlock;
    return Launch<QueryAndWindow512>(stream, {.x = (units + kUnits - 1) / kUnits}, weights, kernel_params);
  }
  if (window.row_size > kLargestRow) {
    return absl::InvalidArgumentError(
        absl::StrCat("window: expected rows of at most ", kLargestRow, " channels on cuda, got ", window.row_size));
  }
  return Launch<QueryAndWindow>(stream, {.x = units}, weights, kernel_params,
                                window.row_size * static_cast<int64_t>(sizeof(float)));
}

}  // namespace dsv4::qnorm_rope_window_insert
