// The save in graphs and under programmatic dependent launch: neighbours that act late, all ways of launching it, and
// first use inside a capture. On a GPU only.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "ops/save_partial_states/save_partial_states_warmup.h"
#include "runtime/arena.h"
#include "runtime/device_testing.h"
#include "runtime/dtype.h"
#include "runtime/launch.h"
#include "runtime/testing.h"
#include "runtime/warmup.h"
#include "tests/captured_graph.h"
#include "tests/pdl_neighbours.h"
#include "tests/save_without_wait.h"

namespace dsv4 {
namespace {

using save_partial_states::CompileKey;
using save_partial_states::Dispatch;
using save_partial_states::FindSpecialised;
using save_partial_states::kSpecialisedKeys;
using save_partial_states::Params;

constexpr bool kAddressSanitizer =
#if defined(__SANITIZE_ADDRESS__)
    true;
#else
    false;
#endif

// Under compute-sanitizer, which sets this, launches are hundreds of times slower and what overlaps overlaps no more.
bool UnderComputeSanitizer() { return std::getenv("DSV4_UNDER_COMPUTE_SANITIZER") != nullptr; }

// A shape for each kernel: the specialised ones, and the generic one in each width and pair of element types.
struct Shape {
  std::string name;
  int64_t head_size;
  int64_t ratio;
  int64_t block_size;
  int64_t row_padding = 0;  // elements between rows of the projection
  DType input_dtype = DType::kF32;
  DType cache_dtype = DType::kF32;
};

std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  for (const CompileKey& key : kSpecialisedKeys) {
    shapes.push_back({"specialised " + std::to_string(key.head_size), key.head_size, key.compress_ratio, key.block_size});
  }
  for (const DType input : {DType::kF32, DType::kBf16}) {
    for (const DType cache : {DType::kF32, DType::kBf16}) {
      for (const int64_t width : {4, 2, 1}) {
        shapes.push_back({"generic " + std::string(DTypeName(input)) + " to " + std::string(DTypeName(cache)) +
                              " by " + std::to_string(width),
                          520, 4, 4, width, input, cache});
      }
    }
  }
  return shapes;
}

// A step on the device in two versions, which a turn chooses between (pdl_neighbours.h): inputs, the cache before it, and
// what the cache holds after it, computed by the CPU.
class TwoSteps {
 public:
  static absl::StatusOr<std::unique_ptr<TwoSteps>> Create(Device& device, const Shape& shape, int64_t tokens,
                                                          bool only_pads = false) {
    std::unique_ptr<TwoSteps> steps(new TwoSteps);
    DSV4_RETURN_IF_ERROR(steps->Initialize(device, shape, tokens, only_pads));
    return steps;
  }

  const Params& params() const { return params_; }
  TensorView cache() const { return params_.state_cache; }
  uint32_t* turn() const { return turn_.As<uint32_t>(); }

  // Brings the turn's inputs into place, late.
  absl::Status RecordInputs(Stream& stream, int64_t delay_us) const {
    return RecordSlowCopy(stream,
                          {.sources = {staged_[0].data, staged_[1].data},
                           .destination = inputs_.data,
                           .bytes = inputs_.num_bytes(),
                           .turn = turn()},
                          delay_us);
  }
  // Makes the cache what it was before any step.
  absl::Status RecordReset(Stream& stream) const {
    return RecordSlowCopy(stream,
                          {.sources = {before_.data, before_.data},
                           .destination = cache().data,
                           .bytes = before_.num_bytes(),
                           .turn = turn()},
                          0);
  }
  // Reads the whole cache, late.
  absl::Status RecordSlowRead(Stream& stream, int64_t delay_us) const {
    return RecordSlowCopy(stream,
                          {.sources = {cache().data, cache().data},
                           .destination = snapshot_.data,
                           .bytes = before_.num_bytes(),
                           .turn = turn()},
                          delay_us);
  }
  absl::Status RecordCheckCache(Stream& stream) const {
    return RecordCompare(stream, cache().data, {after_[0].data, after_[1].data}, before_.num_bytes(), turn(),
                         differences_.As<uint64_t>());
  }
  absl::Status RecordCheckSnapshot(Stream& stream) const {
    return RecordCompare(stream, snapshot_.data, {before_.data, before_.data}, before_.num_bytes(), turn(),
                         differences_.As<uint64_t>());
  }
  absl::Status RecordCheckInputs(Stream& stream, bool wait) const {
    return (wait ? RecordCompare : RecordCompareWithoutWait)(stream, inputs_.data, {staged_[0].data, staged_[1].data},
                                                             inputs_.num_bytes(), turn(), differences_.As<uint64_t>());
  }

  // Of all comparisons since the last call.
  absl::StatusOr<uint64_t> TakeDifferences(Stream& stream) const {
    uint64_t differences = 0;
    DSV4_RETURN_IF_ERROR(stream.CopyToHost(&differences, differences_.data, sizeof(differences)));
    DSV4_RETURN_IF_ERROR(stream.Fill(differences_.data, 0, sizeof(differences)));
    DSV4_RETURN_IF_ERROR(stream.Synchronize());
    return differences;
  }
  absl::StatusOr<std::vector<uint8_t>> CacheBytes(Stream& stream) const {
    std::vector<uint8_t> bytes(before_.num_bytes());
    DSV4_RETURN_IF_ERROR(stream.CopyToHost(bytes.data(), cache().data, before_.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream.Synchronize());
    return bytes;
  }

 private:
  TwoSteps() = default;

  absl::Status Initialize(Device& device, const Shape& shape, int64_t tokens, bool only_pads) {
    const int64_t stride = 2 * shape.head_size + shape.row_padding;
    const int64_t projection_bytes = (tokens * stride * DTypeBytes(shape.input_dtype) + 255) / 256 * 256;
    const int64_t input_bytes = projection_bytes + 2 * tokens * 8;
    const int64_t blocks = (2 * tokens + shape.block_size - 1) / shape.block_size;
    const int64_t cache_bytes = blocks * shape.block_size * 2 * shape.head_size * DTypeBytes(shape.cache_dtype);
    TensorView cache, ape;
    DSV4_ASSIGN_OR_RETURN(arena_, Arena::Create(device, [&](Arena& arena) {
                            inputs_ = arena.Add(DType::kU8, {input_bytes});
                            ape = arena.Add(DType::kF32, {shape.ratio, shape.head_size});
                            cache = arena.Add(shape.cache_dtype, {blocks, shape.block_size, 2 * shape.head_size});
                            before_ = arena.Add(DType::kU8, {cache_bytes});
                            snapshot_ = arena.Add(DType::kU8, {cache_bytes});
                            for (int i = 0; i < 2; ++i) {
                              staged_[i] = arena.Add(DType::kU8, {input_bytes});
                              after_[i] = arena.Add(DType::kU8, {cache_bytes});
                            }
                            turn_ = arena.Add(DType::kI32, {1});
                            differences_ = arena.Add(DType::kI64, {1});
                          }));
    const auto view_inputs = [&](void* data, Params* params) {
      const TensorView rows = TensorView::Contiguous(data, shape.input_dtype, {tokens, stride});
      uint8_t* const integers = static_cast<uint8_t*>(data) + projection_bytes;
      params->kv = rows.Columns(0, shape.head_size);
      params->score = rows.Columns(shape.head_size, shape.head_size);
      params->positions = TensorView::Contiguous(integers, DType::kI64, {tokens});
      params->slots = TensorView::Contiguous(integers + tokens * 8, DType::kI64, {tokens});
    };
    view_inputs(inputs_.data, &params_);
    params_.ape = WeightView(ape);
    params_.state_cache = cache;

    DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device.CreateStream());
    DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Device> cpu, CreateDevice(DeviceKind::kCpu));
    DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> cpu_stream, cpu->CreateStream());
    std::vector<float> host_ape = RandomFloats(ape.num_elements(), 11);
    std::vector<uint8_t> host_before(cache_bytes);
    std::mt19937_64 random(12);
    for (uint8_t& byte : host_before) byte = static_cast<uint8_t>(random());
    DSV4_RETURN_IF_ERROR(stream->CopyToDevice(ape.data, host_ape.data(), ape.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream->CopyToDevice(before_.data, host_before.data(), cache_bytes));
    DSV4_RETURN_IF_ERROR(stream->CopyToDevice(cache.data, host_before.data(), cache_bytes));
    DSV4_RETURN_IF_ERROR(stream->Fill(turn_.data, 0, turn_.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream->Fill(differences_.data, 0, differences_.num_bytes()));
    for (uint64_t i = 0; i < 2; ++i) {
      std::vector<uint8_t> host_inputs(input_bytes), host_after = host_before;
      Params host;
      host.ape = WeightView(TensorView::Contiguous(host_ape.data(), DType::kF32, {shape.ratio, shape.head_size}));
      host.state_cache = TensorView::Contiguous(host_after.data(), shape.cache_dtype,
                                                {blocks, shape.block_size, 2 * shape.head_size});
      view_inputs(host_inputs.data(), &host);
      SetFloats(host.kv, RandomFloats(tokens * shape.head_size, 20 + i));
      SetFloats(host.score, RandomFloats(tokens * shape.head_size, 30 + i));
      std::vector<int64_t> slots(blocks * shape.block_size);
      for (size_t slot = 0; slot < slots.size(); ++slot) slots[slot] = static_cast<int64_t>(slot);
      std::shuffle(slots.begin(), slots.end(), random);
      slots.resize(tokens);
      for (int64_t t = 0; t < tokens; ++t) {
        if (only_pads || (t + static_cast<int64_t>(i)) % 7 == 6) slots[t] = -1;
        *host.positions.At<int64_t>(t) = static_cast<int64_t>(random() % 1000000);
      }
      SetInts(host.slots, slots);
      DSV4_RETURN_IF_ERROR(Record(*cpu_stream, host));
      DSV4_RETURN_IF_ERROR(stream->CopyToDevice(staged_[i].data, host_inputs.data(), input_bytes));
      DSV4_RETURN_IF_ERROR(stream->CopyToDevice(after_[i].data, host_after.data(), cache_bytes));
      DSV4_RETURN_IF_ERROR(stream->CopyToDevice(inputs_.data, host_inputs.data(), input_bytes));
      DSV4_RETURN_IF_ERROR(stream->Synchronize());
    }
    return absl::OkStatus();
  }

  Arena arena_;
  TensorView inputs_, before_, snapshot_, turn_, differences_;
  std::array<TensorView, 2> staged_, after_;
  Params params_;
};

class SavePdl : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (on_cpu()) GTEST_SKIP() << "of a gpu";
    stream().set_blocking(false);
  }
  void TearDown() override {
    pdl::SetEnabled(true);
    DeviceTest::TearDown();
  }

  using Recorder = std::function<absl::Status()>;

  // The words that differ after `replays` of one step after another, launched as a graph.
  uint64_t Differences(TwoSteps& steps, int replays, const std::vector<Recorder>& ops) {
    const auto record = [&]() -> absl::Status {
      for (const Recorder& op : ops) DSV4_RETURN_IF_ERROR(op());
      return RecordNextTurn(stream(), steps.turn());
    };
    const absl::StatusOr<CapturedGraph> graph = CapturedGraph::Capture(stream(), record);
    if (!graph.ok()) {
      ADD_FAILURE() << graph.status();
      return 0;
    }
    for (int i = 0; i < replays; ++i) DSV4_EXPECT_OK(graph->Launch(stream()));
    const absl::StatusOr<uint64_t> differences = steps.TakeDifferences(stream());
    DSV4_EXPECT_OK(differences.status());
    return differences.value_or(0);
  }

  Recorder Save(const TwoSteps& steps) {
    return [this, &steps] { return Record(stream(), steps.params()); };
  }
  Recorder BrokenSave(const TwoSteps& steps) {
    return [this, &steps] { return RecordSaveWithoutWait(stream(), steps.params()); };
  }
  Recorder LateInputs(const TwoSteps& steps, int64_t delay_us) {
    return [this, &steps, delay_us] { return steps.RecordInputs(stream(), delay_us); };
  }
  Recorder Reset(const TwoSteps& steps) {
    return [this, &steps] { return steps.RecordReset(stream()); };
  }
  Recorder CheckCache(const TwoSteps& steps) {
    return [this, &steps] { return steps.RecordCheckCache(stream()); };
  }
};

constexpr int64_t kLateUs = 100;

TEST_F(SavePdl, EveryShapeHasTheKernelItIsNamedAfter) {
  for (const Shape& shape : AllShapes()) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), shape, 3));
    const CompileKey key = Dispatch(steps->params());
    EXPECT_EQ(FindSpecialised(key) >= 0, shape.name.find("specialised") == 0) << shape.name;
    EXPECT_EQ(key.vector_width, shape.row_padding > 0 ? shape.row_padding : 4) << shape.name;
  }
}

TEST_F(SavePdl, GraphEagerPdlOnAndPdlOffAreBitwiseEqual) {
  for (const Shape& shape : AllShapes()) {
    for (const int64_t tokens : {1, 33, 600}) {
      SCOPED_TRACE(testing::Message() << shape.name << ", " << tokens << " tokens");
      DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), shape, tokens));
      for (const bool pdl : {true, false}) {
        pdl::SetEnabled(pdl);
        const std::vector<Recorder> ops = {Reset(*steps), LateInputs(*steps, 0), Save(*steps), CheckCache(*steps)};
        EXPECT_EQ(Differences(*steps, 20, ops), 0u) << "graph, pdl " << pdl;
        for (int i = 0; i < 20; ++i) {
          for (const Recorder& op : ops) DSV4_ASSERT_OK(op());
          DSV4_ASSERT_OK(RecordNextTurn(stream(), steps->turn()));
        }
        DSV4_ASSERT_OK_AND_ASSIGN(const uint64_t differences, steps->TakeDifferences(stream()));
        EXPECT_EQ(differences, 0u) << "eager, pdl " << pdl;
      }
    }
  }
}

TEST_F(SavePdl, CapturedLaunchesAreJoinedByProgrammaticEdges) {
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), AllShapes()[0], 3));
  for (const bool pdl : {true, false}) {
    pdl::SetEnabled(pdl);
    DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph graph, CapturedGraph::Capture(stream(), [&]() -> absl::Status {
                                for (int i = 0; i < 5; ++i) DSV4_RETURN_IF_ERROR(Record(stream(), steps->params()));
                                return absl::OkStatus();
                              }));
    DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph::Topology topology, graph.GetTopology());
    EXPECT_EQ(topology.kernels, 5);
    EXPECT_EQ(topology.other_nodes, 0);
    EXPECT_EQ(topology.programmatic_edges, pdl ? 4 : 0);
    EXPECT_EQ(topology.full_edges, pdl ? 0 : 4);
  }
}

TEST_F(SavePdl, WaitsForAProducerThatWritesLate) {
  for (const Shape& shape : AllShapes()) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), shape, 33));
    EXPECT_EQ(Differences(*steps, 20, {Reset(*steps), LateInputs(*steps, kLateUs), Save(*steps), CheckCache(*steps)}), 0u)
        << shape.name;
  }
}

TEST_F(SavePdl, AKernelWithoutTheWaitFailsThatTest) {
  if (UnderComputeSanitizer()) GTEST_SKIP() << "kernels do not overlap";
  for (int kernel = 0; kernel < 2; ++kernel) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps,
                              TwoSteps::Create(device(), AllShapes()[kernel], 33));
    EXPECT_GT(
        Differences(*steps, 20, {Reset(*steps), LateInputs(*steps, kLateUs), BrokenSave(*steps), CheckCache(*steps)}),
        0u);
    // And it is the wait that is missing, nothing else: with full edges the same kernel is right.
    pdl::SetEnabled(false);
    EXPECT_EQ(
        Differences(*steps, 20, {Reset(*steps), LateInputs(*steps, kLateUs), BrokenSave(*steps), CheckCache(*steps)}),
        0u);
    pdl::SetEnabled(true);
  }
}

TEST_F(SavePdl, DoesNotWriteBeforeALateReaderHasRead) {
  for (int kernel = 0; kernel < 2; ++kernel) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps,
                              TwoSteps::Create(device(), AllShapes()[kernel], 33));
    const Recorder read = [&] { return steps->RecordSlowRead(stream(), kLateUs); };
    const Recorder check = [&] { return steps->RecordCheckSnapshot(stream()); };
    EXPECT_EQ(Differences(*steps, 20, {Reset(*steps), read, Save(*steps), check}), 0u);
    if (UnderComputeSanitizer()) continue;
    EXPECT_GT(Differences(*steps, 20, {Reset(*steps), read, BrokenSave(*steps), check}), 0u);
  }
}

TEST_F(SavePdl, AStepOfPadsPassesOnThatItWaited) {
  for (int kernel = 0; kernel < 2; ++kernel) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps,
                              TwoSteps::Create(device(), AllShapes()[kernel], 33, /*only_pads=*/true));
    const auto check_inputs = [&](bool wait) {
      return [this, &steps, wait] { return steps->RecordCheckInputs(stream(), wait); };
    };
    EXPECT_EQ(Differences(*steps, 20, {LateInputs(*steps, kLateUs), Save(*steps), check_inputs(true), CheckCache(*steps)}),
              0u);
    if (UnderComputeSanitizer()) continue;
    EXPECT_GT(Differences(*steps, 20, {LateInputs(*steps, kLateUs), check_inputs(false)}), 0u);
  }
}

TEST_F(SavePdl, TenThousandReplaysBehindALateProducer) {
  if (kAddressSanitizer || UnderComputeSanitizer()) GTEST_SKIP() << "takes too long under a sanitizer";
  constexpr int64_t kBrieflyLateUs = 5;
  for (const Shape& shape : AllShapes()) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), shape, 33));
    EXPECT_EQ(
        Differences(*steps, 10000, {Reset(*steps), LateInputs(*steps, kBrieflyLateUs), Save(*steps), CheckCache(*steps)}),
        0u)
        << shape.name;
  }
  // The delay is long enough to be seen.
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), AllShapes()[0], 33));
  EXPECT_GT(
      Differences(*steps, 100, {Reset(*steps), LateInputs(*steps, kBrieflyLateUs), BrokenSave(*steps), CheckCache(*steps)}),
      0u);
}

TEST_F(SavePdl, CheckedSlotsAreReportedByEveryReplay) {
  device().set_check_slots(true);
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), AllShapes()[0], 33));
  Params params = steps->params();
  params.state_cache.extents[0] = 1;  // of more than a dozen blocks: most slots are now past the cache
  DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph graph,
                            CapturedGraph::Capture(stream(), [&] { return Record(stream(), params); }));
  for (int replay = 0; replay < 3; ++replay) {
    DSV4_ASSERT_OK(graph.Launch(stream()));
    EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange, "past the cache of 4 slots"));
    DSV4_EXPECT_OK(stream().Synchronize());
  }
}

TEST_F(SavePdl, WarmUpLoadsTheOpAndChangesNoMemory) {
  EXPECT_THAT(WarmupOps(), testing::Contains("save_partial_states"));
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), AllShapes()[0], 33));
  DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<uint8_t> before, steps->CacheBytes(stream()));
  DSV4_EXPECT_OK(WarmUp(device()));
  for (const int64_t ratio : {4, 128}) {
    for (const int64_t head_dim : {128, 512}) {
      DSV4_EXPECT_OK(Warmup(device(), save_partial_states::WarmupKeys(head_dim, ratio)));
    }
  }
  DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<uint8_t> after, steps->CacheBytes(stream()));
  EXPECT_TRUE(before == after);
}

// Runs the named test, which is disabled here, in a process of its own with kernels loaded at first use.
int RunInLazyProcess(const std::string& test) {
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    const std::string filter = "--gtest_filter=" + test;
    execl("/proc/self/exe", "gpu_tests", filter.c_str(), "--gtest_also_run_disabled_tests", "--gtest_brief=1",
          static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

enum class Warming { kRegistry, kKeys, kNone };

class SaveLazyLoading : public SavePdl {
 protected:
  // The first use of the kernel is inside a capture; only what comes before differs. True if the capture succeeds and
  // its replays are right.
  void CaptureAsFirstUse(Warming warming) {
    const std::vector<Shape> shapes = AllShapes();
    if (warming == Warming::kRegistry) {
      DSV4_ASSERT_OK(WarmUp(device()));
    } else if (warming == Warming::kKeys) {
      for (const CompileKey& key : kSpecialisedKeys) DSV4_ASSERT_OK(save_partial_states::Warmup(device(), {key}));
    }
    for (size_t i = 0; i < (warming == Warming::kRegistry ? shapes.size() : kSpecialisedKeys.size()); ++i) {
      DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoSteps> steps, TwoSteps::Create(device(), shapes[i], 33));
      DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph graph,
                                CapturedGraph::Capture(stream(), [&] { return Record(stream(), steps->params()); }));
      DSV4_ASSERT_OK(graph.Launch(stream()));
      DSV4_ASSERT_OK(RecordNextTurn(stream(), steps->turn()));  // the inputs in place are the second step's
      DSV4_ASSERT_OK(steps->RecordCheckCache(stream()));
      DSV4_ASSERT_OK_AND_ASSIGN(const uint64_t differences, steps->TakeDifferences(stream()));
      EXPECT_EQ(differences, 0u) << shapes[i].name;
    }
  }
};

TEST_F(SaveLazyLoading, DISABLED_AfterTheRegistry) { CaptureAsFirstUse(Warming::kRegistry); }
TEST_F(SaveLazyLoading, DISABLED_AfterTheKeys) { CaptureAsFirstUse(Warming::kKeys); }
TEST_F(SaveLazyLoading, DISABLED_WithoutAWarmUp) { CaptureAsFirstUse(Warming::kNone); }

TEST_F(SavePdl, FirstUseMayBeInsideACaptureAfterAWarmUp) {
  if (UnderComputeSanitizer()) GTEST_SKIP() << "starts processes";
  EXPECT_EQ(RunInLazyProcess("SaveLazyLoading.DISABLED_AfterTheRegistry"), 0);
  EXPECT_EQ(RunInLazyProcess("SaveLazyLoading.DISABLED_AfterTheKeys"), 0);
  // Without one it may fail or not, as the driver pleases.
  std::cout << "without a warm-up the process ends with " << RunInLazyProcess("SaveLazyLoading.DISABLED_WithoutAWarmUp")
            << std::endl;
}

}  // namespace
}  // namespace dsv4
