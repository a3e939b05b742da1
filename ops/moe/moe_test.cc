#include "ops/moe/moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/arena.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// fp32: three products in a row of up to 256 terms, each erring by about 1e-6.
constexpr double kF32Tolerance = 5e-6;
// bf16: the expected values round at the same places, but an intermediate value that lies within the fp32 error of a
// midpoint may go the other way: one in 2^-9 / 1e-6 / 2, or 1000, values, each by 2^-8, is sqrt(1e-3) * 2^-8 = 1.2e-4.
// Leaving out one of the roundings would cost 1e-3.
constexpr double kBf16Tolerance = 3e-4;
// e4m3: the same for codes, which are 2^-4 apart: sqrt(1e-5) * 2^-4 = 2e-4, and the flips of bf16 before. But in a
// single row one such code among a few hundred is 2^-4 / sqrt(384) = 3e-3 already. Leaving out the bf16 step changes 3
// % of the codes and costs 5e-3.
constexpr double kFp8Tolerance = 4e-3;

struct Config {
  int64_t rows = 3;
  int64_t channels = 72;
  int64_t inner = 40;
  int64_t shared_inner = 56;
  int64_t experts = 4;
  int64_t chosen = 2;
  DType x_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;  // of the routed experts
  DType shared_dtype = DType::kF32;
  bool by_table = false;
  bool quantize = false;
  float limit = 1.5f;
  int64_t vocabulary = 9;
};

// What the CUDA kernels hand to each other, poisoned, between guard bytes.
struct TestScratch {
  explicit TestScratch(const Config& c)
      : scores(DType::kF32, {c.rows, c.experts}),
        expert_slots(DType::kI32, {std::min(c.experts, c.rows * c.chosen), 3}),
        choices(DType::kI32, {c.rows * c.chosen}),
        gate(c.x_dtype, {c.rows * c.chosen, c.inner}),
        up(c.x_dtype, {c.rows * c.chosen, c.inner}),
        routed(c.x_dtype, {c.rows * c.chosen, c.channels}),
        shared_gate(c.x_dtype, {c.rows, c.shared_inner}),
        shared_up(c.x_dtype, {c.rows, c.shared_inner}),
        shared_out(c.x_dtype, {c.rows, c.channels}) {}

  moe::Scratch view() const {
    return {.scores = scores.view(),
            .expert_slots = expert_slots.view(),
            .choices = choices.view(),
            .gate = gate.view(),
            .up = up.view(),
            .routed = routed.view(),
            .shared_gate = shared_gate.view(),
            .shared_up = shared_up.view(),
            .shared_out = shared_out.view()};
  }
  void CheckGuards() const {
    for (const TestTensor* tensor :
         {&scores, &expert_slots, &choices, &gate, &up, &routed, &shared_gate, &shared_up, &shared_out}) {
      tensor->CheckGuards();
    }
  }

  TestTensor scores, expert_slots, choices, gate, up, routed, shared_gate, shared_up, shared_out;
};

struct Layer {
  explicit Layer(const Config& c)
      : config(c),
        x(c.x_dtype, {c.rows, c.channels}, RandomFloats(c.rows * c.channels, 31)),
        gate({.rows = c.experts, .cols = c.channels, .dtype = DType::kBf16, .seed = 32, .standard_deviation = 0.15f}),
        bias(DType::kF32, {c.experts}, RandomFloats(c.experts, 33, 0.3f)),
        table(DType::kI32, {c.vocabulary, c.chosen}),
        row_tokens(DType::kI32, {c.rows}),
        w1(Options(c, c.experts, c.inner, c.channels, 34)),
        w3(Options(c, c.experts, c.inner, c.channels, 35)),
        w2(Options(c, c.experts, c.channels, c.inner, 36)),
        shared_w1(Options(c, 0, c.shared_inner, c.channels, 37)),
        shared_w3(Options(c, 0, c.shared_inner, c.channels, 38)),
        shared_w2(Options(c, 0, c.channels, c.shared_inner, 39)),
        scratch(c),
        expert_ids(DType::kI32, {c.rows, c.chosen}),
        expert_weights(DType::kF32, {c.rows, c.chosen}),
        out(c.out_dtype, {c.rows, c.channels}) {
    for (int64_t token = 0; token < c.vocabulary; ++token) {
      for (int64_t k = 0; k < c.chosen; ++k) {
        table.data<int32_t>()[token * c.chosen + k] = static_cast<int32_t>((token * 7 + k * 3) % c.experts);
      }
    }
    for (int64_t i = 0; i < c.rows; ++i) row_tokens.data<int32_t>()[i] = static_cast<int32_t>(i * 5 % c.vocabulary);
  }

  static TestWeightOptions Options(const Config& c, int64_t stack, int64_t rows, int64_t cols, uint64_t seed) {
    TestWeightOptions options = {.stack = stack, .rows = rows, .cols = cols, .seed = seed};
    options.dtype = stack > 0 ? c.weight_dtype : c.shared_dtype;
    options.standard_deviation = 1.5f / std::sqrt(static_cast<float>(cols));
    if (options.dtype == DType::kE4m3) options.block_rows = options.block_cols = 128;
    if (options.dtype == DType::kE2m1x2) {
      options.block_cols = 32;
      options.standard_deviation = 0.4f;
    }
    return options;
  }

  moe::Params Params() const {
    moe::Params params = {.x = x.view(),
                          .gate = gate.view(),
                          .bias = bias.weight(),
                          .row_tokens = row_tokens.view(),
                          .experts = {w1.view(), w3.view(), w2.view()},
                          .shared = {shared_w1.view(), shared_w3.view(), shared_w2.view()},
                          .routed_scaling_factor = 2.5f,
                          .swiglu_limit = config.limit,
                          .quantize_activations = config.quantize,
                          .scratch = scratch.view(),
                          .expert_ids = expert_ids.view(),
                          .expert_weights = expert_weights.view(),
                          .out = out.view()};
    if (config.by_table) {
      params.bias = WeightView();
      params.expert_table = table.weight();
    }
    return params;
  }

  Config config;
  TestTensor x;
  TestWeight gate;
  TestTensor bias, table, row_tokens;
  TestWeight w1, w3, w2, shared_w1, shared_w3, shared_w2;
  TestScratch scratch;
  TestTensor expert_ids, expert_weights, out;
};

// The specification, section 10.2, in double, rounded where the contract rounds.
struct Expected {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<float> out;
};

std::vector<double> Product(const std::vector<double>& x, const TestWeight& weight, int64_t matrix) {
  std::vector<double> out;
  for (int64_t o = 0; o < weight.view().rows(); ++o) {
    double sum = 0;
    for (size_t k = 0; k < x.size(); ++k) sum += x[k] * weight.At(o, static_cast<int64_t>(k), matrix);
    out.push_back(sum);
  }
  return out;
}

std::vector<double> ExpertOutput(const Config& config, std::vector<double> x, const TestWeight& w1,
                                 const TestWeight& w3, const TestWeight& w2, int64_t expert, double weight) {
  const auto round = [&](double value) { return config.x_dtype == DType::kBf16 ? NearestBf16(value) : value; };
  if (config.quantize) x = QuantizedActivations(x, 128);
  const std::vector<double> gate = Product(x, w1, expert);
  const std::vector<double> up = Product(x, w3, expert);
  std::vector<double> hidden;
  for (size_t k = 0; k < gate.size(); ++k) {
    const double g = std::min<double>(round(gate[k]), config.limit);
    const double u = std::clamp<double>(round(up[k]), -config.limit, config.limit);
    hidden.push_back(round(g / (1 + std::exp(-g)) * u * weight));
  }
  if (config.quantize) hidden = QuantizedActivations(hidden, 128);
  std::vector<double> out = Product(hidden, w2, expert);
  for (double& value : out) value = round(value);
  return out;
}

Expected Compute(const Layer& layer) {
  const Config& config = layer.config;
  const std::vector<float> x = layer.x.ToFloats();
  Expected expected;
  for (int64_t i = 0; i < config.rows; ++i) {
    const std::vector<double> row(x.begin() + i * config.channels, x.begin() + (i + 1) * config.channels);
    std::vector<double> s = Product(row, layer.gate, 0);
    for (double& value : s) value = std::sqrt(std::log1p(std::exp(value)));
    std::vector<int64_t> order(static_cast<size_t>(config.experts));
    std::iota(order.begin(), order.end(), 0);
    if (config.by_table) {
      const int32_t* of_token = layer.table.data<int32_t>() + layer.row_tokens.data<int32_t>()[i] * config.chosen;
      order.assign(of_token, of_token + config.chosen);
    } else {
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return s[static_cast<size_t>(a)] + layer.bias.data<float>()[a] >
               s[static_cast<size_t>(b)] + layer.bias.data<float>()[b];
      });
    }
    order.resize(static_cast<size_t>(config.chosen));
    double sum = 0;
    for (const int64_t e : order) sum += s[static_cast<size_t>(e)];
    std::vector<double> out(static_cast<size_t>(config.channels), 0.0);
    for (const int64_t e : order) {
      const double weight = s[static_cast<size_t>(e)] / sum * 2.5;
      expected.ids.push_back(e);
      expected.weights.push_back(static_cast<float>(weight));
      const std::vector<double> y = ExpertOutput(config, row, layer.w1, layer.w3, layer.w2, e, weight);
      for (size_t k = 0; k < out.size(); ++k) out[k] += y[k];
    }
    const std::vector<double> y = ExpertOutput(config, row, layer.shared_w1, layer.shared_w3, layer.shared_w2, 0, 1.0);
    for (size_t k = 0; k < out.size(); ++k) expected.out.push_back(static_cast<float>(out[k] + y[k]));
  }
  return expected;
}

// Sizes and types of which tensor cores compute all products on a GPU.
Config TensorCoreConfig(int64_t rows, bool by_table = false, bool quantize = true) {
  return {.rows = rows,
          .channels = 256,
          .inner = 384,
          .shared_inner = 128,
          .experts = 5,
          .chosen = 2,
          .x_dtype = DType::kBf16,
          .weight_dtype = DType::kE2m1x2,
          .shared_dtype = DType::kE4m3,
          .by_table = by_table,
          .quantize = quantize};
}

class MoeTest : public OpTest {
 protected:
  void ExpectRight(const Config& config, double tolerance) {
    const Layer layer(config);
    DSV4_ASSERT_OK(moe::Record(stream(), layer.Params()));
    const Expected expected = Compute(layer);
    EXPECT_EQ(layer.expert_ids.ToInts(), expected.ids);
    EXPECT_TRUE(IsClose(layer.expert_weights.ToFloats(), expected.weights, config.chosen, kF32Tolerance));
    // The rounding of single values counts in the mean.
    const int64_t row_size = tolerance == kF32Tolerance ? config.channels : config.rows * config.channels;
    EXPECT_TRUE(IsClose(layer.out.ToFloats(), expected.out, row_size, tolerance));
    layer.expert_ids.CheckGuards();
    layer.expert_weights.CheckGuards();
    layer.out.CheckGuards();
    layer.scratch.CheckGuards();
  }
};

TEST_F(MoeTest, RoutesByScoreAndSumsTheExperts) {
  for (const int64_t rows : {1, 2, 3, 31, 32, 33}) ExpectRight({.rows = rows}, kF32Tolerance);
}

TEST_F(MoeTest, RoutesByTable) {
  for (const int64_t rows : {1, 3, 33}) ExpectRight({.rows = rows, .by_table = true}, kF32Tolerance);
}

TEST_F(MoeTest, TakesOtherSizes) {
  ExpectRight({.rows = 5, .channels = 33, .inner = 17, .shared_inner = 1, .experts = 7, .chosen = 1}, kF32Tolerance);
  ExpectRight({.rows = 5, .channels = 129, .inner = 130, .experts = 6, .chosen = 6}, kF32Tolerance);
  ExpectRight({.rows = 2, .channels = 8, .experts = 1, .chosen = 1}, kF32Tolerance);
}

TEST_F(MoeTest, TakesThePublishedWeightTypes) {
  // Blocks of 128 x 128 and of 32 that are partial at the edges.
  ExpectRight(
      {.channels = 200, .inner = 136, .shared_inner = 40, .weight_dtype = DType::kE2m1x2, .shared_dtype = DType::kE4m3},
      kF32Tolerance);
}

TEST_F(MoeTest, TakesThePublishedPrecision) {
  for (const int64_t rows : {1, 2, 9, 40}) ExpectRight(TensorCoreConfig(rows), kFp8Tolerance);
  ExpectRight(TensorCoreConfig(3, /*by_table=*/true), kFp8Tolerance);
  ExpectRight(TensorCoreConfig(5, /*by_table=*/false, /*quantize=*/false), kBf16Tolerance);
}

TEST_F(MoeTest, RoutesAmongManyExperts) {
  for (const int64_t rows : {1, 50}) {
    ExpectRight({.rows = rows, .channels = 24, .inner = 4, .shared_inner = 4, .experts = 300, .chosen = 6},
                kF32Tolerance);
  }
}

TEST_F(MoeTest, RoundsIntermediateValuesWithBf16Inputs) {
  ExpectRight({.rows = 32, .channels = 200, .inner = 136, .x_dtype = DType::kBf16}, kBf16Tolerance);
}

TEST_F(MoeTest, QuantizesTheExpertsInputs) {
  Config config = {.rows = 16, .channels = 200, .inner = 136, .quantize = true};
  ExpectRight(config, kFp8Tolerance);
  config.x_dtype = DType::kBf16;
  ExpectRight(config, kFp8Tolerance);
}

TEST_F(MoeTest, ClampsTheGateFromAboveAndTheOtherFactorOnBothSides) {
  // One channel, one inner unit, one expert: w1 x = 4 a, w3 x = b, and everything else is 1.
  const auto run = [&](float a, float b) {
    const TestTensor x(DType::kF32, {1, 2}, {a, b});
    const TestTensor zero_gate(DType::kF32, {1, 2}, {0, 0});
    const TestTensor w1(DType::kF32, {1, 1, 2}, {4, 0});
    const TestTensor w3(DType::kF32, {1, 1, 2}, {0, 1});
    const TestTensor w2(DType::kF32, {1, 2, 1}, {1, 0});
    const TestTensor shared_w2(DType::kF32, {2, 1}, {0, 1});
    const TestTensor bias(DType::kF32, {1}, {0});
    const TestTensor ids(DType::kI32, {1, 1});
    const TestTensor weights(DType::kF32, {1, 1});
    const TestScratch scratch({.rows = 1, .channels = 2, .inner = 1, .shared_inner = 1, .experts = 1, .chosen = 1});
    TestTensor out(DType::kF32, {1, 2});
    const auto matrix = [](const TestTensor& tensor) {
      QuantizedWeight weight;
      weight.values = tensor.weight();
      return weight;
    };
    DSV4_EXPECT_OK(moe::Record(stream(), {.x = x.view(),
                                          .gate = matrix(zero_gate),
                                          .bias = bias.weight(),
                                          .experts = {matrix(w1), matrix(w3), matrix(w2)},
                                          .shared = {matrix(w1).Index(0), matrix(w3).Index(0), matrix(shared_w2)},
                                          .routed_scaling_factor = 1.0f,
                                          .swiglu_limit = 10.0f,
                                          .scratch = scratch.view(),
                                          .expert_ids = ids.view(),
                                          .expert_weights = weights.view(),
                                          .out = out.view()}));
    EXPECT_THAT(weights.ToFloats(), ElementsAre(1.0f));
    return out.ToFloats();  // the routed expert, then the shared one
  };
  const auto silu = [](double g) { return g / (1 + std::exp(-g)); };
  const auto near = [](double value) { return Each(testing::FloatNear(static_cast<float>(value), 1e-4f)); };
  EXPECT_THAT(run(1, 3), near(silu(4) * 3));
  EXPECT_THAT(run(5, 3), near(silu(10) * 3));
  EXPECT_THAT(run(-5, 3), near(silu(-20) * 3));
  EXPECT_THAT(run(1, 30), near(silu(4) * 10));
  EXPECT_THAT(run(1, -30), near(silu(4) * -10));
  EXPECT_THAT(run(-30, 3), near(0));  // exp overflows
}

TEST_F(MoeTest, SelectsWithTheBiasButWeighsWithout) {
  Layer layer({.rows = 1, .channels = 2, .experts = 4, .chosen = 2});
  const TestTensor gate(DType::kF32, {4, 2}, {3, 0, 2, 0, 1, 0, 0, 0});
  SetFloats(layer.x.view(), {1, 0});
  SetFloats(layer.bias.view(), {-5, 0, 0.25f, 9});
  moe::Params params = layer.Params();
  params.gate.values = gate.weight();
  DSV4_ASSERT_OK(moe::Record(stream(), params));
  EXPECT_THAT(layer.expert_ids.ToInts(), ElementsAre(3, 1));
  const double s3 = std::sqrt(std::log1p(std::exp(0.0)));
  const double s1 = std::sqrt(std::log1p(std::exp(2.0)));
  EXPECT_TRUE(IsClose(layer.expert_weights.ToFloats(),
                      {static_cast<float>(2.5 * s3 / (s3 + s1)), static_cast<float>(2.5 * s1 / (s3 + s1))}, 2,
                      kF32Tolerance));
}

TEST_F(MoeTest, PrefersTheLowerExpertAmongEquals) {
  Layer layer({.rows = 1, .channels = 2, .experts = 6, .chosen = 4});
  const TestTensor gate(DType::kF32, {6, 2}, std::vector<float>(12, 0.5f));
  SetFloats(layer.bias.view(), {0, 0, 1, 0, 1, 0});
  moe::Params params = layer.Params();
  params.gate.values = gate.weight();
  DSV4_ASSERT_OK(moe::Record(stream(), params));
  EXPECT_THAT(layer.expert_ids.ToInts(), ElementsAre(2, 4, 0, 1));
  EXPECT_THAT(layer.expert_weights.ToFloats(), Each(0.625f));
}

TEST_F(MoeTest, RanksANanLast) {
  Layer layer({.rows = 1, .channels = 2, .experts = 4, .chosen = 4});
  SetFloats(layer.bias.view(), {kNan, 0, kNan, 5});
  DSV4_ASSERT_OK(moe::Record(stream(), layer.Params()));
  EXPECT_THAT(layer.expert_ids.ToInts(), ElementsAre(3, 1, 0, 2));
}

TEST_F(MoeTest, ScoresLargeGateValues) {
  Layer layer({.rows = 1, .channels = 2, .experts = 3, .chosen = 3});
  const TestTensor gate(DType::kF32, {3, 2}, {1000, 0, -20, 0, 16, 0});
  SetFloats(layer.x.view(), {1, 0});
  SetFloats(layer.bias.view(), {0, 0, 0});
  moe::Params params = layer.Params();
  params.gate.values = gate.weight();
  DSV4_ASSERT_OK(moe::Record(stream(), params));
  EXPECT_THAT(layer.expert_ids.ToInts(), ElementsAre(0, 2, 1));
  const double s[] = {std::sqrt(1000.0), std::sqrt(std::log1p(std::exp(16.0))), std::sqrt(std::log1p(std::exp(-20.0)))};
  const double sum = s[0] + s[1] + s[2];
  const std::vector<float> weights = layer.expert_weights.ToFloats();
  for (size_t c = 0; c < 3; ++c) EXPECT_NEAR(weights[c] / (2.5 * s[c] / sum), 1, kF32Tolerance);
}

TEST_F(MoeTest, AddsAnExpertThatATokenNamesTwice) {
  Layer layer({.rows = 1, .by_table = true, .vocabulary = 1});
  SetInts(layer.table.view(), {3, 3});
  DSV4_ASSERT_OK(moe::Record(stream(), layer.Params()));
  const Expected expected = Compute(layer);
  EXPECT_THAT(layer.expert_ids.ToInts(), ElementsAre(3, 3));
  EXPECT_TRUE(IsClose(layer.out.ToFloats(), expected.out, layer.config.channels, kF32Tolerance));
}

TEST_F(MoeTest, GivesARowTheSameBitsInAnyCompany) {
  const auto check = [&](const Config& config) {
    const Layer all(config);
    DSV4_ASSERT_OK(moe::Record(stream(), all.Params()));
    const Layer again(config);
    for (const int64_t pad : {2, 3, 30}) {  // what a pad may hold
      SetFloats(again.x.view().Rows(pad, 1), std::vector<float>(static_cast<size_t>(config.channels), kNan));
      again.row_tokens.data<int32_t>()[pad] = 0;
    }
    DSV4_ASSERT_OK(moe::Record(stream(), again.Params()));
    for (int64_t i = 0; i < 33; ++i) {
      if (i == 2 || i == 3 || i == 30) continue;
      EXPECT_TRUE(BitwiseEqual(again.out.view().Rows(i, 1), all.out.view().Rows(i, 1))) << i;
      EXPECT_TRUE(BitwiseEqual(again.expert_ids.view().Rows(i, 1), all.expert_ids.view().Rows(i, 1))) << i;
    }
    // A pad's experts are two that exist.
    const std::vector<int64_t> ids = again.expert_ids.ToInts();
    EXPECT_THAT(ids, Each(testing::AllOf(testing::Ge(0), testing::Lt(config.experts))));
    for (size_t i = 0; i < ids.size(); i += 2) EXPECT_NE(ids[i], ids[i + 1]);
    const Layer alone(config);
    for (const int64_t row : {0, 1, 16, 32}) {
      moe::Params params = alone.Params();
      for (TensorView* view :
           {&params.x, &params.row_tokens, &params.expert_ids, &params.expert_weights, &params.out}) {
        *view = view->Rows(row, 1);
      }
      params.scratch = params.scratch.FirstRows(1);
      DSV4_ASSERT_OK(moe::Record(stream(), params));
      EXPECT_TRUE(BitwiseEqual(params.out, all.out.view().Rows(row, 1))) << row;
      EXPECT_TRUE(BitwiseEqual(params.expert_ids, all.expert_ids.view().Rows(row, 1))) << row;
      EXPECT_TRUE(BitwiseEqual(params.expert_weights, all.expert_weights.view().Rows(row, 1))) << row;
    }
  };
  for (const bool by_table : {false, true}) {
    check({.rows = 33,
           .weight_dtype = DType::kE2m1x2,
           .shared_dtype = DType::kE4m3,
           .by_table = by_table,
           .quantize = true});
    check(TensorCoreConfig(33, by_table));
  }
}

TEST_F(MoeTest, RoundsTheSumOnceToBf16) {
  const Layer exact({.rows = 4});
  const Layer layer({.rows = 4, .out_dtype = DType::kBf16});
  DSV4_ASSERT_OK(moe::Record(stream(), exact.Params()));
  DSV4_ASSERT_OK(moe::Record(stream(), layer.Params()));
  const TestTensor rounded(DType::kBf16, {4, layer.config.channels}, exact.out.ToFloats());
  EXPECT_TRUE(BitwiseEqual(layer.out.view(), rounded.view()));
}

TEST_F(MoeTest, DeclaresWhatItTouches) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  const Layer scored({.rows = 2, .channels = 4, .inner = 6, .shared_inner = 8, .weight_dtype = DType::kE2m1x2});
  const std::vector<OpRecord> records = Capture([&] { return moe::Record(stream(), scored.Params()); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "moe");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read x f32 [2, 4]", "before wait gate bf16 [4, 4]", "before wait bias f32 [4]",
                          "before wait experts.w1 e2m1x2 [4, 6, 2]", "before wait experts.w1 e8m0 [4, 6, 1]",
                          "before wait experts.w3 e2m1x2 [4, 6, 2]", "before wait experts.w3 e8m0 [4, 6, 1]",
                          "before wait experts.w2 e2m1x2 [4, 4, 3]", "before wait experts.w2 e8m0 [4, 4, 1]",
                          "before wait shared.w1 f32 [8, 4]", "before wait shared.w3 f32 [8, 4]",
                          "before wait shared.w2 f32 [4, 8]", "write scratch.scores f32 [2, 4]",
                          "write scratch.expert_slots i32 [4, 3]", "write scratch.choices i32 [4]",
                          "write scratch.gate f32 [4, 6]", "write scratch.up f32 [4, 6]",
                          "write scratch.routed f32 [4, 4]", "write scratch.shared_gate f32 [2, 8]",
                          "write scratch.shared_up f32 [2, 8]", "write scratch.shared_out f32 [2, 4]",
                          "write expert_ids i32 [2, 2]", "write expert_weights f32 [2, 2]", "write out f32 [2, 4]"));
  const Layer hashed({.rows = 2, .channels = 4, .by_table = true});
  const std::vector<OpRecord> hash_records = Capture([&] { return moe::Record(stream(), hashed.Params()); });
  ASSERT_EQ(hash_records.size(), 1u);
  const std::vector<std::string> declared = Declared(hash_records[0]);
  EXPECT_THAT(declared, testing::Contains("before wait expert_table i32 [9, 2]"));
  EXPECT_THAT(declared, testing::Contains("read row_tokens i32 [2]"));
  EXPECT_THAT(hashed.out.Bytes(), Each(0xFF));
}

TEST_F(MoeTest, LaysOutScratchForItsSizes) {
  const Layer layer({.rows = 7, .experts = 5, .chosen = 2});
  const Config& c = layer.config;
  moe::Scratch scratch;
  DSV4_ASSERT_OK_AND_ASSIGN(const Arena arena, Arena::Create(device(), [&](Arena& a) {
                              scratch = moe::Scratch::LayOut(a, {.rows = c.rows,
                                                                 .channels = c.channels,
                                                                 .experts = c.experts,
                                                                 .chosen = c.chosen,
                                                                 .inner = c.inner,
                                                                 .shared_inner = c.shared_inner,
                                                                 .dtype = c.x_dtype});
                            }));
  for (const int64_t rows : {7, 3, 2, 1}) {  // more choices than experts, and fewer
    moe::Params params = layer.Params();
    for (TensorView* view : {&params.x, &params.row_tokens, &params.expert_ids, &params.expert_weights, &params.out}) {
      *view = view->FirstRows(rows);
    }
    EXPECT_THAT(moe::Validate(params), rows == 7 ? StatusIs(absl::StatusCode::kOk, "")
                                                 : StatusIs(absl::StatusCode::kInvalidArgument, "scratch.scores"));
    params.scratch = scratch.FirstRows(rows);
    DSV4_EXPECT_OK(moe::Validate(params));
    DSV4_EXPECT_OK(moe::Record(stream(), params));
  }
}

TEST_F(MoeTest, RefusesBadInputByName) {
  const Layer layer({.rows = 2, .channels = 8, .inner = 6, .shared_inner = 10});
  const Layer other({.rows = 2, .channels = 9, .inner = 5, .shared_inner = 11, .experts = 3});
  const auto refused = [&](const char* message, const auto& change) {
    moe::Params params = layer.Params();
    change(params);
    EXPECT_THAT(moe::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("x: expected f32 or bf16 [any, any]", [](auto& p) { p.x = TensorView(); });
  refused("gate: expected", [&](auto& p) { p.gate = other.gate.view(); });
  refused("gate: expected one matrix", [&](auto& p) { p.gate = layer.w1.view(); });
  refused("bias: expected f32 [4]", [&](auto& p) { p.bias = other.bias.weight(); });
  refused("bias, expert_table: expected one of them, got neither", [](auto& p) { p.bias = WeightView(); });
  refused("bias, expert_table: expected one of them, got both",
          [&](auto& p) { p.expert_table = layer.table.weight(); });
  refused("row_tokens: expected i32 [2]", [&](auto& p) {
    p.bias = WeightView();
    p.expert_table = layer.table.weight();
    p.row_tokens = TensorView();
  });
  refused("expert_table: expected i32 [any, 2]", [&](auto& p) {
    p.bias = WeightView();
    p.expert_table = WeightView(layer.table.view().Columns(0, 1));
  });
  refused("experts.w1: expected a stack of 4 matrices", [&](auto& p) { p.experts.w1 = layer.shared_w1.view(); });
  refused("experts.w1: expected a stack of 4 matrices", [&](auto& p) { p.experts.w1 = other.w1.view(); });
  refused("experts.w3: expected", [&](auto& p) { p.experts.w3 = layer.w2.view(); });
  refused("experts.w2: expected", [&](auto& p) { p.experts.w2 = layer.w1.view(); });
  refused("shared.w1: expected one matrix", [&](auto& p) { p.shared.w1 = layer.w1.view(); });
  refused("shared.w3: expected", [&](auto& p) { p.shared.w3 = other.shared_w3.view(); });
  refused("shared.w2: expected", [&](auto& p) { p.shared.w2 = other.shared_w2.view(); });
  refused("swiglu_limit: expected a positive number, got 0", [](auto& p) { p.swiglu_limit = 0; });
  refused("swiglu_limit: expected a positive number", [](auto& p) { p.swiglu_limit = kNan; });
  refused("expert_ids: expected i32 [2, any]", [](auto& p) { p.expert_ids = p.expert_ids.FirstRows(1); });
  refused("experts of a row: expected at least 1, got 0", [](auto& p) { p.expert_ids.extents[1] = 0; });
  const TestTensor many(DType::kI32, {2, 5});
  refused("expert_ids: expected at most 4 experts of a row, got 5", [&](auto& p) { p.expert_ids = many.view(); });
  refused("expert_weights: expected f32 [2, 2]", [](auto& p) { p.expert_weights.dtype = DType::kBf16; });
  refused("scratch.scores: expected f32 [2, 4], got no tensor", [](auto& p) { p.scratch = moe::Scratch(); });
  refused("scratch.expert_slots: expected i32 [4, 3]",
          [](auto& p) { p.scratch.expert_slots = p.scratch.expert_slots.FirstRows(3); });
  refused("scratch.choices: expected i32 [4]", [](auto& p) { p.scratch.choices.dtype = DType::kF32; });
  refused("scratch.gate: expected f32 [4, 6]", [](auto& p) { p.scratch.gate.dtype = DType::kBf16; });
  refused("scratch.up: expected f32 [4, 6]", [](auto& p) { p.scratch.up = p.scratch.up.FirstRows(2); });
  refused("scratch.routed: expected f32 [4, 8]", [](auto& p) { p.scratch.routed = p.scratch.routed.FirstRows(2); });
  refused("scratch.shared_gate: expected f32 [2, 10]",
          [](auto& p) { p.scratch.shared_gate = p.scratch.shared_gate.FirstRows(1); });
  refused("scratch.shared_up: expected a contiguous tensor", [](auto& p) { p.scratch.shared_up.strides[0] = 20; });
  refused("scratch.shared_out: expected f32 [2, 8]",
          [](auto& p) { p.scratch.shared_out = p.scratch.shared_out.Columns(0, 7); });
  refused("scratch.gate and scratch.up: ", [](auto& p) { p.scratch.up = p.scratch.gate; });
  refused("out: expected f32 or bf16 [2, 8]", [](auto& p) { p.out = p.out.Columns(0, 7); });
  refused("out and x: ", [](auto& p) { p.out = p.x; });
  refused("out and shared.w2: ",
          [&](auto& p) { p.out = layer.shared_w2.view().values.view().Rows(0, 2).Columns(0, 8); });
  EXPECT_THAT(layer.out.Bytes(), Each(0xFF));
  EXPECT_THAT(layer.expert_ids.Bytes(), Each(0xFF));
  EXPECT_THAT(layer.expert_weights.Bytes(), Each(0xFF));
  EXPECT_THAT(layer.scratch.scores.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
