// The save kernel: one body, compiled for a key's constants or for sizes that it reads from its parameters.
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_KERNEL_CUH_
#define DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_KERNEL_CUH_

#include <cstdint>
#include <type_traits>

#include "ops/save_partial_states/compile_key.h"
#include "runtime/launch.cuh"
#include "runtime/slot_check.cuh"
#include "runtime/vector_access.cuh"

namespace dsv4::save_partial_states {

struct KernelParams {
  const void* kv;
  const void* score;
  const int64_t* positions;
  const int64_t* slots;
  void* state_cache;
  uint32_t tokens;
  uint32_t tokens_per_block;
  CompileKey key;    // unused by a specialised kernel
  SlotCheck check;   // likewise: in checked mode the generic kernel serves
};

// For a kernel that saves `tokens_abreast` tokens of a block at a time.
inline KernelParams MakeKernelParams(const Params& params, const CompileKey& key, const SlotCheck& check,
                                     int64_t tokens_abreast) {
  const int64_t tokens = params.kv.extents[0];
  return {.kv = params.kv.data,
          .score = params.score.data,
          .positions = params.positions.As<int64_t>(),
          .slots = params.slots.As<int64_t>(),
          .state_cache = params.state_cache.data,
          .tokens = static_cast<uint32_t>(tokens),
          .tokens_per_block = static_cast<uint32_t>(TokensPerBlock(tokens, tokens_abreast)),
          .key = key,
          .check = check};
}
inline Grid GridFor(const KernelParams& params) {
  return {.x = (int64_t{params.tokens} + params.tokens_per_block - 1) / params.tokens_per_block};
}

// A kernel for kSpecialisedKeys[kIndex].
template <int kIndex>
struct Specialised {
  using Input = float;
  using Cache = float;
  static constexpr CompileKey kKey = kSpecialisedKeys[kIndex];
  static constexpr bool kSpecialised = true;
  static constexpr int kVectorWidth = static_cast<int>(kKey.vector_width);
  static constexpr int kThreadsPerToken = static_cast<int>(kKey.head_size) / kVectorWidth;
  static constexpr int kTokensAbreast = kThreadsPerToken < 128 ? 128 / kThreadsPerToken : 1;
  static __device__ __forceinline__ constexpr CompileKey Key(const KernelParams&) { return kKey; }
};

// A kernel for any sizes that allow accesses of kVectorWidth elements.
template <typename InputType, typename CacheType, int kWidth>
struct Generic {
  using Input = InputType;
  using Cache = CacheType;
  static constexpr bool kSpecialised = false;
  static constexpr int kVectorWidth = kWidth;
  static constexpr int kThreadsPerToken = 128;
  static constexpr int kTokensAbreast = 1;
  static __device__ __forceinline__ const CompileKey& Key(const KernelParams& params) { return params.key; }
};

template <class Config>
struct SaveRows {
  static constexpr char kName[] = "save_partial_states";
  static constexpr int kThreads = Config::kThreadsPerToken * Config::kTokensAbreast;
  // The earlier the next kernel is resident, the sooner it has its ape: 0.03 to 0.1 us on an H200.
  static constexpr Trigger kTrigger = Trigger::kBeforeWait;

  struct Weights {
    WeightPointer<float> ape;
  };
  using Params = KernelParams;

  static constexpr int kWidth = Config::kVectorWidth;
  using Floats = Vector<float, kWidth>;
  using Input = typename Config::Input;
  using Cache = typename Config::Cache;

  // With few phases, a thread of a specialised kernel holds its columns of all of them across the wait.
  static constexpr bool HoldsApe() {
    if constexpr (Config::kSpecialised) {
      return Config::kKey.compress_ratio == 4;
    } else {
      return false;
    }
  }
  struct HeldApe {
    Floats phases[HoldsApe() ? 4 : 1];
  };

  static __device__ __forceinline__ int Column() { return threadIdx.x % Config::kThreadsPerToken * kWidth; }

  static __device__ __forceinline__ HeldApe Prefetch(const Weights& weights) {
    HeldApe held = {};
    if constexpr (HoldsApe()) {
#pragma unroll
      for (int phase = 0; phase < 4; ++phase) {
        held.phases[phase] = weights.ape.template LoadVector<kWidth>(phase * Config::kKey.ape_stride + Column());
      }
    } else if constexpr (Config::kSpecialised) {
      constexpr int kLine = 128 / sizeof(float);
      constexpr int kElements = static_cast<int>(Config::kKey.compress_ratio * Config::kKey.ape_stride);
      for (int i = (blockIdx.x * kThreads + threadIdx.x) * kLine; i < kElements; i += gridDim.x * kThreads * kLine) {
        weights.ape.PrefetchToL2(i);
      }
    }
    return held;
  }

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params, const HeldApe& held) {
    const CompileKey& key = Config::Key(params);
    constexpr int kStep = Config::kThreadsPerToken * kWidth;
    const uint32_t begin = blockIdx.x * params.tokens_per_block;
    const uint32_t end = min(begin + params.tokens_per_block, params.tokens);
    for (uint32_t token = begin + threadIdx.x / Config::kThreadsPerToken; token < end; token += Config::kTokensAbreast) {
      const int64_t slot = params.slots[token];
      const Input* const kv = static_cast<const Input*>(params.kv) + token * key.kv_stride;
      const Input* const score = static_cast<const Input*>(params.score) + token * key.score_stride;
      if constexpr (Config::kSpecialised) {
        // The rows set out for the L2 while the slot is on its way. A hint, not a read: a pad's rows come in vain, and
        // nothing uses them. 0.15 to 0.25 us on an H200 where the rows are in memory.
        PrefetchToL2(params.positions + token);
        PrefetchToL2(kv + Column());
        PrefetchToL2(score + Column());
      }
      if (slot < 0) continue;
      if constexpr (!Config::kSpecialised) {
        // One token abreast: the whole block is at the same token.
        if (params.check.report != nullptr && !BlockAcceptsSlot(params.check, token)) continue;
      }
      const int64_t phase = Divide(params.positions[token], key.compress_ratio).remainder;
      const auto [block, row] = Divide(slot, key.block_size);
      Cache* const out = static_cast<Cache*>(params.state_cache) + block * key.block_stride + row * key.row_stride;
      for (int64_t column = Column(); column < key.head_size; column += kStep) {
        const Floats u = ToFloats(LoadVector<Input, kWidth>(kv + column));
        const Floats g = ToFloats(LoadVector<Input, kWidth>(score + column));
        const Floats ape = Ape(weights, held, phase, column, key);
        Floats sum;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum.values[i] = g.values[i] + ape.values[i];
        StoreVector(out + column, FromFloats<Cache>(u));
        StoreVector(out + key.state_width + column, FromFloats<Cache>(sum));
      }
    }
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void PrefetchToL2(const T* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
  }

  static __device__ __forceinline__ Floats Ape(const Weights& weights, const HeldApe& held, int64_t phase,
                                               int64_t column, const CompileKey& key) {
    if constexpr (HoldsApe()) {
      // Selects, since an index would put the array into memory.
      Floats ape;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float even = (phase & 2) != 0 ? held.phases[2].values[i] : held.phases[0].values[i];
        const float odd = (phase & 2) != 0 ? held.phases[3].values[i] : held.phases[1].values[i];
        ape.values[i] = (phase & 1) != 0 ? odd : even;
      }
      return ape;
    } else {
      return weights.ape.template LoadVector<kWidth>(phase * key.ape_stride + column);
    }
  }

  struct Division {
    int64_t quotient, remainder;
  };
  // Of a value >= 0: shifts and masks where the divisor is a constant power of two, and no 64-bit division where the
  // numbers are small. A negative value gives a remainder in range all the same.
  static __device__ __forceinline__ Division Divide(int64_t value, int64_t divisor) {
    const auto a = static_cast<uint64_t>(value), b = static_cast<uint64_t>(divisor);
    if (Config::kSpecialised || ((a | b) >> 32) != 0) return {static_cast<int64_t>(a / b), static_cast<int64_t>(a % b)};
    const auto a32 = static_cast<uint32_t>(a), b32 = static_cast<uint32_t>(b);
    return {a32 / b32, a32 % b32};
  }
};

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_PARTIAL_STATES_KERNEL_CUH_
