#include "ops/mtp_input/mtp_input_cuda.h"

#include <cstdint>

#include "runtime/division.cuh"
#include "runtime/float_access.cuh"
#include "runtime/launch.cuh"

namespace dsv4::mtp_input {
namespace {

constexpr int kWidth = 8;  // channels of a thread

// A block a stream of a row and part of its channels.
template <class Access>
struct AddStreams {
  static constexpr char kName[] = "mtp_input";
  static constexpr int kThreads = 128;
  static constexpr int kChannels = kThreads * kWidth;  // of a block

  struct Weights {};
  struct Params {
    typename Access::Data e;
    int64_t e_stride;
    typename Access::Data h;
    int64_t h_row_stride, h_stream_stride;
    typename Access::Data out;
    int64_t out_row_stride, out_stream_stride;
    int64_t streams, channels;
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    const auto [row, stream] = Divide(blockIdx.x, params.streams);
    const int64_t channel = int64_t{blockIdx.y} * kChannels + threadIdx.x * kWidth;
    const int64_t count = params.channels - channel;
    if (count <= 0) return;
    Vector<float, kWidth> sum = params.e.template Load<kWidth>(row * params.e_stride + channel, count);
    const Vector<float, kWidth> h =
        params.h.template Load<kWidth>(row * params.h_row_stride + stream * params.h_stream_stride + channel, count);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum.values[i] += h.values[i];
    params.out.template Store<kWidth>(row * params.out_row_stride + stream * params.out_stream_stride + channel, sum, count);
  }
};

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const int64_t rows = params.out.extents[0], streams = params.out.extents[1], channels = params.out.extents[2];
  return DispatchAccess({params.e, params.h, params.out}, {}, kWidth, [&](auto access) {
    using Access = decltype(access);
    using Kernel = AddStreams<Access>;
    return Launch<Kernel>(stream, {.x = rows * streams, .y = (channels + Kernel::kChannels - 1) / Kernel::kChannels},
                          {},
                          {.e = Access::Data::Make(params.e, kWidth),
                           .e_stride = params.e.strides[0],
                           .h = Access::Data::Make(params.h, kWidth),
                           .h_row_stride = params.h.strides[0],
                           .h_stream_stride = params.h.strides[1],
                           .out = Access::Data::Make(params.out, kWidth),
                           .out_row_stride = params.out.strides[0],
                           .out_stream_stride = params.out.strides[1],
                           .streams = streams,
                           .channels = channels});
  });
}

}  // namespace dsv4::mtp_input
