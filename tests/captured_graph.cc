#include "tests/captured_graph.h"

#include <vector>

#include "runtime/cuda_device.h"
#include "runtime/cuda_status.h"
#include "runtime/status.h"

namespace dsv4 {

absl::StatusOr<CapturedGraph> CapturedGraph::Capture(Stream& stream, const std::function<absl::Status()>& record) {
  const cudaStream_t cuda_stream = CudaStreamOf(stream);
  DSV4_RETURN_IF_CUDA_ERROR("capture", cudaStreamBeginCapture(cuda_stream, cudaStreamCaptureModeThreadLocal));
  const absl::Status recorded = record();
  cudaGraph_t raw_graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(cuda_stream, &raw_graph);
  CapturedGraph captured;
  captured.graph_.reset(raw_graph);
  if (!recorded.ok()) cudaGetLastError();
  DSV4_RETURN_IF_ERROR(recorded);
  DSV4_RETURN_IF_CUDA_ERROR("capture", ended);
  cudaGraphExec_t raw_executable = nullptr;
  DSV4_RETURN_IF_CUDA_ERROR("instantiate", cudaGraphInstantiate(&raw_executable, raw_graph, 0));
  captured.executable_.reset(raw_executable);
  DSV4_RETURN_IF_CUDA_ERROR("upload", cudaGraphUpload(raw_executable, cuda_stream));
  return captured;
}

absl::Status CapturedGraph::Launch(Stream& stream) const {
  DSV4_RETURN_IF_CUDA_ERROR("graph launch", cudaGraphLaunch(executable_.get(), CudaStreamOf(stream)));
  return absl::OkStatus();
}

absl::StatusOr<CapturedGraph::Topology> CapturedGraph::GetTopology() const {
  Topology topology;
  size_t count = 0;
  DSV4_RETURN_IF_CUDA_ERROR("graph nodes", cudaGraphGetNodes(graph_.get(), nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) DSV4_RETURN_IF_CUDA_ERROR("graph nodes", cudaGraphGetNodes(graph_.get(), nodes.data(), &count));
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    DSV4_RETURN_IF_CUDA_ERROR("graph node", cudaGraphNodeGetType(node, &type));
    (type == cudaGraphNodeTypeKernel ? topology.kernels : topology.other_nodes) += 1;
  }
  DSV4_RETURN_IF_CUDA_ERROR("graph edges", cudaGraphGetEdges(graph_.get(), nullptr, nullptr, nullptr, &count));
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> edges(count);
  if (count > 0) {
    DSV4_RETURN_IF_CUDA_ERROR("graph edges",
                              cudaGraphGetEdges(graph_.get(), from.data(), to.data(), edges.data(), &count));
  }
  for (const cudaGraphEdgeData& edge : edges) {
    const bool programmatic = edge.type == cudaGraphDependencyTypeProgrammatic;
    (programmatic ? topology.programmatic_edges : topology.full_edges) += 1;
  }
  return topology;
}

}  // namespace dsv4
