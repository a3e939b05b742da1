#include "tests/save_without_wait.h"

#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states_kernel.cuh"
#include "tests/without_wait.cuh"

namespace dsv4 {
namespace save_partial_states {
namespace {

template <int kIndex>
absl::Status LaunchBroken(Stream& stream, const Params& params, const CompileKey& key) {
  using Config = Specialised<kIndex>;
  const KernelParams kernel_params = MakeKernelParams(params, key, SlotCheck(), Config::kTokensAbreast);
  return LaunchWithoutWait<SaveRows<Config>>(stream, GridFor(kernel_params),
                                             {.ape = WeightPointer<float>(params.ape)}, kernel_params);
}

}  // namespace
}  // namespace save_partial_states

absl::Status RecordSaveWithoutWait(Stream& stream, const save_partial_states::Params& params) {
  const save_partial_states::CompileKey key = Dispatch(params);
  switch (FindSpecialised(key)) {
    case 0:
      return save_partial_states::LaunchBroken<0>(stream, params, key);
    case 1:
      return save_partial_states::LaunchBroken<1>(stream, params, key);
    default:
      return absl::InvalidArgumentError("no broken kernel for this key");
  }
}

}  // namespace dsv4
