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

struct Tuning {
  static constexpr Trigger kTrigger = Trigger::kAfterWait;
  static constexpr int kTokensInFlight = 4;
  static constexpr bool kStreaming = false;
  static constexpr bool kHoldApe = true;
  static constexpr bool kPrefetchRows = false;
};
struct GenericTuning : Tuning {
  static constexpr int kTokensInFlight = 1;
};

template <class Config>
absl::Status LaunchSave(Stream& stream, KernelParams params, const WeightView& ape) {
  using Op = SaveRows<Config>;
  const int64_t tokens_per_block = TokensPerBlock(params.tokens, Config::kTokensAbreast);
  params.tokens_per_block = static_cast<uint32_t>(tokens_per_block);
  return Launch<Op>(stream, {.x = (params.tokens + tokens_per_block - 1) / tokens_per_block},
                    {.ape = WeightPointer<float>(ape)}, params);
}

using Launcher = absl::Status (*)(Stream&, KernelParams, const WeightView&);

template <size_t... kIndices>
constexpr auto SpecialisedLaunchers(std::index_sequence<kIndices...>) {
  return std::array<Launcher, sizeof...(kIndices)>{&LaunchSave<Specialised<kIndices, Tuning>>...};
}

template <typename Input, typename Cache>
Launcher GenericLauncher(int64_t vector_width) {
  switch (vector_width) {
    case 4:
      return &LaunchSave<Generic<Input, Cache, 4, GenericTuning>>;
    case 2:
      return &LaunchSave<Generic<Input, Cache, 2, GenericTuning>>;
    default:
      return &LaunchSave<Generic<Input, Cache, 1, GenericTuning>>;
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
  return launch(stream,
                {.kv = params.kv.data,
                 .score = params.score.data,
                 .positions = params.positions.As<int64_t>(),
                 .slots = params.slots.As<int64_t>(),
                 .state_cache = params.state_cache.data,
                 .tokens = static_cast<uint32_t>(tokens),
                 .tokens_per_block = 0,
                 .key = key,
                 .check = check},
                params.ape);
}

}  // namespace dsv4::save_partial_states
