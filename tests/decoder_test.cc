// Steps of a decoder as a whole: pads, buckets, caches, and tokens that are taken back.
#include "model/decoder.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/numeric_options.h"
#include "runtime/testing.h"
#include "tests/decoder_driver.h"
#include "tests/generate.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

using RowsOfFloats = std::vector<std::vector<float>>;

constexpr NumericOptions kFp32 = {.precision = Precision::kFp32};
constexpr NumericOptions kPublished = {.precision = Precision::kPublished, .indexer_format = RowFormat::kMxfp4Key};

class DecoderTest : public testing::TestWithParam<NumericOptions> {
 protected:
  void SetUp() override {
    const std::vector<LayerKind> layers = {kWindowOnly, kRatio4, kRatio128, {.ratio = 8, .overlap = true}};
    DSV4_ASSERT_OK_AND_ASSIGN(model_, LoadRandomModel(RandomModel(SmallModelConfig(layers), /*seed=*/41)));
  }

  DecoderOptions Options(int64_t max_requests, int64_t max_context, int64_t max_rows) const {
    return {.numeric = GetParam(),
            .sizes = {.max_requests = max_requests,
                      .max_context = max_context,
                      .max_rows_per_request = max_rows,
                      .cache_tokens = max_requests * max_context},
            .max_rows = max_rows,
            .max_logit_rows = max_rows,
            .poison = true};
  }

  std::vector<int32_t> Sequence(int64_t size, uint64_t seed) const {
    return RandomTokens(size, model_.config.vocab_size, seed, /*first=*/0);
  }

  LoadedModel model_;
};

INSTANTIATE_TEST_SUITE_P(Precisions, DecoderTest, testing::Values(kFp32, kPublished),
                         [](const auto& info) { return std::string(PrecisionName(info.param.precision)); });

bool HasNan(const RowsOfFloats& rows) {
  return std::any_of(rows.begin(), rows.end(), [](const std::vector<float>& row) {
    return std::any_of(row.begin(), row.end(), [](float value) { return value != value; });
  });
}

// Feeds a sequence in steps of `chunk` rows and returns the logits of every position.
RowsOfFloats Feed(DecoderDriver& driver, int32_t request, const std::vector<int32_t>& sequence, int64_t chunk) {
  RowsOfFloats logits;
  const int64_t size = static_cast<int64_t>(sequence.size());
  for (int64_t begin = 0; begin < size; begin += chunk) {
    const int64_t end = std::min(begin + chunk, size);
    DSV4_EXPECT_OK(driver.Run(TokensOf(request, sequence, begin, end), end - begin));
    absl::StatusOr<RowsOfFloats> rows = driver.Logits();
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (rows.ok()) logits.insert(logits.end(), rows->begin(), rows->end());
  }
  EXPECT_FALSE(HasNan(logits));
  return logits;
}

TEST_P(DecoderTest, PoisonIsInEveryCache) {
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(2, 64, 8)));
  DSV4_ASSERT_OK_AND_ASSIGN(const auto caches, driver->CacheBytes());
  EXPECT_EQ(caches.size(), 4u + 3u * 2u + 2u);
  for (const std::vector<uint8_t>& bytes : caches) {
    EXPECT_GT(bytes.size(), 0u);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0xff), static_cast<int64_t>(bytes.size()));
  }
  for (float value : ToFloats(driver->decoder().scratch().x)) EXPECT_TRUE(value != value);
}

TEST_P(DecoderTest, GarbageInPadsChangesNothing) {
  const std::vector<int32_t> sequence = Sequence(24, 1);
  DecoderOptions options = Options(/*max_requests=*/2, /*max_context=*/64, /*max_rows=*/8);
  options.mtp = true;
  DSV4_ASSERT_OK_AND_ASSIGN(const auto clean, DecoderDriver::Create(model_, options));
  DSV4_ASSERT_OK_AND_ASSIGN(const auto dirty, DecoderDriver::Create(model_, options));
  // Live rows between pads, as they are once some requests of a looped step have finished.
  const std::vector<int64_t> live_rows = {1, 2, 6};
  for (int64_t begin = 0; begin < 24; begin += 3) {
    for (DecoderDriver* driver : {clean.get(), dirty.get()}) {
      const std::vector<StepToken> tokens = TokensOf(1, sequence, begin, begin + 3);
      driver->Fill({});
      const StepInputs& inputs = driver->decoder().step_state().host_inputs();
      for (int64_t row = 0; row < 8 && driver == dirty.get(); ++row) {
        *inputs.token_ids.At<int32_t>(row) = row % 2 == 0 ? std::numeric_limits<int32_t>::max() : -77;
        *inputs.requests.At<int32_t>(row) = row % 2 == 0 ? -1 : std::numeric_limits<int32_t>::min();
        *inputs.positions.At<int64_t>(row) = row % 3 == 0   ? std::numeric_limits<int64_t>::min()
                                             : row % 3 == 1 ? std::numeric_limits<int64_t>::max()
                                                            : begin;
        *inputs.next_tokens.At<int32_t>(row) = static_cast<int32_t>(row) - 1;  // what a finished row has left
      }
      for (size_t i = 0; i < tokens.size(); ++i) {
        const int64_t row = live_rows[i];
        *inputs.token_ids.At<int32_t>(row) = tokens[i].token;
        *inputs.requests.At<int32_t>(row) = tokens[i].request;
        *inputs.positions.At<int64_t>(row) = tokens[i].position;
        *inputs.next_tokens.At<int32_t>(row) = tokens[i].next_token;
        *inputs.logit_rows.At<int32_t>(static_cast<int64_t>(i)) = static_cast<int32_t>(row);
      }
      DSV4_ASSERT_OK(driver->Upload());
      DSV4_ASSERT_OK(driver->decoder().Record(driver->stream(), 8));
    }
    for (bool mtp : {false, true}) {
      const auto logits = [mtp](DecoderDriver& driver) {
        const DecoderOutputs& outputs = driver.decoder().outputs();
        return (mtp ? outputs.mtp_logits : outputs.logits).FirstRows(3);
      };
      EXPECT_TRUE(BitwiseEqual(logits(*dirty), logits(*clean))) << "from position " << begin;
    }
  }
  DSV4_ASSERT_OK_AND_ASSIGN(const auto clean_bytes, clean->CacheBytes());
  DSV4_ASSERT_OK_AND_ASSIGN(const auto dirty_bytes, dirty->CacheBytes());
  EXPECT_EQ(dirty_bytes, clean_bytes);
}

// The warm-up of a graph is such a step.
TEST_P(DecoderTest, AStepOfPadsLeavesEveryCacheAsItIs) {
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(2, 64, 8)));
  Feed(*driver, 0, Sequence(21, 2), 7);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto before, driver->CacheBytes());
  for (int64_t rows : {1, 8}) DSV4_ASSERT_OK(driver->Run({}, rows));
  DSV4_ASSERT_OK_AND_ASSIGN(const auto after, driver->CacheBytes());
  EXPECT_EQ(after, before);
}

TEST_P(DecoderTest, TheBucketIsNotTheAmountOfWork) {
  const std::vector<int32_t> sequence = Sequence(30, 3);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto exact, DecoderDriver::Create(model_, Options(2, 64, 64)));
  DSV4_ASSERT_OK_AND_ASSIGN(const auto padded, DecoderDriver::Create(model_, Options(2, 64, 64)));
  for (int64_t begin = 0; begin < 30; begin += 6) {
    DSV4_ASSERT_OK(exact->Run(TokensOf(1, sequence, begin, begin + 6), 6));
    DSV4_ASSERT_OK(padded->Run(TokensOf(1, sequence, begin, begin + 6), 64));
    DSV4_ASSERT_OK_AND_ASSIGN(const RowsOfFloats expected, exact->Logits());
    DSV4_ASSERT_OK_AND_ASSIGN(const RowsOfFloats actual, padded->Logits());
    EXPECT_EQ(actual, expected);
    DSV4_ASSERT_OK_AND_ASSIGN(const auto expected_bytes, exact->CacheBytes());
    DSV4_ASSERT_OK_AND_ASSIGN(const auto actual_bytes, padded->CacheBytes());
    EXPECT_EQ(actual_bytes, expected_bytes);
  }
}

TEST_P(DecoderTest, ChunksLeaveTheSameBytesInEveryCache) {
  const std::vector<int32_t> sequence = Sequence(141, 4);
  std::vector<std::vector<uint8_t>> expected;
  for (int64_t chunk : {1, 2, 5, 32}) {
    DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(1, 160, 32)));
    Feed(*driver, 0, sequence, chunk);
    DSV4_ASSERT_OK_AND_ASSIGN(const auto bytes, driver->CacheBytes());
    if (expected.empty()) expected = bytes;
    EXPECT_EQ(bytes, expected) << "chunks of " << chunk;
  }
}

TEST_P(DecoderTest, RowsOffABoundaryWriteNoEntry) {
  const std::vector<int32_t> sequence = Sequence(8, 5);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(1, 64, 8)));
  const Attention& attention = driver->decoder().attention(1);
  ASSERT_EQ(attention.kind(), kRatio4);
  auto entry_bytes = [&] {
    std::vector<std::vector<uint8_t>> bytes;
    for (const TensorView& pages : {attention.compressor()->entries().pages, attention.indexer()->keys().pages}) {
      bytes.emplace_back(pages.num_bytes());
      DSV4_EXPECT_OK(driver->stream().CopyToHost(bytes.back().data(), pages.data, pages.num_bytes()));
    }
    DSV4_EXPECT_OK(driver->stream().Synchronize());
    return bytes;
  };
  std::vector<std::vector<uint8_t>> before = entry_bytes();
  for (int64_t p = 0; p < 8; ++p) {
    DSV4_ASSERT_OK(driver->Run(TokensOf(0, sequence, p, p + 1), 1));
    const std::vector<std::vector<uint8_t>> after = entry_bytes();
    if (p == 3 || p == 7) {
      EXPECT_NE(after[0], before[0]) << "position " << p;
      EXPECT_NE(after[1], before[1]) << "position " << p;
    } else {
      EXPECT_EQ(after, before) << "position " << p;
    }
    before = after;
  }
}

// Invalid list entries, pads and unused table entries all lead to block 0 if they are not left out, and 0 x NaN is NaN.
TEST_P(DecoderTest, NanInBlockZeroOfEveryCacheStaysWithItsRequest) {
  const std::vector<int32_t> sequence = Sequence(45, 6);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(2, 160, 16)));
  const RowsOfFloats expected = Feed(*driver, 1, sequence, 1);
  Feed(*driver, 0, sequence, 16);
  for (const TensorView& cache : driver->Caches()) {
    const TensorView block = cache.Index(0);
    DSV4_ASSERT_OK(driver->stream().Fill(block.data, 0xff, block.num_bytes()));
  }

  // Request 0 owns block 0 and takes part in each step; it shall be NaN, and nobody else.
  RowsOfFloats actual;
  for (int64_t p = 0; p < 45; ++p) {
    std::vector<StepToken> tokens = TokensOf(1, sequence, p, p + 1);
    tokens.push_back({.request = 0, .position = 45 + p, .token = 3});
    DSV4_ASSERT_OK(driver->Run(tokens, 8));
    DSV4_ASSERT_OK_AND_ASSIGN(const RowsOfFloats logits, driver->Logits());
    actual.push_back(logits[0]);
    EXPECT_TRUE(HasNan({logits[1]})) << "what request 0 attends to is in block 0";
  }
  EXPECT_EQ(actual, expected);
}

TEST_P(DecoderTest, BlockTablesAreReadAtEachStep) {
  const std::vector<int32_t> sequence = Sequence(40, 7);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(3, 160, 16)));
  const RowsOfFloats expected = Feed(*driver, 0, sequence, 16);
  for (uint64_t seed : {1, 2, 3}) {
    DSV4_ASSERT_OK(driver->AssignBlocks(seed));
    for (int32_t request : {2, 0}) EXPECT_EQ(Feed(*driver, request, sequence, 16), expected) << "seed " << seed;
  }
}

// A step may hold tokens that are taken back afterwards: drafts. What they wrote is written again before it is read.
TEST_P(DecoderTest, TokensTakenBackLeaveNoTrace) {
  constexpr int64_t kPositions = 270;
  const std::vector<int32_t> sequence = Sequence(kPositions, 8);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto one_at_a_time, DecoderDriver::Create(model_, Options(1, kPositions + 16, 1)));
  const RowsOfFloats expected = Feed(*one_at_a_time, 0, sequence, 1);
  for (int64_t width : {2, 4, 5, 8, 12}) {
    SCOPED_TRACE(testing::Message() << "steps of " << width);
    // Caches for steps of this width and no wider.
    DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(1, kPositions + 16, width)));
    std::set<std::pair<int64_t, int64_t>> seen;  // phase, accepted
    std::mt19937_64 random(9);
    int64_t committed = 0;
    for (int64_t step = 0; committed + width <= kPositions; ++step) {
      const int64_t accepted = static_cast<int64_t>(random() % static_cast<uint64_t>(width + 1));
      seen.insert({committed % 4, accepted});
      std::vector<StepToken> tokens = TokensOf(0, sequence, committed, committed + width);
      for (int64_t i = accepted; i < width; ++i) tokens[i].token = (tokens[i].token + 1 + static_cast<int32_t>(i)) % 64;
      DSV4_ASSERT_OK(driver->Run(tokens, width));
      DSV4_ASSERT_OK_AND_ASSIGN(const RowsOfFloats logits, driver->Logits());
      for (int64_t i = 0; i < accepted; ++i) {
        ASSERT_EQ(logits[i], expected[committed + i]) << "step " << step << ", position " << committed + i;
      }
      committed += accepted;
    }
    EXPECT_GE(static_cast<int64_t>(seen.size()), 2 * (width + 1)) << "phases and counts are hardly mixed";
  }
}

TEST_P(DecoderTest, RefusesStepsThatAreTooNarrowOrTooWide) {
  DSV4_ASSERT_OK_AND_ASSIGN(const auto driver, DecoderDriver::Create(model_, Options(1, 16, 4)));
  for (int64_t rows : {int64_t{0}, int64_t{-1}, int64_t{5}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_THAT(driver->decoder().Record(driver->stream(), rows),
                StatusIs(absl::StatusCode::kInvalidArgument, "rows: expected 1 to max_rows = 4, got"));
  }
}

TEST_P(DecoderTest, RefusesBadSizesByName) {
  const DecoderOptions good = Options(1, 16, 4);
  std::vector<std::pair<DecoderOptions, const char*>> cases;
  auto add = [&](const char* name, auto change) {
    for (int64_t bad : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
      cases.emplace_back(good, name);
      change(cases.back().first, bad);
    }
  };
  add("max_requests", [](DecoderOptions& o, int64_t bad) { o.sizes.max_requests = bad; });
  add("max_context", [](DecoderOptions& o, int64_t bad) { o.sizes.max_context = bad; });
  add("max_rows_per_request", [](DecoderOptions& o, int64_t bad) { o.sizes.max_rows_per_request = bad; });
  add("cache_tokens", [](DecoderOptions& o, int64_t bad) { o.sizes.cache_tokens = bad; });
  add("max_rows", [](DecoderOptions& o, int64_t bad) { o.max_rows = bad; });
  add("max_logit_rows", [](DecoderOptions& o, int64_t bad) { o.max_logit_rows = bad; });
  for (const auto& [options, name] : cases) {
    EXPECT_THAT(DecoderDriver::Create(model_, options),
                StatusIs(absl::StatusCode::kInvalidArgument, std::string(name) + ": expected"));
  }
}

}  // namespace
}  // namespace dsv4
