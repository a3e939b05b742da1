// Eleven kernels, one after the other: the gate's product, the choice of experts, the list of rows by expert; w1 and w3
// of the chosen experts and of the shared one, the activation of both, w2 of both, and the sum. The products are
// linear's; those of the experts run over the list, which only the device knows.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ops/linear/matrix_product_cuda.h"
#include "ops/moe/moe_cuda.h"
#include "runtime/block_reduce.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"
#include "runtime/status.h"

namespace dsv4::moe {
namespace {

struct NoWeights {};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

__device__ __forceinline__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }

// A candidate in the search for the largest; of equal keys the lower index wins.
struct Candidate {
  float key;
  int32_t index;
};
__device__ __forceinline__ bool IsBefore(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.index < b.index);
}

// Chooses the experts of one row and weighs them.
struct Route {
  static constexpr char kName[] = "moe";
  static constexpr int kThreads = 128;
  struct Weights {
    WeightPointer<float> bias;
    WeightPointer<int32_t> expert_table;
    int64_t table_stride;
    bool by_table;
  };
  struct Params {
    const float* products;  // of the gate
    int64_t experts;
    int64_t chosen;
    float routed_scaling_factor;
    const int32_t* row_tokens;
    int32_t* expert_ids;
    int64_t ids_stride;
    float* expert_weights;
    int64_t weights_stride;
  };

  static __device__ void Prefetch(const Weights&) {}

  static __device__ void Run(const Weights& weights, const Params& params) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Candidate of_warp[kThreads / kWarpThreads];
    auto* const scores = reinterpret_cast<float*>(shared);
    auto* const keys = scores + params.experts;
    const int64_t row = blockIdx.x;
    int32_t* const ids = params.expert_ids + row * params.ids_stride;
    const int64_t table_row = weights.by_table ? params.row_tokens[row] * weights.table_stride : 0;

    for (int64_t e = threadIdx.x; e < params.experts; e += kThreads) {
      const float score = sqrtf(Softplus(params.products[row * params.experts + e]));
      scores[e] = score;
      if (!weights.by_table) {
        const float key = score + weights.bias.Load(e);
        keys[e] = key != key ? -kInfinity : key;  // NaN comes last
      }
    }
    __syncthreads();

    Candidate last = {kInfinity, -1};
    for (int64_t c = 0; c < params.chosen; ++c) {
      int32_t id = 0;
      if (weights.by_table) {
        id = weights.expert_table.Load(table_row + c);
      } else {
        // The first of those that come after the last choice.
        Candidate best = {-kInfinity, std::numeric_limits<int32_t>::max()};
        for (int64_t e = threadIdx.x; e < params.experts; e += kThreads) {
          const Candidate candidate = {keys[e], static_cast<int32_t>(e)};
          if (IsBefore(last, candidate) && IsBefore(candidate, best)) best = candidate;
        }
#pragma unroll
        for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
          const Candidate other = {__shfl_xor_sync(kFullWarp, best.key, offset),
                                   __shfl_xor_sync(kFullWarp, best.index, offset)};
          if (IsBefore(other, best)) best = other;
        }
        if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = best;
        __syncthreads();
        best = of_warp[0];
        for (int warp = 1; warp < kThreads / kWarpThreads; ++warp) {
          if (IsBefore(of_warp[warp], best)) best = of_warp[warp];
        }
        __syncthreads();  // before the next choice writes of_warp
        last = best;
        id = best.index;
      }
      if (threadIdx.x == 0) ids[c] = id;
    }

    if (threadIdx.x == 0) {
      float* const out = params.expert_weights + row * params.weights_stride;
      float sum = 0.0f;
      for (int64_t c = 0; c < params.chosen; ++c) sum += scores[ids[c]];
      for (int64_t c = 0; c < params.chosen; ++c) {
        out[c] = __fmul_rn(scores[ids[c]] / sum, params.routed_scaling_factor);
      }
    }
  }
};

// Lists the choices of one expert, in ascending order, and gives the expert a slot if it has any.
struct Group {
  static constexpr char kName[] = "moe";
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarpThreads;
  using Weights = NoWeights;
  struct Params {
    const int32_t* expert_ids;
    int64_t ids_stride;
    int32_t choices;  // of all rows
    int32_t chosen;   // of a row
    int32_t experts;
    int32_t slots;
    int32_t* expert_slots;
    int32_t* choice_list;
  };

  static __device__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ int32_t Expert(const Params& params, int32_t choice) {
    return params.expert_ids[choice / params.chosen * params.ids_stride + choice % params.chosen];
  }

  static __device__ void Run(const Weights&, const Params& params) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t partial[3][kWarps];
    auto* const is_chosen = reinterpret_cast<int32_t*>(shared);  // by expert
    const auto own = static_cast<int32_t>(blockIdx.x);
    const auto thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t e = thread; e < params.experts; e += kThreads) is_chosen[e] = 0;
    __syncthreads();
    int32_t before = 0, count = 0;
    for (int32_t choice = thread; choice < params.choices; choice += kThreads) {
      const int32_t e = Expert(params, choice);
      before += e < own ? 1 : 0;
      count += e == own ? 1 : 0;
      is_chosen[e] = 1;  // all who write it write the same
    }
    __syncthreads();
    int32_t slot = 0;  // how many chosen experts come before this one; for expert 0, how many there are
    for (int32_t e = thread; e < params.experts; e += kThreads) {
      if (e < own || own == 0) slot += is_chosen[e];
    }
    before = BlockSum<kThreads>(before, partial[0]);
    count = BlockSum<kThreads>(count, partial[1]);
    slot = BlockSum<kThreads>(slot, partial[2]);
    if (own == 0) {
      for (int32_t s = slot + thread; s < params.slots; s += kThreads) {
        params.expert_slots[3 * s] = -1;
        params.expert_slots[3 * s + 1] = 0;
        params.expert_slots[3 * s + 2] = 0;
      }
      slot = 0;
    }
    if (count == 0) return;
    if (thread == 0) {
      params.expert_slots[3 * slot] = own;
      params.expert_slots[3 * slot + 1] = before;
      params.expert_slots[3 * slot + 2] = count;
    }

    // Each warp counts its 32 choices of a set of kThreads; a choice's place follows from those of the warps before.
    const int32_t warp = thread / kWarpThreads;
    const int32_t lane = thread % kWarpThreads;
    int32_t place = before;
    for (int32_t first = 0; first < params.choices; first += kThreads) {
      const int32_t choice = first + thread;
      const bool mine = choice < params.choices && Expert(params, choice) == own;
      const unsigned of_warp = __ballot_sync(kFullWarp, mine);
      __syncthreads();  // all have read the counts before
      if (lane == 0) partial[0][warp] = __popc(of_warp);
      __syncthreads();
      int32_t in_set = 0, ahead = 0;
      for (int32_t w = 0; w < kWarps; ++w) {
        if (w < warp) ahead += partial[0][w];
        in_set += partial[0][w];
      }
      if (mine) params.choice_list[place + ahead + __popc(of_warp & ((1u << lane) - 1))] = choice;
      place += in_set;
    }
  }
};

constexpr int kWidth = 8;

// h = silu(min(g, limit)) * clamp(u, -limit, limit) * weight, over g. Of the routed experts, then of the shared one.
struct Activate {
  static constexpr char kName[] = "moe";
  static constexpr int kThreads = 128;
  using Weights = NoWeights;
  struct Part {
    FloatData gate;
    FloatData up;
    int64_t rows;
    int64_t inner;
    const float* weights;  // null: 1
    int64_t weights_stride;
    int32_t chosen;
  };
  struct Params {
    Part parts[2];
    float limit;
  };

  static __device__ void Prefetch(const Weights&) {}

  static __device__ void Run(const Weights&, const Params& params) {
    const Part& part = params.parts[blockIdx.z];
    const int64_t row = blockIdx.x;
    if (row >= part.rows) return;
    const auto choice = static_cast<int32_t>(row);
    const float weight = part.weights == nullptr
                             ? 1.0f
                             : part.weights[choice / part.chosen * part.weights_stride + choice % part.chosen];
    const float limit = params.limit;
    for (int64_t k = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWidth; k < part.inner;
         k += int64_t{gridDim.y} * kThreads * kWidth) {
      const int64_t count = part.inner - k;
      Vector<float, kWidth> g = part.gate.Load<kWidth>(row * part.inner + k, count);
      const Vector<float, kWidth> u = part.up.Load<kWidth>(row * part.inner + k, count);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // Comparisons that keep NaN.
        const float gate = limit < g.values[i] ? limit : g.values[i];
        const float up = u.values[i] < -limit ? -limit : limit < u.values[i] ? limit : u.values[i];
        g.values[i] = __fmul_rn(__fmul_rn(Silu(gate), up), weight);
      }
      part.gate.Store(row * part.inner + k, g, count);
    }
  }
};

// out = the experts' sum in the order of choice, plus the shared expert's.
struct Combine {
  static constexpr char kName[] = "moe";
  static constexpr int kThreads = 128;
  using Weights = NoWeights;
  struct Params {
    FloatData routed;
    FloatData shared;
    FloatData out;
    int64_t out_stride;
    int64_t channels;
    int64_t chosen;
  };

  static __device__ void Prefetch(const Weights&) {}

  static __device__ void Run(const Weights&, const Params& params) {
    const int64_t row = blockIdx.x;
    for (int64_t k = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kWidth; k < params.channels;
         k += int64_t{gridDim.y} * kThreads * kWidth) {
      const int64_t count = params.channels - k;
      Vector<float, kWidth> sum = {};
      for (int64_t c = 0; c < params.chosen; ++c) {
        const Vector<float, kWidth> y =
            params.routed.Load<kWidth>((row * params.chosen + c) * params.channels + k, count);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum.values[i] += y.values[i];
      }
      const Vector<float, kWidth> y = params.shared.Load<kWidth>(row * params.channels + k, count);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum.values[i] += y.values[i];
      params.out.Store(row * params.out_stride + k, sum, count);
    }
  }
};

template <class Op>
int64_t BlocksOfRow(int64_t elements) {
  return std::max<int64_t>((elements + Op::kThreads * kWidth - 1) / (Op::kThreads * kWidth), 1);
}

absl::Status RecordRouting(Stream& stream, const Params& params) {
  const int64_t rows = params.x.extents[0];
  const int64_t experts = params.gate.rows();
  const int64_t chosen = params.expert_ids.extents[1];
  const Scratch& scratch = params.scratch;
  DSV4_RETURN_IF_ERROR(RecordMatrixProductCuda(stream, {.x = params.x, .weight = params.gate, .out = scratch.scores}));
  DSV4_RETURN_IF_ERROR(Launch<Route>(stream, {.x = rows},
                                     {.bias = WeightPointer<float>(params.bias),
                                      .expert_table = WeightPointer<int32_t>(params.expert_table),
                                      .table_stride = params.expert_table.stride(0),
                                      .by_table = !params.expert_table.empty()},
                                     {.products = scratch.scores.As<float>(),
                                      .experts = experts,
                                      .chosen = chosen,
                                      .routed_scaling_factor = params.routed_scaling_factor,
                                      .row_tokens = params.row_tokens.As<int32_t>(),
                                      .expert_ids = params.expert_ids.As<int32_t>(),
                                      .ids_stride = params.expert_ids.strides[0],
                                      .expert_weights = params.expert_weights.As<float>(),
                                      .weights_stride = params.expert_weights.strides[0]},
                                     2 * experts * static_cast<int64_t>(sizeof(float))));
  return Launch<Group>(stream, {.x = experts}, {},
                       {.expert_ids = params.expert_ids.As<int32_t>(),
                        .ids_stride = params.expert_ids.strides[0],
                        .choices = static_cast<int32_t>(rows * chosen),
                        .chosen = static_cast<int32_t>(chosen),
                        .experts = static_cast<int32_t>(experts),
                        .slots = static_cast<int32_t>(scratch.expert_slots.extents[0]),
                        .expert_slots = scratch.expert_slots.As<int32_t>(),
                        .choice_list = scratch.choices.As<int32_t>()},
                       experts * static_cast<int64_t>(sizeof(int32_t)));
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t rows = params.x.extents[0];
  const int64_t channels = params.x.extents[1];
  const int64_t chosen = params.expert_ids.extents[1];
  const Scratch& scratch = params.scratch;
  if (rows == 0) return absl::OkStatus();
  if (rows * chosen > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("x: expected fewer than 2^31 choices of experts, got ", rows, " x ", chosen));
  }
  DSV4_RETURN_IF_ERROR(RecordRouting(stream, params));

  const auto product = [&](const TensorView& x, const QuantizedWeight& weight, const TensorView& out,
                           const ExpertRows* experts) {
    return RecordMatrixProductCuda(stream, {.x = x,
                                            .weight = weight,
                                            .quantize_activations = params.quantize_activations,
                                            .out = out,
                                            .experts = experts});
  };
  ExpertRows experts = {
      .slots = scratch.expert_slots, .choices = scratch.choices, .choices_per_row = chosen, .rows = rows};
  DSV4_RETURN_IF_ERROR(product(params.x, params.experts.w1, scratch.gate, &experts));
  DSV4_RETURN_IF_ERROR(product(params.x, params.experts.w3, scratch.up, &experts));
  DSV4_RETURN_IF_ERROR(product(params.x, params.shared.w1, scratch.shared_gate, nullptr));
  DSV4_RETURN_IF_ERROR(product(params.x, params.shared.w3, scratch.shared_up, nullptr));

  const int64_t inner = scratch.gate.extents[1];
  const int64_t shared_inner = scratch.shared_gate.extents[1];
  Activate::Params activate = {.limit = params.swiglu_limit};
  activate.parts[0] = {.gate = FloatData::Make(scratch.gate, kWidth),
                       .up = FloatData::Make(scratch.up, kWidth),
                       .rows = rows * chosen,
                       .inner = inner,
                       .weights = params.expert_weights.As<float>(),
                       .weights_stride = params.expert_weights.strides[0],
                       .chosen = static_cast<int32_t>(chosen)};
  activate.parts[1] = {.gate = FloatData::Make(scratch.shared_gate, kWidth),
                       .up = FloatData::Make(scratch.shared_up, kWidth),
                       .rows = rows,
                       .inner = shared_inner,
                       .weights = nullptr,
                       .weights_stride = 0,
                       .chosen = 1};
  DSV4_RETURN_IF_ERROR(Launch<Activate>(
      stream, {.x = rows * chosen, .y = BlocksOfRow<Activate>(std::max(inner, shared_inner)), .z = 2}, {}, activate));

  experts.choices_per_row = 1;
  DSV4_RETURN_IF_ERROR(product(scratch.gate, params.experts.w2, scratch.routed, &experts));
  DSV4_RETURN_IF_ERROR(product(scratch.shared_gate, params.shared.w2, scratch.shared_out, nullptr));
  return Launch<Combine>(stream, {.x = rows, .y = BlocksOfRow<Combine>(channels)}, {},
                         {.routed = FloatData::Make(scratch.routed, kWidth),
                          .shared = FloatData::Make(scratch.shared_out, kWidth),
                          .out = FloatData::Make(params.out, kWidth),
                          .out_stride = params.out.strides[0],
                          .channels = channels,
                          .chosen = chosen});
}

}  // namespace dsv4::moe
