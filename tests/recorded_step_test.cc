// A step that a sink received instead of its being run, replayed from its closures with other inputs than it was recorded with;
// and what each op says that it touches.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/decoder.h"
#include "model/numeric_options.h"
#include "runtime/stream.h"
#include "runtime/testing.h"
#include "tests/decoder_driver.h"
#include "tests/generate.h"
#include "tests/random_model.h"

namespace dsv4 {
namespace {

constexpr NumericOptions kFp32 = {.precision = Precision::kFp32};
constexpr NumericOptions kBf16 = {.precision = Precision::kBf16, .indexer_format = RowFormat::kFp8Key};
constexpr NumericOptions kPublished = {.precision = Precision::kPublished, .indexer_format = RowFormat::kMxfp4Key};

class ListSink final : public RecordSink {
 public:
  absl::Status Append(OpRecord record) override {
    records.push_back(std::move(record));
    return absl::OkStatus();
  }
  void Replay() const {
    for (const OpRecord& record : records) record.run();
  }
  std::vector<OpRecord> records;
};

class RecordedStepTest : public testing::TestWithParam<NumericOptions> {
 protected:
  void SetUp() override {
    const std::vector<LayerKind> layers = {kWindowOnly, kRatio4, kRatio128, {.ratio = 2}};
    DSV4_ASSERT_OK_AND_ASSIGN(model_, LoadRandomModel(RandomModel(SmallModelConfig(layers), /*seed=*/51)));
    options_ = {.numeric = GetParam(),
                .sizes = {.max_requests = 3, .max_context = 300, .max_rows_per_request = 8, .cache_tokens = 900},
                .max_rows = 8,
                .max_logit_rows = 8,
                .mtp = true,
                .poison = true};
    DSV4_ASSERT_OK_AND_ASSIGN(eager_, DecoderDriver::Create(model_, options_));
    DSV4_ASSERT_OK_AND_ASSIGN(replayed_, DecoderDriver::Create(model_, options_));
  }

  std::vector<int32_t> Sequence(int64_t size, uint64_t seed) const {
    return RandomTokens(size, model_.config.vocab_size, seed, /*first=*/0);
  }

  // Records a step of `rows` rows of replayed_, with the inputs that it has at the moment.
  ListSink Record(int64_t rows) {
    ListSink sink;
    replayed_->stream().set_sink(&sink);
    DSV4_EXPECT_OK(replayed_->decoder().Record(replayed_->stream(), rows));
    replayed_->stream().set_sink(nullptr);
    EXPECT_FALSE(sink.records.empty());
    return sink;
  }

  void ExpectEqualOutputs() {
    const DecoderOutputs& actual = replayed_->decoder().outputs();
    const DecoderOutputs& expected = eager_->decoder().outputs();
    EXPECT_TRUE(BitwiseEqual(actual.logits, expected.logits));
    EXPECT_TRUE(BitwiseEqual(actual.mtp_logits, expected.mtp_logits));
    EXPECT_TRUE(BitwiseEqual(actual.tokens, expected.tokens));
  }

  void ExpectEqualCaches() {
    DSV4_ASSERT_OK_AND_ASSIGN(const auto actual, replayed_->CacheBytes());
    DSV4_ASSERT_OK_AND_ASSIGN(const auto expected, eager_->CacheBytes());
    EXPECT_EQ(actual, expected);
  }

  // Runs one step both ways.
  void StepBothWays(const std::vector<StepToken>& tokens, int64_t rows, const ListSink& recorded) {
    DSV4_ASSERT_OK(eager_->Run(tokens, rows));
    replayed_->Fill(tokens);
    DSV4_ASSERT_OK(replayed_->Upload());
    recorded.Replay();
    ExpectEqualOutputs();
  }

  LoadedModel model_;
  DecoderOptions options_;
  std::unique_ptr<DecoderDriver> eager_;
  std::unique_ptr<DecoderDriver> replayed_;
};

INSTANTIATE_TEST_SUITE_P(Precisions, RecordedStepTest, testing::Values(kFp32, kBf16, kPublished),
                         [](const auto& info) { return std::string(PrecisionName(info.param.precision)); });

TEST_P(RecordedStepTest, RecordingRunsNothing) {
  DSV4_ASSERT_OK(replayed_->Run(TokensOf(0, Sequence(8, 1), 0, 8), 8));
  DSV4_ASSERT_OK_AND_ASSIGN(const auto caches, replayed_->CacheBytes());
  DSV4_ASSERT_OK_AND_ASSIGN(const auto logits, replayed_->Logits());
  replayed_->Fill(TokensOf(0, Sequence(16, 2), 8, 16));
  DSV4_ASSERT_OK(replayed_->Upload());
  Record(8);
  DSV4_ASSERT_OK_AND_ASSIGN(const auto caches_after, replayed_->CacheBytes());
  DSV4_ASSERT_OK_AND_ASSIGN(const auto logits_after, replayed_->Logits());
  EXPECT_EQ(caches_after, caches);
  EXPECT_EQ(logits_after, logits);
}

// Recorded before there is any request, replayed at every length: past the first selection that leaves entries out, past
// the first entry of ratio 128, past two turns of every ring.
TEST_P(RecordedStepTest, ReplaysAtOtherLengthsEqualEagerSteps) {
  const ListSink one_row = Record(1);
  const ListSink eight_rows = Record(8);
  const std::vector<int32_t> sequence = Sequence(280, 3);
  for (int64_t begin = 0; begin < 240; begin += 8) {
    StepBothWays(TokensOf(0, sequence, begin, begin + 8), 8, eight_rows);
  }
  for (int64_t p = 240; p < 280; ++p) StepBothWays(TokensOf(0, sequence, p, p + 1), 1, one_row);
  ExpectEqualCaches();
}

TEST_P(RecordedStepTest, ReplaysOfOtherRequestsEqualEagerSteps) {
  const ListSink recorded = Record(8);
  const std::vector<int32_t> a = Sequence(40, 4);
  const std::vector<int32_t> b = Sequence(40, 5);
  const std::vector<int32_t> c = Sequence(40, 6);
  for (int64_t step = 0; step < 8; ++step) {
    std::vector<StepToken> tokens = TokensOf(2, a, 5 * step, 5 * step + 5);
    if (step % 2 == 1) tokens.push_back(TokensOf(0, b, step / 2, step / 2 + 1)[0]);
    const std::vector<StepToken> more = TokensOf(1, c, 2 * step, 2 * step + 2);
    tokens.insert(tokens.begin() + step % 3, more.begin(), more.end());
    StepBothWays(tokens, 8, recorded);
  }
  ExpectEqualCaches();
}

TEST_P(RecordedStepTest, ReplaysSeeNewBlockTables) {
  const ListSink recorded = Record(8);
  for (uint64_t seed : {0, 1, 2}) {
    DSV4_ASSERT_OK(eager_->AssignBlocks(seed));
    DSV4_ASSERT_OK(replayed_->AssignBlocks(seed));
    const std::vector<int32_t> sequence = Sequence(48, 7 + seed);
    for (int64_t begin = 0; begin < 48; begin += 8) {
      StepBothWays(TokensOf(static_cast<int32_t>(seed), sequence, begin, begin + 8), 8, recorded);
    }
    ExpectEqualCaches();
  }
}

TEST_P(RecordedStepTest, BucketsReplayedInTurnEqualEagerSteps) {
  std::map<int64_t, ListSink> buckets;
  for (int64_t rows : {8, 4, 2, 1}) buckets[rows] = Record(rows);
  const std::vector<int32_t> sequence = Sequence(120, 10);
  const std::vector<int64_t> live = {8, 1, 3, 2, 7, 4, 1, 1, 5, 6};
  int64_t begin = 0;
  for (size_t step = 0; begin + live[step % live.size()] <= 120; ++step) {
    const int64_t count = live[step % live.size()];
    int64_t rows = 1;
    while (rows < count) rows *= 2;
    StepBothWays(TokensOf(1, sequence, begin, begin + count), rows, buckets[rows]);
    begin += count;
  }
  ExpectEqualCaches();
}

TEST_P(RecordedStepTest, ReplaysAreRepeatable) {
  const ListSink recorded = Record(8);
  const std::vector<int32_t> sequence = Sequence(16, 11);
  StepBothWays(TokensOf(0, sequence, 0, 8), 8, recorded);
  StepBothWays(TokensOf(0, sequence, 8, 16), 8, recorded);
  const std::vector<float> logits = ToFloats(replayed_->decoder().outputs().logits);
  recorded.Replay();
  EXPECT_EQ(ToFloats(replayed_->decoder().outputs().logits), logits);
  ExpectEqualCaches();
}

// No decision of the host that depends on what the rows hold is recorded.
TEST_P(RecordedStepTest, TheRecordDoesNotDependOnTheInputs) {
  const ListSink empty = Record(8);
  const std::vector<int32_t> sequence = Sequence(300, 12);
  for (int64_t begin = 0; begin < 280; begin += 8) {
    DSV4_ASSERT_OK(replayed_->Run(TokensOf(0, sequence, begin, begin + 8), 8));
  }
  const ListSink long_context = Record(8);
  ASSERT_EQ(long_context.records.size(), empty.records.size());
  for (size_t i = 0; i < empty.records.size(); ++i) {
    EXPECT_EQ(long_context.records[i].op, empty.records[i].op);
    const auto& expected = empty.records[i].accesses.accesses();
    const auto& actual = long_context.records[i].accesses.accesses();
    ASSERT_EQ(actual.size(), expected.size()) << empty.records[i].op;
    for (size_t a = 0; a < expected.size(); ++a) {
      EXPECT_EQ(actual[a].name, expected[a].name);
      EXPECT_EQ(actual[a].kind, expected[a].kind);
      EXPECT_EQ(actual[a].view.data, expected[a].view.data);
      EXPECT_EQ(actual[a].view.ToString(), expected[a].view.ToString());
    }
  }
}

TEST_P(RecordedStepTest, AFailingSinkEndsTheRecording) {
  class FullSink final : public RecordSink {
   public:
    absl::Status Append(OpRecord) override {
      return ++received < 20 ? absl::OkStatus() : absl::ResourceExhaustedError("the sink is full");
    }
    int received = 0;
  } sink;
  replayed_->stream().set_sink(&sink);
  EXPECT_THAT(replayed_->decoder().Record(replayed_->stream(), 8),
              StatusIs(absl::StatusCode::kResourceExhausted, "the sink is full"));
  EXPECT_EQ(sink.received, 20);
}

// All memory that a recorded step touches, as one string of bytes.
class TouchedMemory {
 public:
  explicit TouchedMemory(const std::vector<OpRecord>& records) {
    std::vector<std::pair<uint8_t*, uint8_t*>> ranges;
    for (const OpRecord& record : records) {
      for (const Access& access : record.accesses.accesses()) {
        ForEachRun(access.view, [&](uint8_t* begin, int64_t bytes) { ranges.emplace_back(begin, begin + bytes); });
      }
    }
    std::sort(ranges.begin(), ranges.end());
    for (const auto& [begin, end] : ranges) {
      if (begin == end) continue;
      if (!regions_.empty() && begin <= regions_.back().end) {
        regions_.back().end = std::max(regions_.back().end, end);
      } else {
        regions_.push_back({begin, end, 0});
      }
    }
    for (Region& region : regions_) {
      region.offset = size_;
      size_ += region.end - region.begin;
    }
  }

  std::vector<uint8_t> Save() const {
    std::vector<uint8_t> bytes(size_);
    for (const Region& region : regions_) std::memcpy(&bytes[region.offset], region.begin, region.end - region.begin);
    return bytes;
  }

  void Restore(const std::vector<uint8_t>& bytes) const {
    for (const Region& region : regions_) std::memcpy(region.begin, &bytes[region.offset], region.end - region.begin);
  }

  // 1 for each byte that the op declares with one of the kinds.
  std::vector<uint8_t> Mask(const OpRecord& record, std::initializer_list<AccessKind> kinds) const {
    std::vector<uint8_t> mask(size_, 0);
    for (const Access& access : record.accesses.accesses()) {
      if (std::find(kinds.begin(), kinds.end(), access.kind) == kinds.end()) continue;
      ForEachRun(access.view, [&](uint8_t* begin, int64_t bytes) {
        auto region = std::upper_bound(regions_.begin(), regions_.end(), begin,
                                       [](uint8_t* p, const Region& r) { return p < r.begin; });
        --region;
        std::memset(&mask[region->offset + (begin - region->begin)], 1, bytes);
      });
    }
    return mask;
  }

 private:
  struct Region {
    uint8_t* begin;
    uint8_t* end;
    int64_t offset;
  };

  // Calls visit(first byte, bytes) for each row of the innermost dimension.
  template <typename Visit>
  static void ForEachRun(const TensorView& view, const Visit& visit) {
    if (view.num_elements() == 0) return;
    const int64_t element_bytes = DTypeBytes(view.dtype);
    const int last = view.rank - 1;
    for (int64_t row = 0; row < view.num_elements() / view.extents[last]; ++row) {
      int64_t rest = row;
      int64_t offset = 0;
      for (int i = last - 1; i >= 0; --i) {
        offset += rest % view.extents[i] * view.strides[i];
        rest /= view.extents[i];
      }
      visit(static_cast<uint8_t*>(view.data) + offset * element_bytes, view.extents[last] * element_bytes);
    }
  }

  std::vector<Region> regions_;
  int64_t size_ = 0;
};

// An op that reads or writes what it does not declare would pass every run in order, and fail where a graph reorders ops by
// what they declare. So each op is also run with everything changed that it does not say it reads.
TEST_P(RecordedStepTest, OpsTouchWhatTheyDeclareAndNothingElse) {
  const ListSink recorded = Record(8);
  const std::vector<int32_t> a = Sequence(136, 13);
  const std::vector<int32_t> b = Sequence(136, 14);
  for (int64_t begin = 0; begin < 120; begin += 8) {
    DSV4_ASSERT_OK(replayed_->Run(TokensOf(0, a, begin, begin + 8), 8));
    DSV4_ASSERT_OK(replayed_->Run(TokensOf(2, b, begin, begin + 8), 8));
  }
  // A boundary of every ratio, a decoding request, and pads.
  std::vector<StepToken> tokens = TokensOf(0, a, 123, 128);
  tokens.push_back(TokensOf(2, b, 121, 122)[0]);
  replayed_->Fill(tokens);
  DSV4_ASSERT_OK(replayed_->Upload());

  const TouchedMemory memory(recorded.records);
  for (const OpRecord& record : recorded.records) {
    SCOPED_TRACE(record.op);
    const std::vector<uint8_t> reads = memory.Mask(record, {AccessKind::kRead, AccessKind::kReadBeforeWait});
    const std::vector<uint8_t> writes = memory.Mask(record, {AccessKind::kWrite});
    const std::vector<uint8_t> before = memory.Save();
    record.run();
    const std::vector<uint8_t> after = memory.Save();

    std::vector<uint8_t> changed = before;
    for (size_t i = 0; i < changed.size(); ++i) {
      if (!reads[i]) changed[i] ^= 0x15;
    }
    memory.Restore(changed);
    record.run();
    const std::vector<uint8_t> after_changed = memory.Save();

    int64_t undeclared_writes = 0;
    int64_t undeclared_reads = 0;
    for (size_t i = 0; i < changed.size(); ++i) {
      if (!writes[i]) {
        undeclared_writes += after[i] != before[i] || after_changed[i] != changed[i];
      } else {
        // Written as before, or left alone.
        undeclared_reads += after_changed[i] != after[i] && after_changed[i] != changed[i];
      }
    }
    EXPECT_EQ(undeclared_writes, 0) << "bytes written that are not declared";
    EXPECT_EQ(undeclared_reads, 0) << "bytes that depend on what is not declared";
    memory.Restore(after);
  }
}

}  // namespace
}  // namespace dsv4
