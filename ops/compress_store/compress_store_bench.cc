// Times the compression on a GPU, in graphs, between two neighbours of its kind on buffers of their own.
//
//   bazel run //ops/compress_store:bench
//
// "all": every token is at a boundary and pools a whole window; "none": no token is, as in most decode steps of ratio
// 128. Columns: with programmatic launch edges (pdl) and with full ones, of the kernel that the layer has, and of the
// generic one where it is not hopeless. Bandwidth counts what must move of "all" with pdl, against a device-to-device copy
// in the same run. vLLM's figures are those of its Triton kernels on an H200, every token at a boundary.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/compress_store/compress_store_cuda.h"
#include "ops/compress_store/kernel_choice.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/paged_rows.h"
#include "runtime/status.h"
#include "tests/graph_timing.h"

namespace dsv4::compress_store {
namespace {

constexpr int64_t kPoolBytes = int64_t{6} << 30;
constexpr int64_t kRopeSize = 64;
constexpr int64_t kPositions = 1024;
constexpr uint8_t kSmallFloats = 0x3c;  // each byte: floats of about 0.01

struct Layer {
  const char* name;
  int64_t ratio, head_size;
  RowFormat format;
  std::map<int64_t, double> vllm_us;  // by tokens
};

const Layer kLayers[] = {
    {"ratio 4, head 512, fp8", 4, 512, RowFormat::kFp8, {{1, 3.72}, {8, 4.32}, {32, 4.44}, {128, 4.90}, {512, 9.61}}},
    {"ratio 128, head 512, fp8", 128, 512, RowFormat::kFp8, {{1, 158}, {8, 175}, {32, 233}, {128, 370}, {512, 801}}},
    {"ratio 4, head 128, fp8 keys", 4, 128, RowFormat::kFp8Key, {{1, 3.84}, {8, 4.31}, {128, 4.54}, {512, 4.80}}},
    {"ratio 4, head 128, mxfp4 keys", 4, 128, RowFormat::kMxfp4Key, {}},
};

int64_t StateRows(const Layer& layer) { return layer.ratio == 4 ? 8 : 128; }
int64_t BlockSize(const Layer& layer) { return layer.ratio == 4 ? 4 : 8; }
int64_t StateWidth(const Layer& layer) { return layer.ratio == 4 ? 2 * layer.head_size : layer.head_size; }

// Bytes that one token at a boundary moves: half the columns of the rows it pools if windows overlap, and its entry.
int64_t BytesPerEvent(const Layer& layer) {
  return StateRows(layer) * 2 * layer.head_size * 4 + RowBytes(layer.format, layer.head_size, kRopeSize);
}

// A step of tokens of different requests, each with blocks of its own.
Params LayOut(Arena& arena, const Layer& layer, int64_t tokens) {
  const int64_t blocks = StateRows(layer) / BlockSize(layer), pages = (tokens + 63) / 64;
  Params params;
  params.state_cache = arena.Add(DType::kF32, {tokens * blocks, BlockSize(layer), 2 * StateWidth(layer)});
  params.state_slots = arena.Add(DType::kI64, {tokens});
  params.state_block_table = arena.Add(DType::kI32, {tokens, blocks});
  params.requests = arena.Add(DType::kI32, {tokens});
  params.positions = arena.Add(DType::kI64, {tokens});
  params.ratio = layer.ratio;
  params.overlap = layer.ratio == 4;
  params.norm_weight = WeightView(arena.Add(DType::kBf16, {layer.head_size}));
  params.eps = 1e-6f;
  params.cos_sin = WeightView(arena.Add(DType::kF32, {kPositions, kRopeSize}));
  params.entry_slots = arena.Add(DType::kI64, {tokens});
  params.entries = {.pages = arena.Add(DType::kU8, {pages, PageStrideBytes(layer.format, 64, layer.head_size, kRopeSize)}),
                    .format = layer.format,
                    .rows_per_page = 64,
                    .row_size = layer.head_size,
                    .rope_size = kRopeSize};
  return params;
}

absl::Status Fill(Stream& stream, const Params& params, bool at_boundary) {
  const int64_t tokens = params.positions.extents[0], blocks = params.state_block_table.extents[1];
  std::vector<int64_t> slots, positions;
  std::vector<int32_t> requests, table;
  for (int64_t i = 0; i < tokens; ++i) {
    slots.push_back(i);
    requests.push_back(static_cast<int32_t>(i));
    positions.push_back(3 * params.ratio - (at_boundary ? 1 : 2));
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(i * blocks + b));
  }
  const auto upload = [&](const TensorView& view, const void* data) {
    return stream.CopyToDevice(view.data, data, view.num_bytes());
  };
  DSV4_RETURN_IF_ERROR(stream.Fill(params.state_cache.data, kSmallFloats, params.state_cache.num_bytes()));
  DSV4_RETURN_IF_ERROR(
      stream.Fill(const_cast<void*>(params.norm_weight.data()), kSmallFloats, params.norm_weight.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Fill(const_cast<void*>(params.cos_sin.data()), kSmallFloats, params.cos_sin.num_bytes()));
  DSV4_RETURN_IF_ERROR(upload(params.state_slots, slots.data()));
  DSV4_RETURN_IF_ERROR(upload(params.entry_slots, slots.data()));
  DSV4_RETURN_IF_ERROR(upload(params.positions, positions.data()));
  DSV4_RETURN_IF_ERROR(upload(params.requests, requests.data()));
  DSV4_RETURN_IF_ERROR(upload(params.state_block_table, table.data()));
  return stream.Synchronize();
}

absl::StatusOr<double> Time(GraphTimer& timer, const std::vector<Params>& sets, bool generic, bool pdl) {
  pdl::SetEnabled(pdl);
  absl::StatusOr<double> us = timer.MicrosecondsPerOp(static_cast<int>(sets.size()), [&](int copy) {
    return RecordCuda(timer.stream(), sets[copy], generic ? Kernel::kGeneric : ChooseKernel(sets[copy]));
  });
  pdl::SetEnabled(true);
  return us;
}

absl::Status Run() {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCuda));
  DSV4_ASSIGN_OR_RETURN(const double bandwidth, CopyBandwidth(*device));
  DSV4_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::Create(*device));
  std::printf("compress_store on %s; a device-to-device copy moves %.2f TB/s. Microseconds per op.\n",
              device->name().c_str(), bandwidth * 1e-12);
  for (const Layer& layer : kLayers) {
    std::printf("\n%s\n%6s %7s | %8s %8s %8s | %8s %8s | %7s %6s | %6s\n", layer.name, "tokens", "copies", "all.pdl",
                "all.full", "generic", "none.pdl", "none.full", "GB/s", "copy", "vllm");
    for (const int64_t tokens : {1, 8, 32, 64, 128, 512}) {
      // Larger together than the L2 where 100 copies can be.
      const int64_t bytes = std::max<int64_t>(tokens * StateRows(layer) * 2 * StateWidth(layer) * 4, 1);
      const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / bytes, 4, 100));
      if (bytes * copies > kPoolBytes) continue;
      std::vector<Params> sets;
      DSV4_ASSIGN_OR_RETURN(const Arena arena, Arena::Create(*device, [&](Arena& arena) {
                              sets.clear();
                              for (int copy = 0; copy < copies; ++copy) sets.push_back(LayOut(arena, layer, tokens));
                            }));
      for (const Params& params : sets) DSV4_RETURN_IF_ERROR(Fill(timer.stream(), params, true));
      DSV4_ASSIGN_OR_RETURN(const double all_pdl, Time(timer, sets, false, true));
      DSV4_ASSIGN_OR_RETURN(const double all_full, Time(timer, sets, false, false));
      double generic = 0;
      if (layer.ratio == 4) {
        DSV4_ASSIGN_OR_RETURN(generic, Time(timer, sets, true, true));
      }
      for (const Params& params : sets) DSV4_RETURN_IF_ERROR(Fill(timer.stream(), params, false));
      DSV4_ASSIGN_OR_RETURN(const double none_pdl, Time(timer, sets, false, true));
      DSV4_ASSIGN_OR_RETURN(const double none_full, Time(timer, sets, false, false));
      const double achieved = static_cast<double>(tokens * BytesPerEvent(layer)) / (all_pdl * 1e-6);
      const auto vllm = layer.vllm_us.find(tokens);
      char vllm_text[16] = "-";
      if (vllm != layer.vllm_us.end()) std::snprintf(vllm_text, sizeof(vllm_text), "%.2f", vllm->second);
      std::printf("%6d %7d | %8.2f %8.2f %8.2f | %8.2f %8.2f | %7.0f %5.0f%% | %6s\n", static_cast<int>(tokens), copies,
                  all_pdl, all_full, generic, none_pdl, none_full, achieved * 1e-9, 100 * achieved / bandwidth,
                  vllm_text);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::compress_store

int main() {
  const absl::Status status = dsv4::compress_store::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
