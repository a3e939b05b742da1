// Times the indexer's scores on a GPU, in graphs, between two neighbours of its kind that read other keys.
//
//   bazel run //ops/indexer_logits:bench
//
// Columns: with programmatic launch edges (pdl) and with full ones; of the pdl column, the rate of the products, and the
// bytes of the keys per second, and as a share of a device-to-device copy's (read plus written) in the same run.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/indexer_logits/indexer_logits_cuda.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/paged_rows.h"
#include "runtime/status.h"
#include "tests/graph_timing.h"

namespace dsv4::indexer_logits {
namespace {

constexpr int64_t kHeads = 64, kChannels = 128, kRowsPerPage = 64;
constexpr int64_t kMostRows = 128;
constexpr int64_t kCacheBytes = int64_t{2} << 30;

struct Step {
  int64_t rows;
  int64_t entries;  // of the longest row
  bool skewed = false;  // the others have a hundredth of it
};
constexpr Step kSteps[] = {{1, 512},    {1, 8192},   {8, 8192},        {32, 8192},           {64, 8192},
                           {128, 8192}, {1, 262144}, {4, 262144},      {64, 131072, true}};

struct Buffers {
  Arena arena;
  PagedRows keys;
  TensorView q_values, q_scales, weights, requests, counts, table, logits;
};

absl::StatusOr<std::unique_ptr<Buffers>> CreateBuffers(Device& device, Stream& stream, RowFormat format) {
  auto buffers = std::make_unique<Buffers>();
  Buffers& b = *buffers;
  b.keys = {.format = format, .rows_per_page = kRowsPerPage, .row_size = kChannels};
  const int64_t page_bytes = PageStrideBytes(format, kRowsPerPage, kChannels, 0);
  const int64_t pages = kCacheBytes / page_bytes;
  const bool is_fp4 = format == RowFormat::kMxfp4Key;
  const DType q_dtype = is_fp4 ? DType::kE2m1x2 : format == RowFormat::kFp8Key ? DType::kE4m3 : DType::kBf16;
  DSV4_ASSIGN_OR_RETURN(b.arena, Arena::Create(device, [&](Arena& arena) {
    b.keys.pages = arena.Add(DType::kU8, {pages, page_bytes});
    b.q_values = arena.Add(q_dtype, {kMostRows, kHeads, is_fp4 ? kChannels / 2 : kChannels});
    b.q_scales = arena.Add(DType::kE8m0, {kMostRows, kHeads, kChannels / 32});
    b.weights = arena.Add(DType::kF32, {kMostRows, kHeads});
    b.requests = arena.Add(DType::kI32, {kMostRows});
    b.counts = arena.Add(DType::kI32, {kMostRows});
    b.table = arena.Add(DType::kI32, {int64_t{1} << 22});
    b.logits = arena.Add(DType::kF32, {kMostRows * (int64_t{1} << 17)});
  }));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> page(static_cast<size_t>(page_bytes));
  PagedRows host = b.keys;
  host.pages = TensorView::Contiguous(page.data(), DType::kU8, {1, page_bytes});
  std::vector<float> key(kChannels);
  for (int64_t slot = 0; slot < kRowsPerPage; ++slot) {
    for (float& x : key) x = normal(random);
    EncodeRow(host, slot, key.data());
  }
  for (int64_t i = 0; i < pages; ++i) {
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(b.keys.pages.Row<uint8_t>(i), page.data(), page_bytes));
  }
  std::vector<uint8_t> q(static_cast<size_t>(b.q_values.num_bytes()));
  for (uint8_t& x : q) x = static_cast<uint8_t>(random() & 0xbf);  // no code of a NaN
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(b.q_values.data, q.data(), b.q_values.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Fill(b.q_scales.data, 127, b.q_scales.num_bytes()));
  std::vector<float> weights(static_cast<size_t>(b.weights.num_elements()));
  for (float& x : weights) x = normal(random);
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(b.weights.data, weights.data(), b.weights.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  return buffers;
}

// One set of parameters a copy, each with other pages.
absl::StatusOr<std::vector<Params>> LayOut(const Buffers& buffers, Stream& stream, const Step& step, int copies) {
  const int64_t blocks = (step.entries + kRowsPerPage - 1) / kRowsPerPage;
  if (copies * step.rows * blocks > buffers.table.num_elements() ||
      step.rows * step.entries > buffers.logits.num_elements()) {
    return absl::ResourceExhaustedError("too large a step");
  }
  std::mt19937_64 random(5);
  std::vector<int32_t> table(static_cast<size_t>(copies * step.rows * blocks)), requests, counts;
  for (int32_t& block : table) block = static_cast<int32_t>(random() % static_cast<uint64_t>(buffers.keys.pages.extents[0]));
  for (int64_t i = 0; i < step.rows; ++i) {
    requests.push_back(static_cast<int32_t>(i));
    counts.push_back(static_cast<int32_t>(step.skewed && i > 0 ? step.entries / 100 : step.entries));
  }
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(buffers.table.data, table.data(), static_cast<int64_t>(table.size()) * 4));
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(buffers.requests.data, requests.data(), step.rows * 4));
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(buffers.counts.data, counts.data(), step.rows * 4));
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<Params> sets(static_cast<size_t>(copies));
  for (int i = 0; i < copies; ++i) {
    sets[static_cast<size_t>(i)] = {
        .q_values = buffers.q_values.FirstRows(step.rows),
        .q_scales = buffers.q_scales.FirstRows(step.rows),
        .weights = buffers.weights.FirstRows(step.rows),
        .keys = buffers.keys,
        .block_table = TensorView::Contiguous(buffers.table.At<int32_t>(i * step.rows * blocks), DType::kI32,
                                              {step.rows, blocks}),
        .requests = buffers.requests.FirstRows(step.rows),
        .counts = buffers.counts.FirstRows(step.rows),
        .logits = TensorView::Contiguous(buffers.logits.data, DType::kF32, {step.rows, step.entries})};
  }
  return sets;
}

absl::StatusOr<double> Time(GraphTimer& timer, const std::vector<Params>& sets, bool pdl) {
  pdl::SetEnabled(pdl);
  absl::StatusOr<double> us =
      timer.MicrosecondsPerOp(static_cast<int>(sets.size()), [&](int copy) { return RecordCuda(timer.stream(), sets[copy]); });
  pdl::SetEnabled(true);
  return us;
}

absl::Status Run() {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCuda));
  DSV4_ASSIGN_OR_RETURN(const double bandwidth, CopyBandwidth(*device));
  DSV4_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::Create(*device));
  std::printf("indexer_logits on %s; a device-to-device copy moves %.2f TB/s. Microseconds per op.\n",
              device->name().c_str(), bandwidth * 1e-12);
  for (const RowFormat format : {RowFormat::kFp8Key, RowFormat::kMxfp4Key, RowFormat::kBf16}) {
    DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Buffers> buffers, CreateBuffers(*device, timer.stream(), format));
    std::printf("\n%s keys, %d heads of %d\n", std::string(RowFormatName(format)).c_str(), static_cast<int>(kHeads),
                static_cast<int>(kChannels));
    std::printf("%6s %8s %7s | %8s %8s | %8s %8s %6s\n", "rows", "entries", "copies", "pdl", "full", "TFLOP/s", "GB/s",
                "copy");
    for (const Step& step : kSteps) {
      const int64_t scores = step.skewed ? step.entries + (step.rows - 1) * (step.entries / 100) : step.rows * step.entries;
      const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{4} << 20) / scores, 8, 100));
      DSV4_ASSIGN_OR_RETURN(const std::vector<Params> sets, LayOut(*buffers, timer.stream(), step, copies));
      DSV4_ASSIGN_OR_RETURN(const double pdl, Time(timer, sets, true));
      DSV4_ASSIGN_OR_RETURN(const double full, Time(timer, sets, false));
      const double bytes = static_cast<double>(scores * RowBytes(format, kChannels, 0));
      std::printf("%6d %7d%s %7d | %8.2f %8.2f | %8.0f %8.0f %5.0f%%\n", static_cast<int>(step.rows),
                  static_cast<int>(step.entries), step.skewed ? "s" : " ", copies, pdl, full,
                  2.0 * static_cast<double>(scores * kHeads * kChannels) / (pdl * 1e6), bytes / (pdl * 1e3),
                  100 * bytes / (pdl * 1e-6) / bandwidth);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::indexer_logits

int main() {
  const absl::Status status = dsv4::indexer_logits::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
