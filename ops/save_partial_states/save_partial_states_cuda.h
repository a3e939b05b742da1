// The CUDA half of the op. Record calls it; benchmarks and tests may choose the kernel.
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_CUDA_H_
#define DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_CUDA_H_

#include "absl/status/status.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/slot_check.h"
#include "runtime/stream.h"

namespace dsv4::save_partial_states {

enum class KernelChoice {
  kByKey,    // the specialised kernel where there is one (compile_key.h); in checked mode always the generic one
  kGeneric,
};

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params, const SlotCheck& check,
                        KernelChoice choice = KernelChoice::kByKey);

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_CUDA_H_
