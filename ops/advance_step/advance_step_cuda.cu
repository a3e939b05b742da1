#include "ops/advance_step/advance_step_cuda.h"

#include <cstdint>

#include "runtime/block_reduce.cuh"
#include "runtime/launch.cuh"

namespace dsv4::advance_step {
namespace {

// One block, since it counts the rows that are left; a thread a row.
struct AdvanceRows {
  static constexpr char kName[] = "advance_step";
  static constexpr int kThreads = 256;

  struct Weights {};
  struct Params {
    int32_t* requests;
    int32_t* token_ids;
    int64_t* positions;
    int32_t* next_tokens;
    int64_t rows;
    int32_t* remaining;
    const uint8_t* ignore_eos;
    const int32_t* forced;  // may be null
    int64_t forced_stride, forced_count;
    int32_t eos_token;
    int32_t* outputs;
    int64_t outputs_stride, capacity;
    int32_t* output_counts;
    int32_t* live_rows;
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    __shared__ int32_t counts[kThreads / kWarpThreads];
    int32_t live = 0;
    for (int64_t row = threadIdx.x; row < params.rows; row += kThreads) live += Advance(params, row) ? 1 : 0;
    live = BlockSum<kThreads>(live, counts);
    if (threadIdx.x == 0) *params.live_rows = live;
  }

 private:
  // The token that a request's output `index` is forced to; negative if it is not.
  static __device__ __forceinline__ int32_t ForcedToken(const Params& params, int32_t request, int64_t index) {
    if (params.forced == nullptr || index >= params.forced_count) return -1;
    return params.forced[request * params.forced_stride + index];
  }

  // Whether the row is live afterwards.
  static __device__ __forceinline__ bool Advance(const Params& params, int64_t row) {
    const int32_t request = params.requests[row];
    if (request < 0) return false;  // a pad
    const int32_t token = params.next_tokens[row];
    const int32_t output_count = params.output_counts[request];
    const int32_t remaining = params.remaining[request] - 1;
    const bool was_forced = ForcedToken(params, request, output_count) >= 0;
    if (output_count < params.capacity) params.outputs[request * params.outputs_stride + output_count] = token;
    params.output_counts[request] = output_count + 1;
    params.remaining[request] = remaining;

    const bool stops = params.eos_token >= 0 && token == params.eos_token && !was_forced &&
                       params.ignore_eos[request] == 0;
    if (remaining <= 0 || stops) {
      params.requests[row] = -1;
      return false;
    }
    params.token_ids[row] = token;
    params.positions[row] += 1;
    params.next_tokens[row] = ForcedToken(params, request, output_count + 1);
    return true;
  }
};

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const bool forced = !params.forced.empty();
  return Launch<AdvanceRows>(stream, {.x = 1}, {},
                             {.requests = params.requests.As<int32_t>(),
                              .token_ids = params.token_ids.As<int32_t>(),
                              .positions = params.positions.As<int64_t>(),
                              .next_tokens = params.next_tokens.As<int32_t>(),
                              .rows = params.requests.extents[0],
                              .remaining = params.remaining.As<int32_t>(),
                              .ignore_eos = params.ignore_eos.As<uint8_t>(),
                              .forced = forced ? params.forced.As<int32_t>() : nullptr,
                              .forced_stride = forced ? params.forced.strides[0] : 0,
                              .forced_count = forced ? params.forced.extents[1] : 0,
                              .eos_token = params.eos_token,
                              .outputs = params.outputs.As<int32_t>(),
                              .outputs_stride = params.outputs.strides[0],
                              .capacity = params.outputs.extents[1],
                              .output_counts = params.output_counts.As<int32_t>(),
                              .live_rows = params.live_rows.As<int32_t>()});
}

}  // namespace dsv4::advance_step
