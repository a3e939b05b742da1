#include "ops/embed/embed_cuda.h"

#include <cstdint>

#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"

namespace dsv4::embed {
namespace {

constexpr int kWidth = 8;  // channels of a thread

// A block a row and part of its channels.
template <class Access>
struct CopyRows {
  static constexpr char kName[] = "embed";
  static constexpr int kThreads = 128;
  static constexpr int kChannels = kThreads * kWidth;  // of a block

  struct Weights {
    typename Access::Weight table;
    int64_t table_stride;
  };
  struct Params {
    const int32_t* token_ids;
    typename Access::Data out;
    int64_t row_stride, copy_stride;
    int64_t copies, channels;
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights& weights, const Params& params) {
    const int64_t token = params.token_ids[blockIdx.x];
    const int64_t channel = int64_t{blockIdx.y} * kChannels + threadIdx.x * kWidth;
    const int64_t count = params.channels - channel;
    if (token < 0 || count <= 0) return;
    const Vector<float, kWidth> row = weights.table.template Load<kWidth>(token * weights.table_stride + channel, count);
    for (int64_t copy = 0; copy < params.copies; ++copy) {
      params.out.template Store<kWidth>(blockIdx.x * params.row_stride + copy * params.copy_stride + channel, row, count);
    }
  }
};

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t channels = params.out.extents[2];
  return DispatchAccess({params.out}, {params.table}, kWidth, [&](auto access) {
    using Access = decltype(access);
    using Kernel = CopyRows<Access>;
    return Launch<Kernel>(
        stream, {.x = params.out.extents[0], .y = (channels + Kernel::kChannels - 1) / Kernel::kChannels},
        {.table = Access::Weight::Make(params.table, kWidth), .table_stride = params.table.stride(0)},
        {.token_ids = params.token_ids.As<int32_t>(),
         .out = Access::Data::Make(params.out, kWidth),
         .row_stride = params.out.strides[0],
         .copy_stride = params.out.strides[1],
         .copies = params.out.extents[1],
         .channels = channels});
  });
}

}  // namespace dsv4::embed
