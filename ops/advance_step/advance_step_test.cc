#include "ops/advance_step/advance_step.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4::advance_step {
namespace {

using ::testing::ElementsAre;

constexpr int32_t kEos = 1;

struct Options {
  std::vector<int64_t> requests, token_ids, positions, next_tokens;  // of each row
  std::vector<int64_t> remaining, ignore_eos;                        // of each request
  int64_t forced_tokens = 0;                                         // of each request; 0: no tensor
  std::vector<int64_t> forced;
  int64_t capacity = 4;
  std::vector<int64_t> output_counts;
};

class Loop {
 public:
  explicit Loop(const Options& options)
      : rows_(static_cast<int64_t>(options.requests.size())),
        num_requests_(static_cast<int64_t>(options.remaining.size())),
        requests(TestTensor::OfInts(DType::kI32, {rows_}, options.requests)),
        token_ids(TestTensor::OfInts(DType::kI32, {rows_}, options.token_ids)),
        positions(TestTensor::OfInts(DType::kI64, {rows_}, options.positions)),
        next_tokens(TestTensor::OfInts(DType::kI32, {rows_}, options.next_tokens)),
        remaining(TestTensor::OfInts(DType::kI32, {num_requests_}, options.remaining)),
        ignore_eos(TestTensor::OfInts(DType::kU8, {num_requests_}, options.ignore_eos)),
        forced(TestTensor::OfInts(DType::kI32, {num_requests_, options.forced_tokens}, options.forced)),
        outputs(DType::kI32, {num_requests_, options.capacity}),
        output_counts(TestTensor::OfInts(DType::kI32, {num_requests_}, options.output_counts)),
        live_rows(DType::kI32, {1}) {
    params = {.requests = requests.view(),
              .token_ids = token_ids.view(),
              .positions = positions.view(),
              .next_tokens = next_tokens.view(),
              .remaining = remaining.view(),
              .ignore_eos = ignore_eos.view(),
              .forced = options.forced_tokens > 0 ? forced.view() : TensorView(),
              .eos_token = kEos,
              .outputs = outputs.view(),
              .output_counts = output_counts.view(),
              .live_rows = live_rows.view()};
  }

  // The bytes of all tensors, one after the other.
  std::vector<uint8_t> Bytes() const {
    std::vector<uint8_t> bytes;
    for (const TestTensor* tensor : {&requests, &token_ids, &positions, &next_tokens, &remaining, &ignore_eos, &forced,
                                     &outputs, &output_counts, &live_rows}) {
      const std::vector<uint8_t> part = tensor->Bytes();
      bytes.insert(bytes.end(), part.begin(), part.end());
      tensor->CheckGuards();
    }
    return bytes;
  }

 private:
  int64_t rows_, num_requests_;

 public:
  TestTensor requests, token_ids, positions, next_tokens, remaining, ignore_eos, forced, outputs, output_counts,
      live_rows;
  Params params;
};

class AdvanceStep : public OpTest {
 protected:
  void Run(const Loop& loop) {
    DSV4_ASSERT_OK(Record(stream(), loop.params));
    DSV4_ASSERT_OK(stream().Synchronize());
    loop.Bytes();  // checks the guards
  }
};

TEST_F(AdvanceStep, OutputsTheTokenAndMovesOn) {
  const Loop loop({.requests = {1, 0},
                   .token_ids = {50, 60},
                   .positions = {7, 1000000},
                   .next_tokens = {51, 61},
                   .remaining = {3, 2},
                   .ignore_eos = {0, 0},
                   .output_counts = {1, 0}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(1, 0));
  EXPECT_THAT(loop.token_ids.ToInts(), ElementsAre(51, 61));
  EXPECT_THAT(loop.positions.ToInts(), ElementsAre(8, 1000001));
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(-1, -1));
  EXPECT_THAT(loop.remaining.ToInts(), ElementsAre(2, 1));
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(-1, 61, -1, -1, 51, -1, -1, -1));
  EXPECT_THAT(loop.output_counts.ToInts(), ElementsAre(2, 1));
  EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(2));
}

TEST_F(AdvanceStep, LeavesPadsAsTheyAre) {
  const int64_t garbage = std::numeric_limits<int32_t>::min();
  const Loop loop({.requests = {-1, 0, garbage},
                   .token_ids = {garbage, 60, -3},
                   .positions = {-5, 10, std::numeric_limits<int64_t>::max()},
                   .next_tokens = {garbage, 61, 99},
                   .remaining = {5},
                   .ignore_eos = {0},
                   .output_counts = {0}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1, 0, garbage));
  EXPECT_THAT(loop.token_ids.ToInts(), ElementsAre(garbage, 61, -3));
  EXPECT_THAT(loop.positions.ToInts(), ElementsAre(-5, 11, std::numeric_limits<int64_t>::max()));
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(garbage, -1, 99));
  EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(1));
}

TEST_F(AdvanceStep, PadsAloneStopTheLoop) {
  for (const size_t rows : {1, 2, 3, 31, 32, 33}) {
    const Loop loop({.requests = std::vector<int64_t>(rows, -1),
                     .token_ids = std::vector<int64_t>(rows, 4),
                     .positions = std::vector<int64_t>(rows, 5),
                     .next_tokens = std::vector<int64_t>(rows, 6),
                     .remaining = {5},
                     .ignore_eos = {0},
                     .output_counts = {0}});
    Run(loop);
    EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(0));
    EXPECT_THAT(loop.remaining.ToInts(), ElementsAre(5));
    EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(-1, -1, -1, -1));
    EXPECT_THAT(loop.output_counts.ToInts(), ElementsAre(0));
  }
}

TEST_F(AdvanceStep, TheLastTokenIsOutputAndFinishesTheRequest) {
  const Loop loop({.requests = {0, 1},
                   .token_ids = {50, 60},
                   .positions = {7, 8},
                   .next_tokens = {51, 61},
                   .remaining = {1, 2},
                   .ignore_eos = {1, 1},
                   .output_counts = {2, 0}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1, 1));
  EXPECT_THAT(loop.remaining.ToInts(), ElementsAre(0, 1));
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(-1, -1, 51, -1, 61, -1, -1, -1));
  EXPECT_THAT(loop.output_counts.ToInts(), ElementsAre(3, 1));
  EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(1));
}

TEST_F(AdvanceStep, AnEndTokenIsOutputAndFinishesTheRequestUnlessIgnored) {
  const Loop loop({.requests = {0, 1, 2},
                   .token_ids = {50, 60, 70},
                   .positions = {7, 8, 9},
                   .next_tokens = {kEos, kEos, 71},
                   .remaining = {9, 9, 9},
                   .ignore_eos = {0, 1, 0},
                   .capacity = 1,
                   .output_counts = {0, 0, 0}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1, 1, 2));
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(kEos, kEos, 71));
  EXPECT_THAT(loop.token_ids.ToInts()[1], kEos);
  EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(2));
}

TEST_F(AdvanceStep, WithoutAnEndTokenNoneEndsARequest) {
  Loop loop({.requests = {0, 1},
             .token_ids = {5, 5},
             .positions = {7, 7},
             .next_tokens = {kEos, -1},  // -1 is the value that stands for none
             .remaining = {9, 9},
             .ignore_eos = {0, 0},
             .output_counts = {0, 0}});
  loop.params.eos_token = -1;
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(0, 1));
}

TEST_F(AdvanceStep, ForcedTokensIgnoreTheEndTokenAndFillTheNextOne) {
  // Outputs 0 and 1 of request 0 are forced, 2 is not, 3 is; request 1 has none.
  const Loop loop({.requests = {0, 1},
                   .token_ids = {50, 60},
                   .positions = {7, 8},
                   .next_tokens = {kEos, 61},
                   .remaining = {9, 9},
                   .ignore_eos = {0, 0},
                   .forced_tokens = 4,
                   .forced = {kEos, 77, -1, 88, -1, -1, -1, -1},
                   .capacity = 6,
                   .output_counts = {0, 0}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(0, 1));
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(77, -1));
  *loop.next_tokens.data<int32_t>() = 77;  // as `sample` leaves it
  loop.next_tokens.data<int32_t>()[1] = 62;
  Run(loop);
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(-1, -1));
  SetInts(loop.next_tokens.view(), {55, 63});
  Run(loop);
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(88, -1));
  SetInts(loop.next_tokens.view(), {88, 64});
  Run(loop);
  EXPECT_THAT(loop.next_tokens.ToInts(), ElementsAre(-1, -1));  // past the end of `forced`
  SetInts(loop.next_tokens.view(), {kEos, kEos});               // sampled
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1, -1));
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(kEos, 77, 55, 88, kEos, -1, 61, 62, 63, 64, kEos, -1));
}

TEST_F(AdvanceStep, NoTokenIsForcedPastTheEndOfTheForcedOnes) {
  // In memory the next request's tokens follow.
  const Loop loop({.requests = {0, 1},
                   .token_ids = {50, 60},
                   .positions = {7, 7},
                   .next_tokens = {51, kEos},
                   .remaining = {9, 9, 9},
                   .ignore_eos = {0, 0, 0},
                   .forced_tokens = 2,
                   .forced = {5, 6, 7, 8, 9, 10},
                   .output_counts = {1, 2, 0}});
  Run(loop);
  EXPECT_THAT(loop.next_tokens.ToInts()[0], -1);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(0, -1));
}

TEST_F(AdvanceStep, AnUnforcedEndTokenAmongForcedOnesEndsTheRequest) {
  const Loop loop({.requests = {0},
                   .token_ids = {50},
                   .positions = {7},
                   .next_tokens = {kEos},
                   .remaining = {9},
                   .ignore_eos = {0},
                   .forced_tokens = 3,
                   .forced = {9, -1, 9},
                   .output_counts = {1}});
  Run(loop);
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1));
}

TEST_F(AdvanceStep, CountsOutputsPastTheirCapacityWithoutWritingThem) {
  const Loop loop({.requests = {0, 1},
                   .token_ids = {50, 60},
                   .positions = {7, 8},
                   .next_tokens = {51, 61},
                   .remaining = {9, 9},
                   .ignore_eos = {0, 0},
                   .capacity = 2,
                   .output_counts = {1, 2}});
  Run(loop);
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(-1, 51, -1, -1));
  EXPECT_THAT(loop.output_counts.ToInts(), ElementsAre(2, 3));
  EXPECT_THAT(loop.live_rows.ToInts(), ElementsAre(2));
}

// A whole loop: each request's outputs are those it gets alone, whatever row it has and whoever is beside it.
TEST_F(AdvanceStep, RowsDoNotDependOnEachOther) {
  constexpr int64_t kRequests = 33;
  const auto sampled = [](int64_t request, int64_t position) { return (request * 31 + position * 7) % 11; };
  const auto make = [&](const std::vector<int64_t>& requests) {
    Options options = {.requests = requests,
                       .token_ids = std::vector<int64_t>(requests.size(), 0),
                       .positions = std::vector<int64_t>(requests.size(), 0),
                       .next_tokens = std::vector<int64_t>(requests.size(), -1),
                       .capacity = 16,
                       .output_counts = std::vector<int64_t>(kRequests, 0)};
    for (int64_t r = 0; r < kRequests; ++r) {
      options.remaining.push_back(1 + r % 13);
      options.ignore_eos.push_back(r % 3 == 0);
    }
    return options;
  };
  const auto run_to_end = [&](const Loop& loop) {
    int64_t steps = 0;
    do {
      ASSERT_LT(steps++, 20);
      for (int64_t i = 0; i < loop.requests.num_elements(); ++i) {
        const int64_t request = loop.requests.data<int32_t>()[i];
        if (request < 0) continue;
        loop.next_tokens.data<int32_t>()[i] = static_cast<int32_t>(sampled(request, loop.positions.data<int64_t>()[i]));
      }
      Run(loop);
    } while (loop.live_rows.data<int32_t>()[0] > 0);
  };
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < kRequests; ++r) rows.push_back(r * 10 % kRequests);
  const Loop together(make(rows));
  run_to_end(together);
  for (int64_t r = 0; r < kRequests; ++r) {
    const Loop alone(make({r}));
    run_to_end(alone);
    EXPECT_TRUE(BitwiseEqual(together.outputs.view().Rows(r, 1), alone.outputs.view().Rows(r, 1))) << r;
    EXPECT_EQ(together.output_counts.ToInts()[r], alone.output_counts.ToInts()[r]) << r;
    EXPECT_GT(together.output_counts.ToInts()[r], 0) << r;
  }
}

TEST_F(AdvanceStep, DeclaresWhatItTouchesAndRunsWhenReplayed) {
  const Loop loop({.requests = {0},
                   .token_ids = {50},
                   .positions = {7},
                   .next_tokens = {51},
                   .remaining = {2},
                   .ignore_eos = {0},
                   .forced_tokens = 3,
                   .forced = {-1, -1, -1},
                   .output_counts = {0}});
  const std::vector<uint8_t> before = loop.Bytes();
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), loop.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(loop.Bytes(), before);
  EXPECT_EQ(records[0].op, "advance_step");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read requests i32 [1]", "write requests i32 [1]", "read token_ids i32 [1]",
                          "write token_ids i32 [1]", "read positions i64 [1]", "write positions i64 [1]",
                          "read next_tokens i32 [1]", "write next_tokens i32 [1]", "read remaining i32 [1]",
                          "write remaining i32 [1]", "read ignore_eos u8 [1]", "read forced i32 [1, 3]",
                          "write outputs i32 [1, 4]", "read output_counts i32 [1]", "write output_counts i32 [1]",
                          "write live_rows i32 [1]"));
  records[0].run();
  records[0].run();
  EXPECT_THAT(loop.outputs.ToInts(), ElementsAre(51, -1, -1, -1));
  EXPECT_THAT(loop.requests.ToInts(), ElementsAre(-1));
}

TEST_F(AdvanceStep, RefusesBadInputByNameAndWritesNothing) {
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.requests.data = nullptr; }, "requests: "},
      {[](Params& p) { p.requests.dtype = DType::kI64; }, "requests: expected i32"},
      {[](Params& p) { p.token_ids.extents[0] = 1; }, "token_ids: expected i32 [2], got i32 [1]"},
      {[](Params& p) { p.positions.dtype = DType::kI32; }, "positions: expected i64"},
      {[](Params& p) { p.next_tokens.data = nullptr; }, "next_tokens: "},
      {[](Params& p) { p.remaining.dtype = DType::kI64; }, "remaining: expected i32"},
      {[](Params& p) { p.ignore_eos.dtype = DType::kI32; }, "ignore_eos: expected u8"},
      {[](Params& p) { p.ignore_eos.extents[0] = 2; }, "ignore_eos: expected u8 [3]"},
      {[](Params& p) { p.forced.dtype = DType::kI64; }, "forced: expected i32"},
      {[](Params& p) { p.forced.extents[0] = 2; }, "forced: expected i32 [3, any]"},
      {[](Params& p) { p.outputs.data = nullptr; }, "outputs: "},
      {[](Params& p) { p.outputs.extents[0] = 2; }, "outputs: expected i32 [3, any]"},
      {[](Params& p) { p.output_counts.extents[0] = 2; }, "output_counts: expected i32 [3]"},
      {[](Params& p) { p.live_rows.data = nullptr; }, "live_rows: "},
      {[](Params& p) { p.live_rows.dtype = DType::kI64; }, "live_rows: expected i32 [1]"},
      {[](Params& p) { p.token_ids = p.next_tokens; }, "token_ids"},
      {[](Params& p) { p.requests = p.token_ids; }, "requests"},
      {[](Params& p) { p.positions.data = p.outputs.data; }, "positions"},
      {[](Params& p) { p.output_counts = p.remaining; }, "remaining"},
      {[](Params& p) { p.live_rows.data = p.forced.data; }, "live_rows"},
      {[](Params& p) { p.outputs.data = p.ignore_eos.data; }, "ignore_eos"},
      {[](Params& p) { p.outputs.strides[0] = 0; }, "outputs"},
  };
  for (const auto& test : cases) {
    Loop loop({.requests = {0, 2},
               .token_ids = {5, 6},
               .positions = {7, 8},
               .next_tokens = {9, 10},
               .remaining = {3, 3, 3},
               .ignore_eos = {0, 0, 0},
               .forced_tokens = 2,
               .forced = {-1, -1, -1, -1, -1, -1},
               .output_counts = {0, 0, 0}});
    const std::vector<uint8_t> before = loop.Bytes();
    DSV4_EXPECT_OK(Validate(loop.params));
    test.spoil(loop.params);
    EXPECT_THAT(Validate(loop.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), loop.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_EQ(loop.Bytes(), before) << test.message;
  }
}

}  // namespace
}  // namespace dsv4::advance_step
