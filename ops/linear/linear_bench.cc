// Times products of the published models on a GPU, in graphs, each copy on a weight of its own, so that weights are
// cold.
//
//   bazel run //ops/linear:bench
//
// A line is a product, its columns numbers of rows: microseconds, and the share of a device-to-device copy's bandwidth
// (in the same run) at which it reads its weight once and its rows once and writes its result.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/linear/linear.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/status.h"
#include "runtime/stream.h"
#include "tests/graph_timing.h"

namespace dsv4::linear {
namespace {

struct Product {
  const char* name;
  DType weight;
  int64_t outputs;
  int64_t inputs;
  int64_t groups = 1;
  DType out = DType::kBf16;
};

constexpr Product kProducts[] = {
    {"flash wq_a", DType::kE4m3, 1024, 4096},
    {"flash wkv", DType::kE4m3, 512, 4096},
    {"flash wq_b", DType::kE4m3, 32768, 1024},
    {"flash wo_a", DType::kE4m3, 1024, 4096, 8},
    {"flash wo_b", DType::kE4m3, 4096, 8192},
    {"flash compressor 4", DType::kBf16, 2048, 4096, 1, DType::kF32},
    {"flash compressor 128", DType::kBf16, 1024, 4096, 1, DType::kF32},
    {"flash indexer wq_b", DType::kE4m3, 8192, 1024},
    {"flash indexer compressor", DType::kBf16, 512, 4096, 1, DType::kF32},
    {"flash weights_proj", DType::kBf16, 64, 4096, 1, DType::kF32},
    {"flash gate", DType::kBf16, 256, 4096, 1, DType::kF32},
    {"flash shared w1", DType::kE4m3, 2048, 4096},
    {"flash expert w1", DType::kE2m1x2, 2048, 4096},
    {"flash head", DType::kBf16, 129280, 4096, 1, DType::kF32},
    {"pro wq_a", DType::kE4m3, 1536, 7168},
    {"pro wq_b", DType::kE4m3, 65536, 1536},
    {"pro wo_a", DType::kE4m3, 1024, 4096, 16},
    {"pro wo_b", DType::kE4m3, 7168, 16384},
};

constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};
constexpr int64_t kMaxRows = 512;
// More than the L2 holds, several times.
constexpr int64_t kWeightBytes = int64_t{512} << 20;

// As many copies as are cold; more where they are small, so that a graph runs long enough.
int Copies(int64_t weight_bytes) { return static_cast<int>(std::clamp<int64_t>(kWeightBytes / weight_bytes, 4, 100)); }

struct Buffers {
  Arena arena;
  std::vector<Params> params;  // of kMaxRows rows
  int64_t weight_bytes = 0;
};

// Everything holds some number: what it is does not matter to the time.
absl::StatusOr<Buffers> LayOut(Device& device, Stream& stream, const Product& product) {
  const bool packed = product.weight == DType::kE2m1x2;
  const int64_t outputs = product.groups * product.outputs;
  const int64_t block_rows = packed ? 1 : 128;
  const int64_t block_cols = packed ? 32 : 128;
  const int64_t stored_cols = packed ? product.inputs / 2 : product.inputs;
  const bool scaled = packed || product.weight == DType::kE4m3;
  Buffers buffers;
  buffers.weight_bytes = outputs * stored_cols * DTypeBytes(product.weight);
  TensorView scales;
  buffers.params.resize(static_cast<size_t>(Copies(buffers.weight_bytes)));
  DSV4_ASSIGN_OR_RETURN(
      buffers.arena, Arena::Create(device, [&](Arena& arena) {
        scales = arena.Add(DType::kE8m0, {(outputs + block_rows - 1) / block_rows, product.inputs / block_cols});
        for (Params& params : buffers.params) {
          params.weight.values = WeightView(arena.Add(product.weight, {outputs, stored_cols}));
          params.x = arena.Add(DType::kBf16, {kMaxRows, product.groups * product.inputs});
          params.out = arena.Add(product.out, {kMaxRows, outputs});
        }
      }));
  DSV4_RETURN_IF_ERROR(stream.Fill(buffers.arena.data(), 0x39, buffers.arena.size_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Fill(scales.data, 120, scales.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  for (Params& params : buffers.params) {
    params.groups = product.groups;
    if (!scaled) continue;
    params.weight.scales = WeightView(scales);
    params.weight.block_rows = block_rows;
    params.weight.block_cols = block_cols;
    params.quantize_activations = product.groups == 1;
  }
  return buffers;
}

absl::Status Run() {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCuda));
  DSV4_ASSIGN_OR_RETURN(const double bandwidth, CopyBandwidth(*device));
  DSV4_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::Create(*device));
  std::printf("linear on %s; a device-to-device copy moves %.2f TB/s. Microseconds, and %% of that by rows.\n%-26s %7s",
              device->name().c_str(), bandwidth * 1e-12, "", "floor");
  for (const int64_t rows : kRows) std::printf(" | %5d rows ", static_cast<int>(rows));
  std::printf("\n");
  for (const Product& product : kProducts) {
    DSV4_ASSIGN_OR_RETURN(const Buffers buffers, LayOut(*device, timer.stream(), product));
    std::printf("%-26s %7.2f", product.name, static_cast<double>(buffers.weight_bytes) / bandwidth * 1e6);
    for (const int64_t rows : kRows) {
      const auto record = [&](int copy) {
        Params params = buffers.params[static_cast<size_t>(copy)];
        params.x = params.x.FirstRows(rows);
        params.out = params.out.FirstRows(rows);
        return Record(timer.stream(), params);
      };
      DSV4_RETURN_IF_ERROR(record(0));  // chooses algorithms, before a capture
      DSV4_RETURN_IF_ERROR(timer.stream().Synchronize());
      DSV4_ASSIGN_OR_RETURN(const double us,
                            timer.MicrosecondsPerOp(static_cast<int>(buffers.params.size()), record, {.replays = 10}));
      const Params& params = buffers.params[0];
      const double bytes = static_cast<double>(buffers.weight_bytes + params.x.FirstRows(rows).num_bytes() +
                                               params.out.FirstRows(rows).num_bytes());
      std::printf(" | %6.2f %3.0f%%", us, 100 * bytes / (us * 1e-6) / bandwidth);
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::linear

int main() {
  const absl::Status status = dsv4::linear::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
