#include "ops/save_partial_states/save_partial_states_cuda.h"

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states_kernel.cuh"

namespace dsv4::save_partial_states {
namespace {

template <class Config>
absl::Status LaunchSave(Stream& stream, const Params& params, const CompileKey& key, const SlotCheck& check) {
  const KernelParams kernel_params = MakeKernelParams(params, key, check, Config::kTokensAbreast);
  return Launch<SaveRows<Config>>(stream, GridFor(kernel_params), {.ape = WeightPointer<float>(params.ape)},
                                  kernel_params);
}

using Launcher = absl::Status (*)(Stream&, const Params&, const CompileKey&, const SlotCheck&);

template <size_t... kIndices>
constexpr auto SpecialisedLaunchers(std::index_sequence<kIndices...>) {
  return std::array<Launcher, sizeof...(kIndices)>{&LaunchSave<Specialised<kIndices>>...};
}

template <typename Input, typename Cache>
Launcher GenericLauncher(int64_t vector_width) {
  switch (vector_width) {
    case 4:
      return &LaunchSave<Generic<Input, Cache, 4>>;
    case 2:
      return &LaunchSave<Generic<Input, Cache, 2>>;
    default:
      return &LaunchSave<Generic<Input, Cache, 1>>;
  }
}

Launcher GenericLauncher(const CompileKey& key) {
  if (key.input_dtype == DType::kF32) {
    return key.cache_dtype == DType::kF32 ? GenericLauncher<float, float>(key.vector_width)
                                          : GenericLauncher<float, Bf16>(key.vector_width);
  }
  return key.cache_dtype == DType::kF32 ? GenericLauncher<Bf16, float>(key.vector_width)
                                        : GenericLauncher<Bf16, Bf16>(key.vector_width);
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params, const SlotCheck& check, KernelChoice choice) {
  static constexpr auto kSpecialisedLaunchers =
      SpecialisedLaunchers(std::make_index_sequence<kSpecialisedKeys.size()>());
  const int64_t tokens = params.kv.extents[0];
  if (tokens > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("kv: expected fewer than 2^31 tokens, got ", tokens));
  }
  const CompileKey key = Dispatch(params);
  const bool checked = check.report != nullptr;
  const int specialised = choice == KernelChoice::kByKey && !checked ? FindSpecialised(key) : -1;
  const Launcher launch = specialised >= 0 ? kSpecialisedLaunchers[specialised] : GenericLauncher(key);
  return launch(stream, params, key, check);
}

}  // namespace dsv4::save_partial_states
