// Getting the save kernels ready for a capture. runtime/warmup.h does it for every op at once; this is for a caller that
// wants this op's kernels only, or tensors to try one with.
//
//   DSV4_RETURN_IF_ERROR(Warmup(device, WarmupKeys(/*head_dim=*/512, /*compress_ratio=*/4)));
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_WARMUP_H_
#define DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_WARMUP_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/arena.h"
#include "runtime/device.h"

namespace dsv4::save_partial_states {

// The smallest tensors that dispatch to `key`: one token, which is a pad.
struct WarmupTensors {
  Arena arena;
  Params params;
};
absl::StatusOr<WarmupTensors> WarmupInputs(Device& device, const CompileKey& key);

// Runs each key's kernel once on its WarmupInputs, so that its first use elsewhere may be inside a capture, also with
// CUDA_MODULE_LOADING=LAZY. Changes nothing but those.
absl::Status Warmup(Device& device, const std::vector<CompileKey>& keys);

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_WARMUP_H_
