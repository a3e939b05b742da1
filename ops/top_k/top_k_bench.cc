// Times the selection on a GPU, in graphs, between two neighbours of its kind on scores of their own.
//
//   bazel run //ops/top_k:bench
//
// Columns: with programmatic launch edges (pdl) and with full ones, where the scores may have any count up to the widest
// of the table (as a model's buffers have) and where exactly so many; and the bytes of the scores per second.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/top_k/top_k_cuda.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/status.h"
#include "tests/graph_timing.h"

namespace dsv4::top_k {
namespace {

constexpr int64_t kWidest = int64_t{1} << 18, kMostRows = 128, kRowsPerBlock = 64;
constexpr int64_t kScores = int64_t{1} << 27;  // of all copies together

struct Step {
  int64_t rows;
  int64_t entries;
  int64_t k;
};
constexpr Step kSteps[] = {{1, 512, 512},    {1, 8192, 512},   {8, 8192, 512},    {32, 8192, 512},   {64, 8192, 512},
                           {128, 8192, 512}, {1, 32768, 512},  {64, 32768, 512},  {1, 262144, 512},  {16, 262144, 512},
                           {1, 8192, 1024},  {64, 8192, 1024}, {1, 262144, 1024}, {1, 262144, 2048}};

absl::Status Run() {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCuda));
  DSV4_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::Create(*device));
  TensorView scores, counts, requests, table, indices, slots;
  DSV4_ASSIGN_OR_RETURN(const Arena arena, Arena::Create(*device, [&](Arena& arena) {
    scores = arena.Add(DType::kF32, {kScores + kMostRows * kWidest});
    counts = arena.Add(DType::kI32, {kMostRows});
    requests = arena.Add(DType::kI32, {kMostRows});
    table = arena.Add(DType::kI32, {kMostRows, kWidest / kRowsPerBlock});
    indices = arena.Add(DType::kI32, {kMostRows * 2048});
    slots = arena.Add(DType::kI32, {kMostRows * 2048});
  }));
  Stream& stream = timer.stream();
  // As an indexer's scores: sums of many rectified products.
  std::vector<float> chunk(int64_t{1} << 22);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(20, 8);
  for (float& x : chunk) x = normal(random);
  for (int64_t begin = 0; begin < scores.num_elements(); begin += static_cast<int64_t>(chunk.size())) {
    const int64_t count = std::min(static_cast<int64_t>(chunk.size()), scores.num_elements() - begin);
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(scores.At<float>(begin), chunk.data(), count * 4));
  }
  DSV4_RETURN_IF_ERROR(stream.Fill(requests.data, 0, requests.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Fill(table.data, 0, table.num_bytes()));

  std::printf("top_k on %s. Microseconds per op.\n", device->name().c_str());
  std::printf("%6s %8s %6s %7s | %8s %8s | %8s %8s\n", "rows", "entries", "k", "copies", "pdl", "full", "pdl, =", "GB/s");
  for (const Step& step : kSteps) {
    const std::vector<int32_t> count(static_cast<size_t>(step.rows), static_cast<int32_t>(step.entries));
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(counts.data, count.data(), step.rows * 4));
    DSV4_RETURN_IF_ERROR(stream.Synchronize());
    const int copies = static_cast<int>(std::clamp<int64_t>(kScores / (step.rows * step.entries), 20, 100));
    const auto time = [&](int64_t width, bool pdl) {
      pdl::SetEnabled(pdl);
      absl::StatusOr<double> us = timer.MicrosecondsPerOp(copies, [&](int copy) {
        // Rows overlap their neighbours' unused columns.
        TensorView logits = {.data = scores.At<float>(copy * step.rows * step.entries % kScores), .dtype = DType::kF32, .rank = 2};
        logits.extents[0] = step.rows;
        logits.extents[1] = width;
        logits.strides[0] = step.entries;
        logits.strides[1] = 1;
        return RecordCuda(stream, {.logits = logits,
                                   .counts = counts.FirstRows(step.rows),
                                   .requests = requests.FirstRows(step.rows),
                                   .block_table = table,
                                   .rows_per_block = kRowsPerBlock,
                                   .indices = TensorView::Contiguous(indices.data, DType::kI32, {step.rows, step.k}),
                                   .slots = TensorView::Contiguous(slots.data, DType::kI32, {step.rows, step.k})});
      });
      pdl::SetEnabled(true);
      return us;
    };
    DSV4_ASSIGN_OR_RETURN(const double pdl, time(kWidest, true));
    DSV4_ASSIGN_OR_RETURN(const double full, time(kWidest, false));
    DSV4_ASSIGN_OR_RETURN(const double exact, time(step.entries, true));
    std::printf("%6d %8d %6d %7d | %8.2f %8.2f | %8.2f %8.0f\n", static_cast<int>(step.rows), static_cast<int>(step.entries),
                static_cast<int>(step.k), copies, pdl, full, exact,
                4.0 * static_cast<double>(step.rows * step.entries) / (pdl * 1e3));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::top_k

int main() {
  const absl::Status status = dsv4::top_k::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
