#include "tests/read_memory.h"

#include "runtime/launch.cuh"

namespace dsv4 {
namespace {

struct ReadMemory {
  static constexpr char kName[] = "read_memory";
  static constexpr int kThreads = 256;
  struct Weights {};
  struct Params {
    const uint4* memory;
    uint32_t* sums;
    int64_t vectors;
  };
  static __device__ void Prefetch(const Weights&) {}
  static __device__ void Run(const Weights&, const Params& params) {
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    uint32_t sum = 0;
#pragma unroll 4
    for (int64_t i = thread; i < params.vectors; i += kReadMemoryThreads) {
      const uint4 bits = params.memory[i];
      sum += bits.x ^ bits.y ^ bits.z ^ bits.w;
    }
    params.sums[thread] = sum;
  }
};

}  // namespace

absl::Status RecordReadMemory(Stream& stream, const TensorView& memory, const TensorView& sums) {
  return Launch<ReadMemory>(stream, {.x = kReadMemoryThreads / ReadMemory::kThreads}, {},
                            {static_cast<const uint4*>(memory.data), static_cast<uint32_t*>(sums.data),
                             memory.num_bytes() / static_cast<int64_t>(sizeof(uint4))});
}

}  // namespace dsv4
