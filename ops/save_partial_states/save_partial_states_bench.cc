// Times the save on a GPU, in graphs, between two neighbours of its kind on buffers of their own.
//
//   bazel run //ops/save_partial_states:bench
//
// Columns: with programmatic launch edges (pdl) and with full ones, of the kernel that the layer has and of the generic
// one; "cold" with the L2 full of other data before each replay (the first column's buffers are larger than the L2 from
// about 128 tokens on at head size 1024). Bandwidth counts what must move, read and written, of the pdl column, against
// a device-to-device copy in the same run. vLLM's figures are those of its Triton kernel on an H200.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_buffers.h"
#include "ops/save_partial_states/save_partial_states_cuda.h"
#include "runtime/device.h"
#include "runtime/launch.h"
#include "runtime/status.h"
#include "tests/graph_timing.h"

namespace dsv4::save_partial_states {
namespace {

constexpr int64_t kPoolBytes = int64_t{6} << 30;

struct Layer {
  int64_t head_dim;
  int64_t ratio;
  std::map<int64_t, double> vllm_us;  // by tokens
};

const Layer kLayers[] = {
    {512, 4, {{1, 1.62}, {8, 1.90}, {32, 2.00}, {128, 2.16}, {512, 4.19}}},
    {512, 128, {{1, 1.72}, {8, 1.81}, {32, 1.87}, {128, 1.98}, {512, 2.45}}},
    {128, 4, {{1, 1.76}, {8, 1.77}, {128, 1.93}, {512, 2.07}}},
    {128, 128, {}},
};

absl::StatusOr<double> Time(GraphTimer& timer, const std::vector<SaveBuffers::Set>& sets, KernelChoice choice, bool pdl,
                            bool flush_l2) {
  pdl::SetEnabled(pdl);
  absl::StatusOr<double> us = timer.MicrosecondsPerOp(
      static_cast<int>(sets.size()),
      [&](int copy) { return RecordCuda(timer.stream(), sets[copy].params, SlotCheck(), choice); },
      {.replays = 30, .flush_l2 = flush_l2});
  pdl::SetEnabled(true);
  return us;
}

absl::Status Run() {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCuda));
  DSV4_ASSIGN_OR_RETURN(const double bandwidth, CopyBandwidth(*device));
  DSV4_ASSIGN_OR_RETURN(SaveBuffers buffers, SaveBuffers::Create(*device, kPoolBytes));
  DSV4_ASSIGN_OR_RETURN(GraphTimer timer, GraphTimer::Create(*device));
  std::printf("save_partial_states on %s; a device-to-device copy moves %.2f TB/s. Microseconds per op.\n",
              device->name().c_str(), bandwidth * 1e-12);
  for (const Layer& layer : kLayers) {
    const CompileKey key = PublishedKey(layer.head_dim, layer.ratio);
    std::printf("\nratio %d, head %d: head size %d\n", static_cast<int>(layer.ratio), static_cast<int>(layer.head_dim),
                static_cast<int>(key.head_size));
    std::printf("%6s %7s | %7s %7s | %7s %7s | %7s | %7s %6s | %6s\n", "tokens", "copies", "pdl", "full", "gen.pdl",
                "gen.full", "cold", "GB/s", "copy", "vllm");
    for (const int64_t tokens : {1, 8, 32, 128, 512, 2048, 4096, 8192}) {
      const int copies = SaveBuffers::Copies(key, tokens);
      DSV4_ASSIGN_OR_RETURN(const std::vector<SaveBuffers::Set> sets, buffers.LayOut(key, tokens, copies));
      DSV4_ASSIGN_OR_RETURN(const double pdl, Time(timer, sets, KernelChoice::kByKey, true, false));
      DSV4_ASSIGN_OR_RETURN(const double full, Time(timer, sets, KernelChoice::kByKey, false, false));
      DSV4_ASSIGN_OR_RETURN(const double generic_pdl, Time(timer, sets, KernelChoice::kGeneric, true, false));
      DSV4_ASSIGN_OR_RETURN(const double generic_full, Time(timer, sets, KernelChoice::kGeneric, false, false));
      DSV4_ASSIGN_OR_RETURN(const double cold, Time(timer, sets, KernelChoice::kByKey, true, true));
      const double achieved = static_cast<double>(sets[0].bytes) / (pdl * 1e-6);
      const auto vllm = layer.vllm_us.find(tokens);
      char vllm_text[16] = "-";
      if (vllm != layer.vllm_us.end()) std::snprintf(vllm_text, sizeof(vllm_text), "%.2f", vllm->second);
      std::printf("%6d %7d | %7.2f %7.2f | %7.2f %7.2f | %7.2f | %7.0f %5.0f%% | %6s\n", static_cast<int>(tokens), copies,
                  pdl, full, generic_pdl, generic_full, cold, achieved * 1e-9, 100 * achieved / bandwidth, vllm_text);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4::save_partial_states

int main() {
  const absl::Status status = dsv4::save_partial_states::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
