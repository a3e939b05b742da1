// Times attention on a GPU, in graphs, between two neighbours of its kind that read other cache rows.
//
//   bazel run //ops/sparse_attention:bench
//
// Columns: with programmatic launch edges (pdl) and with full ones, in the number of splits that split_plan.h gives; of the
// pdl column, the rate of the products, and the bytes of cached rows, queries and results over a device-to-device copy's
// bandwidth in the same run; with pdl edges in other numbers of splits. FlashMLA's figures are those of its FP8 decode kernel with its combination, on an H200.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/sparse_attention/sparse_attention_cuda.h"
#include "ops/sparse_attention/split_plan.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/paged_rows.h"
#include "runtime/status.h"
#include "tests/graph_timing.h"

namespace dsv4::sparse_attention {
namespace {

constexpr int64_t kChannels = 512, kRotary = 64, kRowsPerPage = 64, kWindow = 128;
constexpr int64_t kMostRows = 128, kMostHeads = 128;
constexpr int64_t kMostParts = 640;  // splits of all rows together
constexpr int64_t kOtherSplits[] = {1, 2, 3, 5, 10, 20, 64};
constexpr int64_t kCacheBytes = int64_t{2} << 30;
constexpr int kQuerySets = 4;  // a model's layers use one buffer, so it is warm

struct Layer {
  int64_t heads;
  int64_t entries;
  std::vector<int64_t> rows;
  std::map<int64_t, double> flash_mla_us;  // by rows
};

const Layer kLayers[] = {
    {64, 512, {1, 8, 32, 64, 128}, {{1, 12.2}, {8, 14.5}, {32, 24.8}, {64, 44.0}, {128, 45.4}}},
    {128, 1024, {1, 8, 32, 64, 128}, {{1, 13.9}, {8, 20.5}, {32, 46.3}, {64, 55.0}, {128, 105.9}}},
    {64, 0, {1, 8, 32, 64, 128}, {}},
    {64, 8192, {1, 8}, {}},
};

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Create(Device& device, RowFormat format) {
    auto bench = std::make_unique<Bench>();
    PagedRows& cache = bench->cache_;
    cache = {.format = format, .rows_per_page = kRowsPerPage, .row_size = kChannels, .rope_size = kRotary};
    const int64_t page_bytes = PageStrideBytes(format, kRowsPerPage, kChannels, kRotary);
    const int64_t pages = kCacheBytes / page_bytes;
    DSV4_ASSIGN_OR_RETURN(bench->arena_, Arena::Create(device, [&](Arena& arena) {
      cache.pages = arena.Add(DType::kU8, {pages, page_bytes});
      for (int i = 0; i < kQuerySets; ++i) {
        bench->q_[i] = arena.Add(DType::kBf16, {kMostRows * kMostHeads * kChannels});
        bench->out_[i] = arena.Add(DType::kBf16, {kMostRows * kMostHeads * kChannels});
        bench->lse_[i] = arena.Add(DType::kF32, {kMostRows * kMostHeads});
      }
      bench->sink_ = arena.Add(DType::kF32, {kMostHeads});
      bench->slots_ = arena.Add(DType::kI32, {int64_t{64} << 20});
      bench->split_out_ = arena.Add(DType::kF32, {kMostParts * kMostHeads * kChannels});
      bench->split_sums_ = arena.Add(DType::kF32, {kMostParts * kMostHeads * 2});
    }));
    DSV4_ASSIGN_OR_RETURN(bench->stream_, device.CreateStream());
    DSV4_RETURN_IF_ERROR(bench->Fill());
    return bench;
  }

  int Copies(const Layer& layer, int64_t rows) const {
    return static_cast<int>(std::clamp<int64_t>((int64_t{1} << 20) / (rows * (kWindow + layer.entries)), 20, 200));
  }

  // One set of parameters a copy, with its own lists.
  absl::StatusOr<std::vector<Params>> LayOut(const Layer& layer, int64_t rows, int copies, int64_t splits) {
    const int64_t pages = cache_.pages.extents[0];
    const int64_t entry_pages = std::max<int64_t>(2 * layer.entries / kRowsPerPage, 1);
    std::mt19937_64 random(3);
    std::vector<int32_t> slots;
    std::vector<int32_t> region(static_cast<size_t>(entry_pages * kRowsPerPage));
    for (int i = 0; i < copies; ++i) {
      for (int64_t row = 0; row < rows; ++row) {
        const auto first = static_cast<int32_t>(random() % static_cast<uint64_t>(pages - 2) * kRowsPerPage);
        for (int32_t t = 0; t < kWindow; ++t) slots.push_back(first + t);
      }
      for (int64_t row = 0; row < rows; ++row) {
        const auto begin = static_cast<int32_t>(random() % static_cast<uint64_t>(pages - entry_pages) * kRowsPerPage);
        for (size_t t = 0; t < region.size(); ++t) region[t] = begin + static_cast<int32_t>(t);
        std::shuffle(region.begin(), region.end(), random);
        std::sort(region.begin(), region.begin() + layer.entries);
        slots.insert(slots.end(), region.begin(), region.begin() + layer.entries);
      }
    }
    if (static_cast<int64_t>(slots.size()) > slots_.num_elements()) return absl::ResourceExhaustedError("too many slots");
    DSV4_RETURN_IF_ERROR(stream_->CopyToDevice(slots_.data, slots.data(), static_cast<int64_t>(slots.size()) * 4));
    DSV4_RETURN_IF_ERROR(stream_->Synchronize());

    std::vector<Params> sets(static_cast<size_t>(copies));
    int64_t used = 0;
    const auto list = [&](int64_t width) {
      const TensorView view = TensorView::Contiguous(slots_.At<int32_t>(used), DType::kI32, {rows, width});
      used += rows * width;
      return view;
    };
    const auto shaped = [](const TensorView& buffer, std::initializer_list<int64_t> extents) {
      return TensorView::Contiguous(buffer.data, buffer.dtype, extents);
    };
    for (int i = 0; i < copies; ++i) {
      Params& params = sets[static_cast<size_t>(i)];
      params = {.q = shaped(q_[i % kQuerySets], {rows, layer.heads, kChannels}),
                .window = cache_,
                .window_slots = list(kWindow),
                .sink = WeightView(shaped(sink_, {layer.heads})),
                .scale = 1.0f / std::sqrt(static_cast<float>(kChannels)),
                .out = shaped(out_[i % kQuerySets], {rows, layer.heads, kChannels}),
                .lse = shaped(lse_[i % kQuerySets], {rows, layer.heads})};
      if (layer.entries > 0) {
        params.entries = cache_;
        params.entry_slots = list(layer.entries);
      }
      if (splits > 1) {
        params.split_out = shaped(split_out_, {rows, splits, layer.heads, kChannels});
        params.split_sums = shaped(split_sums_, {rows, splits, layer.heads, 2});
        if (params.split_out.num_elements() > split_out_.num_elements()) {
          return absl::ResourceExhaustedError("too little scratch");
        }
      }
    }
    return sets;
  }

 private:
  absl::Status Fill() {
    // Every page the same random rows.
    const int64_t page_bytes = cache_.pages.extents[1];
    std::vector<uint8_t> page(static_cast<size_t>(page_bytes));
    PagedRows host = cache_;
    host.pages = TensorView::Contiguous(page.data(), DType::kU8, {1, page_bytes});
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> row(kChannels);
    for (int64_t slot = 0; slot < kRowsPerPage; ++slot) {
      for (float& x : row) x = normal(random);
      EncodeRow(host, slot, row.data());
    }
    for (int64_t i = 0; i < cache_.pages.extents[0]; ++i) {
      DSV4_RETURN_IF_ERROR(stream_->CopyToDevice(cache_.pages.Row<uint8_t>(i), page.data(), page_bytes));
    }
    std::vector<Bf16> q(static_cast<size_t>(q_[0].num_elements()));
    for (Bf16& x : q) x = Bf16FromFloat(normal(random));
    for (const TensorView& view : q_) DSV4_RETURN_IF_ERROR(stream_->CopyToDevice(view.data, q.data(), view.num_bytes()));
    const std::vector<float> sink(static_cast<size_t>(kMostHeads), 1.0f);
    DSV4_RETURN_IF_ERROR(stream_->CopyToDevice(sink_.data, sink.data(), sink_.num_bytes()));
    return stream_->Synchronize();
  }

  Arena arena_;
  std::unique_ptr<Stream> stream_;
  PagedRows cache_;
  TensorView q_[kQuerySets], out_[kQuerySets], lse_[kQuerySets], sink_, slots_, split_out_, split_sums_;
};

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
  std::printf("sparse_attention on %s; a device-to-device copy moves %.2f TB/s. Microseconds per op.\n",
              device->name().c_str(), bandwidth * 1e-12);
  for (const RowFormat format : {RowFormat::kFp8, RowFormat::kBf16}) {
    DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Bench> bench, Bench::Create(*device, format));
    for (const Layer& layer : kLayers) {
      std::printf("\n%s rows, %d heads, %d window rows + %d entries\n", std::string(RowFormatName(format)).c_str(),
                  static_cast<int>(layer.heads), static_cast<int>(kWindow), static_cast<int>(layer.entries));
      std::printf("%6s %7s %7s | %7s %7s | %8s %6s | %6s |", "rows", "copies", "splits", "pdl", "full", "TFLOP/s", "copy",
                  "flash");
      for (const int64_t splits : kOtherSplits) std::printf(" %6d", static_cast<int>(splits));
      std::printf("\n");
      for (const int64_t rows : layer.rows) {
        const int copies = bench->Copies(layer, rows);
        const int64_t splits = SplitCount(DType::kBf16, rows, layer.heads, kWindow + layer.entries);
        DSV4_ASSIGN_OR_RETURN(const std::vector<Params> split, bench->LayOut(layer, rows, copies, splits));
        DSV4_ASSIGN_OR_RETURN(const double pdl, Time(timer, split, true));
        DSV4_ASSIGN_OR_RETURN(const double full, Time(timer, split, false));
        const double listed = static_cast<double>(rows * (kWindow + layer.entries));
        const double flops = 4.0 * listed * static_cast<double>(layer.heads * kChannels);
        const double bytes = listed * static_cast<double>(RowBytes(format, kChannels, kRotary)) +
                             4.0 * static_cast<double>(rows * layer.heads * kChannels);
        char flash[16] = "-";
        const auto found = layer.flash_mla_us.find(rows);
        if (found != layer.flash_mla_us.end()) std::snprintf(flash, sizeof(flash), "%.1f", found->second);
        std::printf("%6d %7d %7d | %7.2f %7.2f | %8.0f %5.0f%% | %6s |", static_cast<int>(rows), copies,
                    static_cast<int>(splits), pdl, full, flops / (pdl * 1e6), 100 * bytes / (pdl * 1e-6) / bandwidth,
                    flash);
        for (const int64_t other : kOtherSplits) {
          if (other * rows > kMostParts || other > (kWindow + layer.entries) / kTileRows) {
            std::printf(" %6s", "-");
            continue;
          }
          DSV4_ASSIGN_OR_RETURN(const std::vector<Params> sets, bench->LayOut(layer, rows, copies, other));
          DSV4_ASSIGN_OR_RETURN(const double us, Time(timer, sets, true));
          std::printf(" %6.1f", us);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::sparse_attention

int main() {
  const absl::Status status = dsv4::sparse_attention::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
