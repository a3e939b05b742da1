#include <cstdint>

#include "ops/advance_step/advance_step.h"

namespace dsv4::advance_step {
namespace {

// The token that a request's output `index` is forced to; negative if it is not.
int32_t ForcedToken(const TensorView& forced, int32_t request, int64_t index) {
  if (forced.empty() || index >= forced.extents[1]) return -1;
  return *forced.At<int32_t>(request, index);
}

}  // namespace

void RunCpu(const Params& params) {
  int32_t live_rows = 0;
  for (int64_t i = 0; i < params.requests.extents[0]; ++i) {
    int32_t& request = *params.requests.At<int32_t>(i);
    if (request < 0) continue;  // a pad
    int32_t& next_token = *params.next_tokens.At<int32_t>(i);
    int32_t& output_count = *params.output_counts.At<int32_t>(request);
    int32_t& remaining = *params.remaining.At<int32_t>(request);

    const int32_t token = next_token;
    const bool was_forced = ForcedToken(params.forced, request, output_count) >= 0;
    if (output_count < params.outputs.extents[1]) *params.outputs.At<int32_t>(request, output_count) = token;
    output_count += 1;
    remaining -= 1;

    const bool stops = params.eos_token >= 0 && token == params.eos_token && !was_forced &&
                       *params.ignore_eos.At<uint8_t>(request) == 0;
    if (remaining <= 0 || stops) {
      request = -1;
      continue;
    }
    *params.token_ids.At<int32_t>(i) = token;
    *params.positions.At<int64_t>(i) += 1;
    next_token = ForcedToken(params.forced, request, output_count);
    live_rows += 1;
  }
  *params.live_rows.At<int32_t>(0) = live_rows;
}

}  // namespace dsv4::advance_step
