#include "ops/sample/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4::sample {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Draw {
  int64_t row = 0;
  float temperature = 0;
  int64_t seed = 0;
  int64_t request_id = 0;
};

class Step {
 public:
  Step(const std::vector<std::vector<float>>& rows_of_logits, const std::vector<Draw>& draws,
       const std::vector<int64_t>& input_positions)
      : wanted_(static_cast<int64_t>(draws.size())),
        count_(static_cast<int64_t>(input_positions.size())),
        vocabulary_(static_cast<int64_t>(rows_of_logits[0].size())),
        logits(DType::kF32, {wanted_, vocabulary_ + 3}),
        rows(DType::kI32, {wanted_}),
        positions(TestTensor::OfInts(DType::kI64, {count_}, input_positions)),
        temperatures(DType::kF32, {wanted_}),
        seeds(DType::kI64, {wanted_}),
        request_ids(DType::kI64, {wanted_}),
        tokens(DType::kI32, {wanted_}),
        next_tokens(DType::kI32, {count_}) {
    for (int64_t l = 0; l < wanted_; ++l) {
      SetFloats(logits.view().Rows(l, 1).Columns(0, vocabulary_), rows_of_logits[l]);
      rows.data<int32_t>()[l] = static_cast<int32_t>(draws[l].row);
      temperatures.data<float>()[l] = draws[l].temperature;
      seeds.data<int64_t>()[l] = draws[l].seed;
      request_ids.data<int64_t>()[l] = draws[l].request_id;
    }
    params = {.logits = logits.view().Columns(0, vocabulary_),
              .rows = rows.view(),
              .positions = positions.view(),
              .temperatures = temperatures.view(),
              .seeds = seeds.view(),
              .request_ids = request_ids.view(),
              .tokens = tokens.view(),
              .next_tokens = next_tokens.view()};
  }

  void CheckGuards() const {
    for (const TestTensor* tensor :
         {&logits, &rows, &positions, &temperatures, &seeds, &request_ids, &tokens, &next_tokens}) {
      tensor->CheckGuards();
    }
  }

 private:
  int64_t wanted_, count_, vocabulary_;

 public:
  TestTensor logits, rows, positions, temperatures, seeds, request_ids, tokens, next_tokens;
  Params params;
};

class Sample : public OpTest {
 protected:
  void Run(const Step& step) {
    DSV4_ASSERT_OK(Record(stream(), step.params));
    DSV4_ASSERT_OK(stream().Synchronize());
    step.CheckGuards();
  }
  // The token drawn from these logits.
  int64_t DrawOne(const std::vector<float>& logits, const Draw& draw, int64_t position = 0) {
    const Step step({logits}, {draw}, {position});
    Run(step);
    return step.tokens.ToInts()[0];
  }
};

// The known answers that come with the generator's reference implementation.
TEST(Philox, GivesTheReferencesKnownAnswers) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}), ElementsAre(0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  EXPECT_THAT(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              ElementsAre(0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  EXPECT_THAT(Philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
              ElementsAre(0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u));
}

TEST_F(Sample, GreedyTakesTheLargestLogitAndOfEqualOnesTheLowestToken) {
  const Step step(
      {{1, 3, 2, 3}, {-5, -6, -4, -4.5}, {0, 0, 0, 0}, {0, -0.0f, 1e-45f, 0}, {-kInfinity, -3e38f, 0, kInfinity}},
      {{.row = 0}, {.row = 1}, {.row = 2}, {.row = 3}, {.row = 4}}, {0, 0, 0, 0, 0});
  Run(step);
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(1, 2, 0, 2, 3));
  EXPECT_THAT(step.next_tokens.ToInts(), ElementsAre(1, 2, 0, 2, 3));
}

TEST_F(Sample, ANanIsNeverChosen) {
  for (const float temperature : {0.0f, 0.7f}) {
    const Draw draw = {.temperature = temperature};
    EXPECT_EQ(DrawOne({NAN, 1, NAN}, draw), 1);
    EXPECT_EQ(DrawOne({NAN, NAN, -kInfinity}, draw), 2);
    EXPECT_EQ(DrawOne({NAN, NAN, NAN}, draw), 0);
    EXPECT_EQ(DrawOne({-NAN, -100, NAN}, draw), 1);
  }
  std::set<int64_t> seen;
  for (int64_t position = 0; position < 200; ++position) {
    seen.insert(DrawOne({NAN, 0, NAN, 0, NAN}, {.temperature = 1, .seed = 3}, position));
  }
  EXPECT_THAT(seen, ElementsAre(1, 3));
}

TEST_F(Sample, InfiniteLogitsAreCertainOrImpossible) {
  std::set<int64_t> certain, possible;
  for (int64_t position = 0; position < 200; ++position) {
    certain.insert(DrawOne({0, kInfinity, 3e38f, kInfinity}, {.temperature = 1}, position));
    possible.insert(DrawOne({-kInfinity, 0, -kInfinity, 1, -kInfinity}, {.temperature = 1e30f}, position));
  }
  EXPECT_THAT(certain, ElementsAre(1, 3));
  EXPECT_THAT(possible, ElementsAre(1, 3));
}

// The inverse of the cumulative distribution at u, computed in double from the definition.
TEST_F(Sample, IsTheInverseOfTheCumulativeDistributionAtU) {
  int64_t compared = 0;
  for (const int64_t vocabulary : {1, 2, 3, 31, 32, 33, 1000, 129280}) {
    for (const float temperature : {0.25f, 1.0f, 8.0f}) {
      for (int64_t trial = 0; trial < (vocabulary > 1000 ? 3 : 40); ++trial) {
        const std::vector<float> logits = RandomFloats(vocabulary, 100 + trial, 4.0f);
        const int64_t seed = trial * 0x123456789abcd - 5, request = (trial << 33) + 7, position = trial << 31;
        const std::array<uint32_t, 4> words =
            Philox4x32({static_cast<uint32_t>(request), static_cast<uint32_t>(request >> 32),
                        static_cast<uint32_t>(position + 1), static_cast<uint32_t>((position + 1) >> 32)},
                       {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)});
        const double u = (words[0] >> 8) / 16777216.0;
        double total = 0;
        const double largest = *std::max_element(logits.begin(), logits.end());
        for (const float x : logits) total += std::exp((x - largest) / temperature);
        double sum = 0, below = 0;
        int64_t expected = -1;
        for (int64_t t = 0; t < vocabulary && expected < 0; ++t) {
          below = sum;
          sum += std::exp((logits[t] - largest) / temperature) / total;
          if (sum > u) expected = t;
        }
        // An fp32 weight errs by some 1e-6 of itself, so u next to a step of the distribution may fall on either side.
        if (u - below < 3e-6 || sum - u < 3e-6) continue;
        compared += 1;
        EXPECT_EQ(DrawOne(logits, {.temperature = temperature, .seed = seed, .request_id = request}, position),
                  expected);
      }
    }
  }
  EXPECT_GT(compared, 700);
}

// Word 0 of the generator for seed 0 and request 0, as a multiple of 2^-24.
uint32_t UniformBits(int64_t position) {
  return Philox4x32({0, 0, static_cast<uint32_t>(position + 1), 0}, {0, 0})[0] >> 8;
}

// With 2^17 equal logits each token's share of [0, 1) is [t, t + 1) * 2^-17, its lower end included.
TEST_F(Sample, ASharesLowerEndBelongsToIt) {
  const std::vector<float> logits(1 << 17, 2.5f);
  int64_t ends = 0;
  for (int64_t position = 0; ends < 5; ++position) {
    if (UniformBits(position) % 128 != 0) continue;
    ends += 1;
    EXPECT_EQ(DrawOne(logits, {.temperature = 1}, position), UniformBits(position) / 128);
  }
}

// 10^5 tokens, each too unlikely to change an fp32 sum that holds the likely one, are 1.5 in a thousand together.
TEST_F(Sample, ManyUnlikelyTokensKeepTheirShare) {
  std::vector<float> logits(100001, -18.0f);
  logits[0] = 0;
  const double weight = std::exp(-18.0), total = 1 + 1e5 * weight;
  int64_t drawn = 0;
  for (int64_t position = 0; drawn < 3; ++position) {
    const double u = UniformBits(position) * 0x1p-24;
    if (u < 1.0001 / total) continue;
    drawn += 1;
    // The fp32 weight errs by 2^-24 of itself, and so does the whole tail.
    EXPECT_NEAR(static_cast<double>(DrawOne(logits, {.temperature = 1}, position)), (u * total - 1) / weight + 0.5,
                1.0);
  }
}

TEST_F(Sample, DrawsWithTheProbabilitiesOfTheSoftmax) {
  // Probabilities 1/2, 1/4, 1/8, 1/8 at temperature 2.
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {6 * ln2, 4 * ln2, 2 * ln2, 2 * ln2};
  constexpr int64_t kDraws = 40000;
  std::array<int64_t, 4> counts = {};
  for (int64_t batch = 0; batch < kDraws / 100; ++batch) {
    std::vector<Draw> draws;
    std::vector<int64_t> positions;
    for (int64_t l = 0; l < 100; ++l) {
      draws.push_back({.row = l, .temperature = 2, .seed = 42, .request_id = batch});
      positions.push_back(l);
    }
    const Step step(std::vector<std::vector<float>>(100, logits), draws, positions);
    Run(step);
    for (const int64_t token : step.tokens.ToInts()) counts.at(token) += 1;
  }
  const double expected[] = {kDraws / 2, kDraws / 4, kDraws / 8, kDraws / 8};
  // Five standard deviations of a binomial count.
  for (int t = 0; t < 4; ++t) {
    EXPECT_NEAR(counts[t], expected[t], 5 * std::sqrt(expected[t] * (1 - expected[t] / kDraws))) << t;
  }
}

TEST_F(Sample, ADrawDependsOnEachHalfOfSeedRequestAndPosition) {
  const std::vector<float> logits(100000, 0.0f);
  const int64_t high = int64_t{1} << 32;
  std::set<int64_t> tokens;
  for (const int64_t seed : {int64_t{0}, int64_t{1}, high}) {
    tokens.insert(DrawOne(logits, {.temperature = 1, .seed = seed}));
  }
  for (const int64_t request : {int64_t{1}, high}) {
    tokens.insert(DrawOne(logits, {.temperature = 1, .request_id = request}));
  }
  for (const int64_t position : {int64_t{1}, high - 1, high}) {
    tokens.insert(DrawOne(logits, {.temperature = 1}, position));
  }
  EXPECT_EQ(tokens.size(), 8u);
}

TEST_F(Sample, ADrawDoesNotDependOnTheBatch) {
  constexpr int64_t kRows = 33;
  std::vector<std::vector<float>> logits;
  std::vector<Draw> draws;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < kRows; ++i) {
    logits.push_back(RandomFloats(257, i));
    draws.push_back(
        {.row = kRows - 1 - i, .temperature = i % 3 == 0 ? 0.0f : 1.5f, .seed = i % 4, .request_id = 50 + i});
    positions.push_back(1000 + i);
  }
  const Step together(logits, draws, positions);
  Run(together);
  for (int64_t i = 0; i < kRows; ++i) {
    Draw draw = draws[i];
    draw.row = 0;
    EXPECT_EQ(DrawOne(logits[i], draw, positions[kRows - 1 - i]), together.tokens.ToInts()[i]) << i;
    EXPECT_EQ(together.next_tokens.ToInts()[kRows - 1 - i], together.tokens.ToInts()[i]) << i;
  }
}

TEST_F(Sample, KnownNextTokensAreKept) {
  const Step step({{0, 1}, {0, 1}, {0, 1}}, {{.row = 2}, {.row = 0}, {.row = 3}}, {0, 0, 0, 0});
  SetInts(step.next_tokens.view(), {-1, -1, 77, 0});
  Run(step);
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(1, 1, 1));
  EXPECT_THAT(step.next_tokens.ToInts(), ElementsAre(1, -1, 77, 0));
}

TEST_F(Sample, PadsAreNeitherReadNorWritten) {
  const int64_t far = std::numeric_limits<int32_t>::min();
  const Step step({{NAN, NAN}, {0, 1}, {1, 0}}, {{.row = -1, .temperature = NAN}, {.row = 0}, {.row = far}}, {0, 0});
  SetInts(step.tokens.view(), {-9, -9, -9});
  SetInts(step.next_tokens.view(), {-5, -5});
  Run(step);
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(-9, 1, -9));
  EXPECT_THAT(step.next_tokens.ToInts(), ElementsAre(1, -5));
}

TEST_F(Sample, ExtremeTemperaturesAreGreedyAndUniform) {
  std::set<int64_t> cold, hot, infinite;
  for (int64_t position = 0; position < 300; ++position) {
    cold.insert(DrawOne({1, 2, 1.5f, 2 - 0x1p-20f}, {.temperature = 1e-38f}, position));
    hot.insert(DrawOne({-20, 0, 20}, {.temperature = 1e20f}, position));
    infinite.insert(DrawOne({-20, -kInfinity, 20}, {.temperature = kInfinity}, position));
  }
  EXPECT_THAT(cold, ElementsAre(1));
  EXPECT_THAT(hot, ElementsAre(0, 1, 2));
  EXPECT_THAT(infinite, ElementsAre(0, 2));
}

TEST_F(Sample, TakesAStepThatWantsNothing) {
  Step step({{0, 1}}, {{}}, {0});
  for (TensorView* view : {&step.params.logits, &step.params.rows, &step.params.temperatures, &step.params.seeds,
                           &step.params.request_ids, &step.params.tokens}) {
    *view = view->FirstRows(0);
  }
  Run(step);
  EXPECT_THAT(step.next_tokens.ToInts(), ElementsAre(-1));
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(-1));
}

TEST_F(Sample, DeclaresWhatItTouchesAndRunsWhenReplayed) {
  const Step step({{0, 1, 2}}, {{}}, {0, 0});
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), step.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "sample");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read logits f32 [1, 3]", "read rows i32 [1]", "read positions i64 [2]",
                          "read temperatures f32 [1]", "read seeds i64 [1]", "read request_ids i64 [1]",
                          "write tokens i32 [1]", "read next_tokens i32 [2]", "write next_tokens i32 [2]"));
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(-1));
  SetFloats(step.params.logits, {5, 1, 2});
  *step.rows.data<int32_t>() = 1;
  records[0].run();
  EXPECT_THAT(step.tokens.ToInts(), ElementsAre(0));
  EXPECT_THAT(step.next_tokens.ToInts(), ElementsAre(-1, 0));
}

TEST_F(Sample, RefusesBadInputByNameAndWritesNothing) {
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.logits.data = nullptr; }, "logits: "},
      {[](Params& p) { p.logits.dtype = DType::kBf16; }, "logits: expected f32"},
      {[](Params& p) { p.logits.extents[1] = 0; }, "logits: vocabulary"},
      {[](Params& p) { p.logits.strides[1] = 2; }, "logits: "},
      {[](Params& p) { p.rows.extents[0] = 1; }, "rows: expected i32 [2], got i32 [1]"},
      {[](Params& p) { p.rows.dtype = DType::kI64; }, "rows: expected i32"},
      {[](Params& p) { p.positions.dtype = DType::kI32; }, "positions: expected i64"},
      {[](Params& p) { p.temperatures.data = nullptr; }, "temperatures: "},
      {[](Params& p) { p.temperatures.dtype = DType::kI32; }, "temperatures: expected f32"},
      {[](Params& p) { p.seeds.dtype = DType::kI32; }, "seeds: expected i64"},
      {[](Params& p) { p.request_ids.extents[0] = 1; }, "request_ids: expected i64 [2]"},
      {[](Params& p) { p.tokens.data = nullptr; }, "tokens: "},
      {[](Params& p) { p.tokens.dtype = DType::kI64; }, "tokens: expected i32"},
      {[](Params& p) { p.next_tokens.extents[0] = 2; }, "next_tokens: expected i32 [3]"},
      {[](Params& p) { p.tokens.data = p.next_tokens.data; }, "tokens"},
      {[](Params& p) { p.tokens.data = p.logits.data; }, "tokens"},
      {[](Params& p) { p.tokens.data = p.rows.data; }, "tokens"},
      {[](Params& p) { p.next_tokens.data = p.positions.data; }, "next_tokens"},
      {[](Params& p) { p.next_tokens.data = p.seeds.data; }, "next_tokens"},
      {[](Params& p) { p.next_tokens.data = p.request_ids.data; }, "next_tokens"},
      {[](Params& p) { p.tokens.data = p.temperatures.data; }, "tokens"},
  };
  for (const auto& test : cases) {
    Step step({{0, 1, 2}, {2, 1, 0}}, {{.row = 0}, {.row = 2}}, {0, 0, 0});
    DSV4_EXPECT_OK(Validate(step.params));
    test.spoil(step.params);
    EXPECT_THAT(Validate(step.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), step.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(step.tokens.ToInts(), Each(-1)) << test.message;
    EXPECT_THAT(step.next_tokens.ToInts(), Each(-1)) << test.message;
  }
}

}  // namespace
}  // namespace dsv4::sample
