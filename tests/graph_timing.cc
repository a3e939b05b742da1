#include "tests/graph_timing.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "runtime/cuda_device.h"
#include "runtime/cuda_status.h"
#include "runtime/status.h"
#include "tests/captured_graph.h"
#include "tests/read_memory.h"

namespace dsv4 {
namespace {

constexpr int64_t kFlushBytes = int64_t{256} << 20;  // several times the L2

class Event {
 public:
  Event() { cudaEventCreate(&event_); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// The median time of `work` on the stream, in microseconds.
absl::StatusOr<double> MedianMicroseconds(Stream& stream, int repeats, const std::function<absl::Status()>& before,
                                          const std::function<absl::Status()>& work) {
  const Event start, stop;
  std::vector<double> times;
  for (int i = -2; i < repeats; ++i) {  // the first two warm up
    DSV4_RETURN_IF_ERROR(before());
    DSV4_RETURN_IF_CUDA_ERROR("event", cudaEventRecord(start.get(), CudaStreamOf(stream)));
    DSV4_RETURN_IF_ERROR(work());
    DSV4_RETURN_IF_CUDA_ERROR("event", cudaEventRecord(stop.get(), CudaStreamOf(stream)));
    DSV4_RETURN_IF_ERROR(stream.Synchronize());
    float milliseconds = 0;
    DSV4_RETURN_IF_CUDA_ERROR("event", cudaEventElapsedTime(&milliseconds, start.get(), stop.get()));
    if (i >= 0) times.push_back(milliseconds * 1e3);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

}  // namespace

absl::StatusOr<double> CopyBandwidth(Device& device) {
  constexpr int64_t kBytes = int64_t{2} << 30;
  TensorView from, to;
  DSV4_ASSIGN_OR_RETURN(const Arena arena, Arena::Create(device, [&](Arena& arena) {
                          from = arena.Add(DType::kU8, {kBytes});
                          to = arena.Add(DType::kU8, {kBytes});
                        }));
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device.CreateStream());
  DSV4_RETURN_IF_ERROR(stream->Fill(from.data, 0x5a, kBytes));
  DSV4_ASSIGN_OR_RETURN(const double us, MedianMicroseconds(
                                             *stream, 10, [] { return absl::OkStatus(); },
                                             [&]() -> absl::Status {
                                               DSV4_RETURN_IF_CUDA_ERROR(
                                                   "copy", cudaMemcpyAsync(to.data, from.data, kBytes,
                                                                           cudaMemcpyDeviceToDevice,
                                                                           CudaStreamOf(*stream)));
                                               return absl::OkStatus();
                                             }));
  return 2.0 * kBytes / (us * 1e-6);
}

absl::StatusOr<GraphTimer> GraphTimer::Create(Device& device) {
  GraphTimer timer;
  DSV4_ASSIGN_OR_RETURN(timer.arena_, Arena::Create(device, [&](Arena& arena) {
                          timer.flush_ = arena.Add(DType::kU8, {kFlushBytes});
                          timer.sums_ = arena.Add(DType::kI32, {kReadMemoryThreads});
                        }));
  DSV4_ASSIGN_OR_RETURN(timer.stream_, device.CreateStream());
  DSV4_RETURN_IF_ERROR(timer.stream_->Fill(timer.flush_.data, 1, kFlushBytes));
  return timer;
}

absl::StatusOr<double> GraphTimer::MicrosecondsPerOp(int copies, const std::function<absl::Status(int copy)>& record,
                                                     const Options& options) {
  DSV4_ASSIGN_OR_RETURN(const CapturedGraph graph, CapturedGraph::Capture(*stream_, [&] {
                          for (int copy = 0; copy < copies; ++copy) {
                            DSV4_RETURN_IF_ERROR(record(copy));
                          }
                          return absl::OkStatus();
                        }));
  DSV4_ASSIGN_OR_RETURN(const double us, MedianMicroseconds(
                                             *stream_, options.replays,
                                             // Keeps the device busy until the timed launch is in its queue.
                                             [&] {
                                               return options.flush_l2 ? RecordReadMemory(*stream_, flush_, sums_)
                                                                       : graph.Launch(*stream_);
                                             },
                                             [&] { return graph.Launch(*stream_); }));
  return us / copies;
}

}  // namespace dsv4
