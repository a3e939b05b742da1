// Matrix products and the mixture of experts in graphs and under programmatic dependent launch: producers that write
// late, all ways of launching them, and cublasLt's choice of algorithms. On a GPU only.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "ops/linear/choose_kernel.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"
#include "ops/testing/op_test.h"
#include "runtime/arena.h"
#include "runtime/device_testing.h"
#include "runtime/launch.h"
#include "runtime/testing.h"
#include "tests/captured_graph.h"
#include "tests/pdl_neighbours.h"

namespace dsv4 {
namespace {

// An op between a producer of its input and a reader of its output, in two versions, which a turn chooses between
// (pdl_neighbours.h). What the output should be is what the op gives without graphs and without early launches.
class TwoVersions {
 public:
  using Record = std::function<absl::Status()>;

  // `x` and `out` are the op's, of a multiple of 4 bytes each. `x` holds the first version's input.
  static absl::StatusOr<std::unique_ptr<TwoVersions>> Create(Device& device, Stream& stream, const TensorView& x,
                                                             const TensorView& out, Record record) {
    std::unique_ptr<TwoVersions> versions(new TwoVersions(stream, x, out, std::move(record)));
    DSV4_RETURN_IF_ERROR(versions->Initialize(device));
    return versions;
  }

  absl::Status RecordAll(int64_t delay_us) const {
    const auto* const turn = turn_.As<uint32_t>();
    DSV4_RETURN_IF_ERROR(RecordSlowCopy(
        stream_,
        {.sources = {inputs_[0].data, inputs_[1].data}, .destination = x_.data, .bytes = x_.num_bytes(), .turn = turn},
        delay_us));
    DSV4_RETURN_IF_ERROR(record_());
    DSV4_RETURN_IF_ERROR(RecordCompare(stream_, out_.data, {outputs_[0].data, outputs_[1].data}, out_.num_bytes(), turn,
                                       differences_.As<uint64_t>()));
    return RecordNextTurn(stream_, turn_.As<uint32_t>());
  }

  // The words that differed since the last call.
  absl::StatusOr<uint64_t> TakeDifferences() const {
    uint64_t differences = 0;
    DSV4_RETURN_IF_ERROR(stream_.CopyToHost(&differences, differences_.data, sizeof(differences)));
    DSV4_RETURN_IF_ERROR(stream_.Fill(differences_.data, 0, sizeof(differences)));
    DSV4_RETURN_IF_ERROR(stream_.Synchronize());
    return differences;
  }

 private:
  TwoVersions(Stream& stream, const TensorView& x, const TensorView& out, Record record)
      : stream_(stream), x_(x), out_(out), record_(std::move(record)) {}

  absl::Status Initialize(Device& device) {
    DSV4_ASSIGN_OR_RETURN(arena_, Arena::Create(device, [&](Arena& arena) {
                            for (int i = 0; i < 2; ++i) {
                              inputs_[i] = arena.Add(DType::kU8, {x_.num_bytes()});
                              outputs_[i] = arena.Add(DType::kU8, {out_.num_bytes()});
                            }
                            turn_ = arena.Add(DType::kI32, {1});
                            differences_ = arena.Add(DType::kI64, {1});
                          }));
    DSV4_RETURN_IF_ERROR(stream_.Fill(turn_.data, 0, turn_.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream_.Fill(differences_.data, 0, differences_.num_bytes()));
    DSV4_RETURN_IF_ERROR(stream_.Synchronize());
    pdl::SetEnabled(false);
    std::vector<float> values = ToFloats(x_);
    for (int i = 0; i < 2; ++i) {
      for (float& value : values) value = i == 0 ? value : -0.75f * value;
      SetFloats(x_, values);
      DSV4_RETURN_IF_ERROR(record_());
      DSV4_RETURN_IF_ERROR(stream_.CopyToDevice(inputs_[i].data, x_.data, x_.num_bytes()));
      DSV4_RETURN_IF_ERROR(stream_.CopyToDevice(outputs_[i].data, out_.data, out_.num_bytes()));
      DSV4_RETURN_IF_ERROR(stream_.Synchronize());
    }
    pdl::SetEnabled(true);
    return absl::OkStatus();
  }

  Stream& stream_;
  TensorView x_, out_;
  Record record_;
  Arena arena_;
  std::array<TensorView, 2> inputs_, outputs_;
  TensorView turn_, differences_;
};

class ProductGraph : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (on_cpu()) GTEST_SKIP() << "of a gpu";
    stream().set_blocking(false);
  }
  void TearDown() override {
    pdl::SetEnabled(true);
    OpTest::TearDown();
  }

  // Graph and eager, early launches on and off, behind a producer that is late by `delay_us` or not at all.
  void ExpectTheSameBits(const TensorView& x, const TensorView& out, const std::function<absl::Status()>& record) {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TwoVersions> versions,
                              TwoVersions::Create(device(), stream(), x, out, record));
    for (const bool pdl : {true, false}) {
      for (const int64_t delay_us : {0, 50}) {
        pdl::SetEnabled(pdl);
        DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph graph,
                                  CapturedGraph::Capture(stream(), [&] { return versions->RecordAll(delay_us); }));
        for (int i = 0; i < 50; ++i) DSV4_ASSERT_OK(graph.Launch(stream()));
        DSV4_ASSERT_OK_AND_ASSIGN(const uint64_t of_graph, versions->TakeDifferences());
        EXPECT_EQ(of_graph, 0u) << "graph, pdl " << pdl << ", late by " << delay_us;
        for (int i = 0; i < 10; ++i) DSV4_ASSERT_OK(versions->RecordAll(delay_us));
        DSV4_ASSERT_OK_AND_ASSIGN(const uint64_t eager, versions->TakeDifferences());
        EXPECT_EQ(eager, 0u) << "eager, pdl " << pdl << ", late by " << delay_us;
      }
    }
  }
};

TEST_F(ProductGraph, AProductHasTheSameBitsHoweverItIsLaunched) {
  const TestWeightOptions types[] = {
      {.rows = 130, .cols = 1152, .dtype = DType::kF32},
      {.rows = 130, .cols = 1152, .dtype = DType::kBf16},
      {.rows = 130, .cols = 1152, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128},
      {.rows = 130, .cols = 1152, .dtype = DType::kE2m1x2, .block_rows = 1, .block_cols = 32},
  };
  for (const TestWeightOptions& options : types) {
    const TestWeight weight(options);
    for (const int64_t rows : {1, 33, 70}) {
      SCOPED_TRACE(testing::Message() << DTypeName(options.dtype) << ", " << rows << " rows");
      const DType dtype = options.dtype == DType::kF32 ? DType::kF32 : DType::kBf16;
      const TestTensor x(dtype, {rows, 1152}, RandomFloats(rows * 1152, 3));
      const TestTensor out(DType::kF32, {rows, 130});
      const linear::Params params = {
          .x = x.view(),
          .weight = weight.view(),
          .quantize_activations = options.dtype == DType::kE4m3 || options.dtype == DType::kE2m1x2,
          .out = out.view()};
      ExpectTheSameBits(x.view(), out.view(), [&] { return linear::Record(stream(), params); });
      out.CheckGuards();
    }
  }
}

TEST_F(ProductGraph, ExpertsHaveTheSameBitsHoweverTheyAreLaunched) {
  constexpr int64_t kChannels = 256, kInner = 128, kExperts = 8, kChosen = 2;
  const auto matrices = [](int64_t stack, int64_t rows, int64_t cols, uint64_t seed) {
    TestWeightOptions options = {.stack = stack, .rows = rows, .cols = cols, .seed = seed};
    options.dtype = stack > 0 ? DType::kE2m1x2 : DType::kE4m3;
    options.block_rows = stack > 0 ? 1 : 128;
    options.block_cols = stack > 0 ? 32 : 128;
    options.standard_deviation = 0.1f;
    return TestWeight(options);
  };
  const TestWeight gate({.rows = kExperts, .cols = kChannels, .dtype = DType::kBf16, .standard_deviation = 0.1f});
  const TestTensor bias(DType::kF32, {kExperts}, RandomFloats(kExperts, 4));
  const TestWeight w1 = matrices(kExperts, kInner, kChannels, 5), w3 = matrices(kExperts, kInner, kChannels, 6),
                   w2 = matrices(kExperts, kChannels, kInner, 7), shared_w1 = matrices(0, kInner, kChannels, 8),
                   shared_w3 = matrices(0, kInner, kChannels, 9), shared_w2 = matrices(0, kChannels, kInner, 10);
  for (const int64_t rows : {1, 33}) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    const TestTensor x(DType::kBf16, {rows, kChannels}, RandomFloats(rows * kChannels, 11));
    const TestTensor ids(DType::kI32, {rows, kChosen}), weights(DType::kF32, {rows, kChosen});
    const TestTensor out(DType::kBf16, {rows, kChannels});
    moe::Scratch scratch;
    DSV4_ASSERT_OK_AND_ASSIGN(const Arena arena, Arena::Create(device(), [&](Arena& a) {
                                scratch = moe::Scratch::LayOut(a, {.rows = rows,
                                                                   .channels = kChannels,
                                                                   .experts = kExperts,
                                                                   .chosen = kChosen,
                                                                   .inner = kInner,
                                                                   .shared_inner = kInner,
                                                                   .dtype = DType::kBf16});
                              }));
    const moe::Params params = {.x = x.view(),
                                .gate = gate.view(),
                                .bias = bias.weight(),
                                .experts = {w1.view(), w3.view(), w2.view()},
                                .shared = {shared_w1.view(), shared_w3.view(), shared_w2.view()},
                                .routed_scaling_factor = 2.5f,
                                .swiglu_limit = 10.0f,
                                .quantize_activations = true,
                                .scratch = scratch,
                                .expert_ids = ids.view(),
                                .expert_weights = weights.view(),
                                .out = out.view()};
    ExpectTheSameBits(x.view(), out.view(), [&] { return moe::Record(stream(), params); });
    out.CheckGuards();
  }
}

TEST_F(ProductGraph, ManyRowsOfBf16ChooseTheirAlgorithmBeforeACapture) {
  const TestWeight weight({.rows = 72, .cols = 264, .dtype = DType::kBf16});  // sizes that no other test has
  const TestTensor x(DType::kBf16, {kMaxRowsOfOneOrder + 15, 264}, RandomFloats((kMaxRowsOfOneOrder + 15) * 264, 3));
  const TestTensor eager(DType::kF32, {kMaxRowsOfOneOrder + 15, 72}),
      captured(DType::kF32, {kMaxRowsOfOneOrder + 15, 72});
  const auto record = [&](const TestTensor& out) {
    return linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()});
  };
  EXPECT_THAT(CapturedGraph::Capture(stream(), [&] { return record(captured); }).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, "run it once before"));
  DSV4_ASSERT_OK(record(eager));
  DSV4_ASSERT_OK(stream().Synchronize());
  DSV4_ASSERT_OK_AND_ASSIGN(const CapturedGraph graph,
                            CapturedGraph::Capture(stream(), [&] { return record(captured); }));
  for (int i = 0; i < 3; ++i) {
    DSV4_ASSERT_OK(graph.Launch(stream()));
    DSV4_ASSERT_OK(stream().Synchronize());
    EXPECT_TRUE(BitwiseEqual(captured.view(), eager.view()));
  }
}

}  // namespace
}  // namespace dsv4
