// How benchmarks time an op: a CUDA graph that holds a chain of copies of it, each on buffers of its own, replayed many
// times. So every copy stands between two neighbours of its kind, and buffers larger together than the L2 are cold.
//
//   DSV4_ASSIGN_OR_RETURN(double bandwidth, CopyBandwidth(*device));     // the yardstick, from the same run
//   DSV4_ASSIGN_OR_RETURN(double us, timer.MicrosecondsPerOp(copies, [&](int copy) { return Record(stream, p[copy]); }));
#ifndef DSV4_TESTS_GRAPH_TIMING_H_
#define DSV4_TESTS_GRAPH_TIMING_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dsv4 {

// Bytes read plus bytes written per second by a device-to-device copy of 2 GiB, the median of several.
absl::StatusOr<double> CopyBandwidth(Device& device);

class GraphTimer {
 public:
  static absl::StatusOr<GraphTimer> Create(Device& device);

  Stream& stream() { return *stream_; }

  struct Options {
    int replays = 30;
    // Before each replay the L2 is filled with other data, so that even the smallest buffers are cold.
    bool flush_l2 = false;
  };
  // The median over replays, divided by `copies`. `record` records the copy'th op on stream().
  absl::StatusOr<double> MicrosecondsPerOp(int copies, const std::function<absl::Status(int copy)>& record,
                                           const Options& options);
  absl::StatusOr<double> MicrosecondsPerOp(int copies, const std::function<absl::Status(int copy)>& record) {
    return MicrosecondsPerOp(copies, record, Options());
  }

 private:
  std::unique_ptr<Stream> stream_;
  Arena arena_;
  TensorView flush_;  // what is read to fill the L2
  TensorView sums_;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_GRAPH_TIMING_H_
