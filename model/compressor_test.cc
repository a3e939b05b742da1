// The compressor-cache module as a whole: projection, save and compress over several steps and requests.
#include "model/compressor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/cache_plan.h"
#include "model/config.h"
#include "model/rope_tables.h"
#include "model/step_state.h"
#include "runtime/device.h"
#include "runtime/paged_rows.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

constexpr int64_t kHidden = 48;
constexpr int64_t kHeadDim = 24;
constexpr int64_t kRopeDim = 8;
constexpr int64_t kRequests = 2;
constexpr int64_t kMaxContext = 320;
constexpr float kEps = 1e-6f;
// Sums of at most 256 terms in fp32.
constexpr double kTolerance = 1e-5;

struct Token {
  int32_t request;
  int64_t position;
};

class CompressorTest : public testing::TestWithParam<LayerKind> {
 protected:
  CompressorTest()
      : kind_(GetParam()),
        width_((kind_.overlap ? 2 : 1) * kHeadDim),
        wkv_gate_(DType::kF32, {2 * width_, kHidden}, RandomFloats(2 * width_ * kHidden, 1, 0.15f)),
        ape_(DType::kF32, {kind_.ratio, width_}, RandomFloats(kind_.ratio * width_, 2)),
        norm_(DType::kF32, {kHeadDim}, RandomFloats(kHeadDim, 3)),
        inputs_(RandomFloats(kRequests * kMaxContext * kHidden, 4)) {
    config_.qk_rope_head_dim = kRopeDim;
    config_.compress_rope_theta = 160000.0;
    config_.yarn = {.factor = 16.0, .beta_fast = 32.0, .beta_slow = 1.0, .original_max_position_embeddings = 128};
    config_.sliding_window = 4;
    config_.layers = {kind_};
    cos_sin_ = std::make_unique<TestTensor>(DType::kF32, std::initializer_list<int64_t>{kMaxContext, kRopeDim},
                                            RopeTable(config_, /*compressed=*/true, kMaxContext));
  }

  void SetUp() override {
    DSV4_ASSERT_OK_AND_ASSIGN(device_, CreateDevice(DeviceKind::kCpu));
    DSV4_ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream());
  }

  // Caches for steps of up to `max_rows` rows of a request, all of them NaN.
  void Build(int64_t max_rows) {
    const CacheSizes sizes = {.max_requests = kRequests,
                              .max_context = kMaxContext,
                              .max_rows_per_request = max_rows,
                              .cache_tokens = kRequests * kMaxContext};
    plan_ = PlanCaches(config_, sizes);
    DSV4_ASSERT_OK_AND_ASSIGN(step_, StepState::Create(*device_, config_, plan_, sizes, 2 * max_rows, 1));
    const std::vector<CacheGroupPlan> groups = plan_.Groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      // Request 1 has the even blocks, request 0 the odd ones, both from the last on.
      for (int64_t r = 0; r < kRequests; ++r) {
        std::vector<int32_t> blocks;
        for (int64_t b = groups[g].table_blocks - 1; b >= 0; --b) {
          blocks.push_back(static_cast<int32_t>(kRequests * b + 1 - r));
        }
        DSV4_ASSERT_OK(step_->SetBlockTable(*stream_, static_cast<int64_t>(g), r, blocks));
      }
    }
    const CompressedPlan& plan = plan_.compressed[0];
    compressor_ = std::make_unique<Compressor>(CompressorOptions{.ratio = kind_.ratio,
                                                                 .overlap = kind_.overlap,
                                                                 .head_dim = kHeadDim,
                                                                 .rope_dim = kRopeDim,
                                                                 .eps = kEps,
                                                                 .hadamard = false,
                                                                 .entry_format = RowFormat::kF32,
                                                                 .state = plan.state,
                                                                 .entries = plan.entries},
                                               CompressorWeights{.wkv_gate = {.values = wkv_gate_.weight()},
                                                                 .ape = ape_.weight(),
                                                                 .norm = norm_.weight()},
                                               cos_sin_->weight());
    DSV4_ASSERT_OK_AND_ASSIGN(arena_,
                              Arena::Create(*device_, [&](Arena& arena) { compressor_->LayOutCaches(arena); }));
    DSV4_ASSERT_OK(stream_->Fill(arena_.data(), 0xff, arena_.size_bytes()));
  }

  const float* Input(const Token& token) const {
    return inputs_.data() + (token.request * kMaxContext + token.position) * kHidden;
  }

  // One step of these rows; a negative request is a pad, whose input is NaN.
  void Step(const std::vector<Token>& tokens) {
    const int64_t rows = static_cast<int64_t>(tokens.size());
    step_->ClearHostInputs();
    TestTensor x(DType::kF32, {rows, kHidden});
    // Wider than needed, as the scratch that layers share is.
    TestTensor kv_score(DType::kF32, {rows, 2 * width_ + 16});
    for (int64_t i = 0; i < rows; ++i) {
      *step_->host_inputs().requests.At<int32_t>(i) = tokens[i].request;
      *step_->host_inputs().positions.At<int64_t>(i) = tokens[i].position;
      if (tokens[i].request >= 0) std::copy_n(Input(tokens[i]), kHidden, x.view().Row<float>(i));
    }
    DSV4_ASSERT_OK(step_->Upload(*stream_));
    DSV4_ASSERT_OK(step_->RecordMetadata(*stream_, rows));
    const StepContext context = step_->Context(rows);
    DSV4_ASSERT_OK(compressor_->Record(*stream_, context, context.compressed[0], x.view(), kv_score.view()));
    DSV4_ASSERT_OK(stream_->Synchronize());
    x.CheckGuards();
    kv_score.CheckGuards();
  }

  float* StateRow(const Token& token) const {
    const CacheGroupPlan& plan = plan_.compressed[0].state;
    const int64_t index = token.position / plan.rows_per_block % plan.table_blocks;
    const int32_t block = *step_->Context(1).compressed[0].state_block_table.At<int32_t>(token.request, index);
    return compressor_->state_cache().At<float>(block, token.position % plan.rows_per_block);
  }

  std::vector<float> Entry(int32_t request, int64_t entry) const {
    const CacheGroupPlan& plan = plan_.compressed[0].entries;
    const int64_t block =
        *step_->Context(1).compressed[0].entry_block_table.At<int32_t>(request, entry / plan.rows_per_block);
    std::vector<float> row(kHeadDim);
    DecodeRow(compressor_->entries(), block * plan.rows_per_block + entry % plan.rows_per_block, row.data());
    return row;
  }

  // [u | g + ape] of a token, in double: specification, section 5.1.
  Row ExpectedState(const Token& token) const {
    Row state(2 * width_, 0.0);
    for (int64_t o = 0; o < 2 * width_; ++o) {
      for (int64_t k = 0; k < kHidden; ++k) {
        state[o] += static_cast<double>(*wkv_gate_.view().At<float>(o, k)) * Input(token)[k];
      }
      if (o >= width_) state[o] += *ape_.view().At<float>(token.position % kind_.ratio, o - width_);
    }
    return state;
  }

  // Sections 5.2 and 5.3.
  std::vector<float> ExpectedEntry(int32_t request, int64_t entry) const {
    const int64_t begin = entry * kind_.ratio;
    Row pooled(kHeadDim, 0.0);
    Row weights(kHeadDim, 0.0);
    for (int64_t t = std::max<int64_t>(kind_.overlap ? begin - kind_.ratio : begin, 0); t < begin + kind_.ratio; ++t) {
      const Row state = ExpectedState({request, t});
      const int64_t column = kind_.overlap && t >= begin ? kHeadDim : 0;
      for (int64_t c = 0; c < kHeadDim; ++c) {
        const double weight = std::exp(state[width_ + column + c]);
        weights[c] += weight;
        pooled[c] += weight * state[column + c];
      }
    }
    double squares = 0.0;
    for (int64_t c = 0; c < kHeadDim; ++c) {
      pooled[c] /= weights[c];
      squares += pooled[c] * pooled[c];
    }
    for (int64_t c = 0; c < kHeadDim; ++c) {
      pooled[c] *= *norm_.view().At<float>(c) / std::sqrt(squares / kHeadDim + kEps);
    }
    const float* cos_sin = cos_sin_->view().Row<float>(begin);
    double* rotary = pooled.data() + kHeadDim - kRopeDim;
    for (int64_t i = 0; i < kRopeDim / 2; ++i) {
      const double cosine = cos_sin[i];
      const double sine = cos_sin[kRopeDim / 2 + i];
      const double a = rotary[2 * i];
      const double b = rotary[2 * i + 1];
      rotary[2 * i] = a * cosine - b * sine;
      rotary[2 * i + 1] = a * sine + b * cosine;
    }
    return std::vector<float>(pooled.begin(), pooled.end());
  }

  LayerKind kind_;
  int64_t width_;
  TestTensor wkv_gate_;
  TestTensor ape_;
  TestTensor norm_;
  std::vector<float> inputs_;  // [request][position][channel]
  ModelConfig config_;
  std::unique_ptr<TestTensor> cos_sin_;

  CachePlan plan_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StepState> step_;
  std::unique_ptr<Compressor> compressor_;
  Arena arena_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, CompressorTest,
                         testing::Values(LayerKind{.ratio = 4, .overlap = true}, LayerKind{.ratio = 128},
                                         LayerKind{.ratio = 2}, LayerKind{.ratio = 4},
                                         LayerKind{.ratio = 8, .overlap = true}, LayerKind{.ratio = 3, .overlap = true},
                                         LayerKind{.ratio = 1}),
                         [](const auto& info) {
                           return "Ratio" + std::to_string(info.param.ratio) +
                                  (info.param.overlap ? "WithOverlap" : "WithoutOverlap");
                         });

TEST_P(CompressorTest, EveryCompleteWindowBecomesItsEntry) {
  const int64_t positions = std::max<int64_t>(40, 2 * kind_.ratio + 5);
  for (int64_t chunk : {1, 2, 3, 4, 7, 31, 32, 33}) {
    SCOPED_TRACE(testing::Message() << "chunks of " << chunk);
    ASSERT_NO_FATAL_FAILURE(Build(chunk));
    // Request 1 is always one position behind; a pad stands between them.
    for (int64_t begin = 0; begin < positions; begin += chunk) {
      std::vector<Token> tokens;
      for (int64_t p = begin; p < std::min(begin + chunk, positions); ++p) {
        tokens.push_back({0, p});
        if (p > 0) tokens.push_back({1, p - 1});
      }
      if (begin == 0) tokens.push_back({-1, 12345});
      ASSERT_NO_FATAL_FAILURE(Step(tokens));
    }
    for (int32_t request = 0; request < kRequests; ++request) {
      const int64_t entries = (positions - request) / kind_.ratio;
      for (int64_t j = 0; j < entries; ++j) {
        EXPECT_TRUE(IsClose(Entry(request, j), ExpectedEntry(request, j), kHeadDim, kTolerance))
            << "request " << request << ", entry " << j;
      }
      for (float value : Entry(request, entries)) EXPECT_TRUE(std::isnan(value)) << "no window is complete yet";
    }
  }
}

TEST_P(CompressorTest, StateRowsAreValuesThenScores) {
  ASSERT_NO_FATAL_FAILURE(Build(3));
  ASSERT_NO_FATAL_FAILURE(Step({{1, 0}, {-1, 0}, {1, 1}, {0, 0}}));
  for (const Token& token : {Token{1, 0}, Token{1, 1}, Token{0, 0}}) {
    const float* row = StateRow(token);
    const Row expected = ExpectedState(token);
    EXPECT_TRUE(IsClose({row, row + 2 * width_}, {expected.begin(), expected.end()}, 2 * width_, kTolerance));
  }
  int64_t written = 0;
  for (float value : ToFloats(compressor_->state_cache())) written += std::isnan(value) ? 0 : 1;
  EXPECT_EQ(written, 3 * 2 * width_) << "three rows and nothing else";
}

// Specification, section 9.2: after a step that ends at position L, rows before the window of L may hold anything, and so
// may what the window before keeps only for its own entry.
TEST_P(CompressorTest, NeedsOnlyTheRowsOfOpenWindows) {
  const int64_t positions = 2 * kind_.ratio + 20;
  ASSERT_NO_FATAL_FAILURE(Build(5));
  for (int64_t begin = 0; begin < positions; begin += 5) {
    const int64_t end = begin + 5;
    std::vector<Token> tokens;
    for (int64_t p = begin; p < end; ++p) tokens.push_back({0, p});
    ASSERT_NO_FATAL_FAILURE(Step(tokens));

    const int64_t window_begin = end / kind_.ratio * kind_.ratio;
    const int64_t first_needed = std::max<int64_t>(kind_.overlap ? window_begin - kind_.ratio : window_begin, 0);
    // Keep what is needed, lose the rest.
    std::vector<std::vector<float>> kept;
    for (int64_t p = first_needed; p < end; ++p) {
      const float* row = StateRow({0, p});
      kept.emplace_back(row, row + 2 * width_);
      if (!kind_.overlap || p >= window_begin) continue;
      for (int64_t c = kHeadDim; c < width_; ++c) kept.back()[c] = kept.back()[width_ + c] = NAN;
    }
    DSV4_ASSERT_OK(stream_->Fill(compressor_->state_cache().data, 0xff, compressor_->state_cache().num_bytes()));
    for (int64_t p = first_needed; p < end; ++p) {
      std::copy(kept[p - first_needed].begin(), kept[p - first_needed].end(), StateRow({0, p}));
    }
  }
  for (int64_t j = 0; j < positions / kind_.ratio; ++j) {
    EXPECT_TRUE(IsClose(Entry(0, j), ExpectedEntry(0, j), kHeadDim, kTolerance)) << "entry " << j;
  }
}

TEST_P(CompressorTest, PadsTouchNothing) {
  ASSERT_NO_FATAL_FAILURE(Build(4));
  ASSERT_NO_FATAL_FAILURE(Step({{0, 0}, {0, 1}, {0, 2}, {0, 3}}));
  std::vector<uint8_t> before(arena_.size_bytes());
  DSV4_ASSERT_OK(stream_->CopyToHost(before.data(), arena_.data(), arena_.size_bytes()));
  ASSERT_NO_FATAL_FAILURE(Step({{-1, kind_.ratio - 1}, {-1, 0}, {-2, -1}, {-1, 1000000000000}}));
  std::vector<uint8_t> after(arena_.size_bytes());
  DSV4_ASSERT_OK(stream_->CopyToHost(after.data(), arena_.data(), arena_.size_bytes()));
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace dsv4
