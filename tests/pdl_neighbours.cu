#include "tests/pdl_neighbours.h"

#include "runtime/launch.cuh"
#include "tests/without_wait.cuh"

namespace dsv4 {
namespace {

// Few blocks, so that dependents find room on the device while these sleep.
constexpr int64_t kBlocks = 16;

struct NoWeights {};

__device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

struct CopyAfterDelay {
  static constexpr char kName[] = "slow_copy";
  static constexpr int kThreads = 256;
  using Weights = NoWeights;
  struct Params {
    SlowCopy copy;
    uint64_t delay_ns;
  };
  static __device__ void Prefetch(const Weights&) {}
  static __device__ void Run(const Weights&, const Params& params) {
    const uint64_t start = Nanoseconds();
    while (Nanoseconds() - start < params.delay_ns) __nanosleep(200);
    const SlowCopy& copy = params.copy;
    const auto* const source =
        static_cast<const uint32_t*>(*copy.turn % 2 == 0 ? copy.sources.data()[0] : copy.sources.data()[1]);
    auto* const destination = static_cast<uint32_t*>(copy.destination);
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < copy.bytes / 4; i += int64_t{gridDim.x} * kThreads) {
      destination[i] = source[i];
    }
  }
};

struct CountDifferences {
  static constexpr char kName[] = "compare";
  static constexpr int kThreads = 256;
  using Weights = NoWeights;
  struct Params {
    const void* actual;
    Choices expected;
    int64_t bytes;
    const uint32_t* turn;
    unsigned long long* differences;
  };
  static __device__ void Prefetch(const Weights&) {}
  static __device__ void Run(const Weights&, const Params& params) {
    const auto* const actual = static_cast<const uint32_t*>(params.actual);
    const auto* const expected =
        static_cast<const uint32_t*>(*params.turn % 2 == 0 ? params.expected.data()[0] : params.expected.data()[1]);
    unsigned long long differences = 0;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.bytes / 4;
         i += int64_t{gridDim.x} * kThreads) {
      differences += actual[i] != expected[i] ? 1 : 0;
    }
    if (differences != 0) atomicAdd(params.differences, differences);
  }
};

struct IncrementTurn {
  static constexpr char kName[] = "next_turn";
  static constexpr int kThreads = 1;
  using Weights = NoWeights;
  struct Params {
    uint32_t* turn;
  };
  static __device__ void Prefetch(const Weights&) {}
  static __device__ void Run(const Weights&, const Params& params) { *params.turn += 1; }
};

CountDifferences::Params CompareParams(const void* actual, const Choices& expected, int64_t bytes,
                                       const uint32_t* turn, uint64_t* differences) {
  static_assert(sizeof(uint64_t) == sizeof(unsigned long long));
  return {actual, expected, bytes, turn, reinterpret_cast<unsigned long long*>(differences)};
}

}  // namespace

absl::Status RecordSlowCopy(Stream& stream, const SlowCopy& copy, int64_t delay_us) {
  return Launch<CopyAfterDelay>(stream, {.x = kBlocks}, {}, {copy, static_cast<uint64_t>(delay_us) * 1000});
}

absl::Status RecordCompare(Stream& stream, const void* actual, const Choices& expected, int64_t bytes,
                           const uint32_t* turn, uint64_t* differences) {
  return Launch<CountDifferences>(stream, {.x = kBlocks}, {}, CompareParams(actual, expected, bytes, turn, differences));
}

absl::Status RecordCompareWithoutWait(Stream& stream, const void* actual, const Choices& expected, int64_t bytes,
                                      const uint32_t* turn, uint64_t* differences) {
  return LaunchWithoutWait<CountDifferences>(stream, {.x = kBlocks}, {},
                                             CompareParams(actual, expected, bytes, turn, differences));
}

absl::Status RecordNextTurn(Stream& stream, uint32_t* turn) {
  return Launch<IncrementTurn>(stream, {.x = 1}, {}, {turn});
}

}  // namespace dsv4
