// A CUDA graph captured from a stream, for tests and benchmarks.
//
//   DSV4_ASSIGN_OR_RETURN(CapturedGraph graph, CapturedGraph::Capture(stream, [&] { return Record(stream, params); }));
//   DSV4_RETURN_IF_ERROR(graph.Launch(stream));
#ifndef DSV4_TESTS_CAPTURED_GRAPH_H_
#define DSV4_TESTS_CAPTURED_GRAPH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/stream.h"

namespace dsv4 {

class CapturedGraph {
 public:
  // The stream must not be blocking. The capture is ended on an error too, and the error is the first.
  static absl::StatusOr<CapturedGraph> Capture(Stream& stream, const std::function<absl::Status()>& record);

  absl::Status Launch(Stream& stream) const;

  struct Topology {
    int64_t kernels = 0;
    int64_t other_nodes = 0;
    int64_t full_edges = 0;
    int64_t programmatic_edges = 0;
  };
  absl::StatusOr<Topology> GetTopology() const;

 private:
  struct Destroy {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
    void operator()(cudaGraphExec_t executable) const { cudaGraphExecDestroy(executable); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, Destroy> graph_;
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> executable_;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_CAPTURED_GRAPH_H_
