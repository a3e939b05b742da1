#include "ops/step_metadata/step_metadata.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4::step_metadata {
namespace {

using ::testing::ElementsAre;

struct TokenRow {
  int64_t token = 0;
  int64_t request = 0;
  int64_t position = 0;
};

struct GroupOptions {
  int64_t ratio = 1;
  int64_t rows_per_block = 1;
  std::vector<std::vector<int64_t>> table;
};

struct VisibleOptions {
  int64_t ratio = 1;
  int64_t limit = 0;
  int64_t rows_per_block = 1;
  std::vector<std::vector<int64_t>> table;
  int64_t width = 0;  // 0: counts only
};

TestTensor Table(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<int64_t> blocks;
  for (const std::vector<int64_t>& row : rows) blocks.insert(blocks.end(), row.begin(), row.end());
  const int64_t count = static_cast<int64_t>(rows.size());
  return TestTensor::OfInts(DType::kI32, {count, static_cast<int64_t>(blocks.size()) / count}, blocks);
}

// All tensors of a step; outputs are poisoned.
class Step {
 public:
  Step(const std::vector<TokenRow>& rows, const std::vector<GroupOptions>& groups,
       const std::vector<VisibleOptions>& visible) {
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<int64_t> tokens, requests, positions;
    for (const TokenRow& row : rows) {
      tokens.push_back(row.token);
      requests.push_back(row.request);
      positions.push_back(row.position);
    }
    params.token_ids = Keep(TestTensor::OfInts(DType::kI32, {count}, tokens));
    params.requests = Keep(TestTensor::OfInts(DType::kI32, {count}, requests));
    params.positions = Keep(TestTensor::OfInts(DType::kI64, {count}, positions));
    params.row_tokens = Keep(TestTensor(DType::kI32, {count}));
    params.row_requests = Keep(TestTensor(DType::kI32, {count}));
    params.row_positions = Keep(TestTensor(DType::kI64, {count}));
    for (const GroupOptions& group : groups) {
      params.groups.push_back({.ratio = group.ratio,
                               .rows_per_block = group.rows_per_block,
                               .block_table = Keep(Table(group.table)),
                               .slots = Keep(TestTensor(DType::kI64, {count}))});
    }
    for (const VisibleOptions& rows : visible) {
      VisibleRows view = {.ratio = rows.ratio, .limit = rows.limit, .counts = Keep(TestTensor(DType::kI32, {count}))};
      if (rows.width > 0) {
        view.rows_per_block = rows.rows_per_block;
        view.block_table = Keep(Table(rows.table));
        view.slots = Keep(TestTensor(DType::kI32, {count, rows.width}));
      }
      params.visible.push_back(view);
    }
    for (const std::unique_ptr<TestTensor>& tensor : tensors_) before_.push_back(tensor->Bytes());
  }

  bool Unchanged() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i]->Bytes() != before_[i]) return false;
    }
    return true;
  }
  void CheckGuards() const {
    for (const std::unique_ptr<TestTensor>& tensor : tensors_) tensor->CheckGuards();
  }

  Params params;

 private:
  TensorView Keep(TestTensor tensor) {
    tensors_.push_back(std::make_unique<TestTensor>(std::move(tensor)));
    return tensors_.back()->view();
  }
  std::vector<std::unique_ptr<TestTensor>> tensors_;
  std::vector<std::vector<uint8_t>> before_;
};

class StepMetadata : public OpTest {
 protected:
  void Run(const Step& step) {
    DSV4_ASSERT_OK(Record(stream(), step.params));
    DSV4_ASSERT_OK(stream().Synchronize());
    step.CheckGuards();
  }
};

constexpr int64_t kNoRequest = -1;

TEST_F(StepMetadata, PassesLiveRowsThroughAndZeroesPads) {
  const Step step({{11, 1, 5}, {-7, kNoRequest, -9}, {12, 0, 0}, {2147483647, -2147483648, int64_t{1} << 62}}, {}, {});
  Run(step);
  EXPECT_THAT(ToInts(step.params.row_tokens), ElementsAre(11, 0, 12, 0));
  EXPECT_THAT(ToInts(step.params.row_requests), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(ToInts(step.params.row_positions), ElementsAre(5, 0, 0, 0));
}

TEST_F(StepMetadata, SlotsOfWindowAndStateRowsTurnInTheRing) {
  // Blocks of 4 rows, rings of 3 blocks.
  const GroupOptions ring = {.rows_per_block = 4, .table = {{7, 2, 9}, {1, 0, 3}}};
  const Step step({{0, 0, 0}, {0, 0, 3}, {0, 0, 4}, {0, 0, 11}, {0, 0, 12}, {0, 1, 22}, {0, 1, 2}}, {ring}, {});
  Run(step);
  EXPECT_THAT(ToInts(step.params.groups[0].slots),
              ElementsAre(7 * 4 + 0, 7 * 4 + 3, 2 * 4 + 0, 9 * 4 + 3, 7 * 4 + 0, 3 * 4 + 2, 1 * 4 + 2));
}

TEST_F(StepMetadata, EntrySlotsExistAtBoundariesOnly) {
  const GroupOptions entries = {.ratio = 4, .rows_per_block = 2, .table = {{5, 8, 6}}};
  std::vector<TokenRow> rows;
  for (int64_t position = 0; position < 24; ++position) rows.push_back({0, 0, position});
  const Step step(rows, {entries}, {});
  Run(step);
  const std::vector<int64_t> slots = ToInts(step.params.groups[0].slots);
  const int64_t expected[] = {10, 11, 16, 17, 12, 13};
  for (int64_t position = 0; position < 24; ++position) {
    EXPECT_EQ(slots[position], position % 4 == 3 ? expected[position / 4] : -1) << position;
  }
}

TEST_F(StepMetadata, PadsGetNoSlotCountOrList) {
  const std::vector<std::vector<int64_t>> table = {{1, 2}};
  const Step step(
      {{0, kNoRequest, 3}, {0, 0, 3}, {0, std::numeric_limits<int32_t>::min(), 0}},
      {{.ratio = 1, .rows_per_block = 4, .table = table}, {.ratio = 4, .rows_per_block = 4, .table = table}},
      {{.ratio = 1, .limit = 2, .rows_per_block = 4, .table = table, .width = 3}, {.ratio = 4}});
  Run(step);
  EXPECT_THAT(ToInts(step.params.groups[0].slots), ElementsAre(-1, 7, -1));
  EXPECT_THAT(ToInts(step.params.groups[1].slots), ElementsAre(-1, 4, -1));
  EXPECT_THAT(ToInts(step.params.visible[0].counts), ElementsAre(0, 2, 0));
  EXPECT_THAT(ToInts(step.params.visible[0].slots), ElementsAre(-1, -1, -1, 6, 7, -1, -1, -1, -1));
  EXPECT_THAT(ToInts(step.params.visible[1].counts), ElementsAre(0, 1, 0));
}

TEST_F(StepMetadata, WindowListsTheLastRowsInAscendingOrder) {
  // A window of 3 over rings of 2 blocks of 3 rows.
  const VisibleOptions window = {.limit = 3, .rows_per_block = 3, .table = {{4, 9}}, .width = 4};
  const Step step({{0, 0, 0}, {0, 0, 1}, {0, 0, 2}, {0, 0, 3}, {0, 0, 7}}, {}, {window});
  Run(step);
  EXPECT_THAT(ToInts(step.params.visible[0].counts), ElementsAre(1, 2, 3, 3, 3));
  EXPECT_THAT(ToInts(step.params.visible[0].slots), ElementsAre(12, -1, -1, -1,    // row 0
                                                                12, 13, -1, -1,    // rows 0, 1
                                                                12, 13, 14, -1,    // rows 0 to 2
                                                                13, 14, 27, -1,    // rows 1 to 3
                                                                29, 12, 13, -1));  // rows 5 to 7, round the ring
}

TEST_F(StepMetadata, EntriesBecomeVisibleWithTheirLastToken) {
  const VisibleOptions entries = {.ratio = 4, .rows_per_block = 2, .table = {{3, 0}}, .width = 3};
  const VisibleOptions counts_only = {.ratio = 128};
  const Step step({{0, 0, 2}, {0, 0, 3}, {0, 0, 6}, {0, 0, 7}, {0, 0, 11}, {0, 0, 127}}, {}, {counts_only});
  Run(step);
  EXPECT_THAT(ToInts(step.params.visible[0].counts), ElementsAre(0, 0, 0, 0, 0, 1));
  const Step lists({{0, 0, 2}, {0, 0, 3}, {0, 0, 6}, {0, 0, 7}, {0, 0, 11}}, {}, {entries});
  Run(lists);
  EXPECT_THAT(ToInts(lists.params.visible[0].counts), ElementsAre(0, 1, 1, 2, 3));
  EXPECT_THAT(ToInts(lists.params.visible[0].slots), ElementsAre(-1, -1, -1, 6, -1, -1, 6, -1, -1, 6, 7, -1, 6, 7, 0));
}

// Tables, ratios and rows at random, against the formulas of specification 5.4, 5.5 and 7.3.
TEST_F(StepMetadata, MatchesTheFormulasForEveryRowCount) {
  std::mt19937_64 random(1);
  for (const int64_t count : {1, 2, 3, 31, 32, 33, 64, 65}) {
    for (const int64_t ratio : {1, 2, 4, 128}) {
      constexpr int64_t kRequests = 3;
      const int64_t rows_per_block = 1 + static_cast<int64_t>(random() % 8), blocks = 1 + random() % 9;
      const int64_t limit = random() % 2 == 0 ? 0 : 1 + random() % 7;
      std::vector<std::vector<int64_t>> table(kRequests);
      for (std::vector<int64_t>& row : table) {
        for (int64_t b = 0; b < blocks; ++b) row.push_back(random() % 1000);
      }
      std::vector<TokenRow> rows;
      for (int64_t i = 0; i < count; ++i) {
        rows.push_back({static_cast<int64_t>(random() % 129280), static_cast<int64_t>(random() % (kRequests + 1)) - 1,
                        static_cast<int64_t>(random() % 300)});
      }
      const Step step(
          rows, {{.ratio = ratio, .rows_per_block = rows_per_block, .table = table}},
          {{.ratio = ratio, .limit = limit, .rows_per_block = rows_per_block, .table = table, .width = 300}});
      Run(step);
      const std::vector<int64_t> slots = ToInts(step.params.groups[0].slots),
                                 counts = ToInts(step.params.visible[0].counts),
                                 lists = ToInts(step.params.visible[0].slots);
      const auto slot_of = [&](int64_t request, int64_t entry) {
        return table[request][entry / rows_per_block % blocks] * rows_per_block + entry % rows_per_block;
      };
      for (int64_t i = 0; i < count; ++i) {
        const bool live = rows[i].request >= 0;
        const bool boundary = live && rows[i].position % ratio == ratio - 1;
        EXPECT_EQ(slots[i], boundary ? slot_of(rows[i].request, rows[i].position / ratio) : -1);
        std::vector<int64_t> visible;
        for (int64_t entry = 0; live && (entry + 1) * ratio - 1 <= rows[i].position; ++entry) {
          visible.push_back(slot_of(rows[i].request, entry));
        }
        if (limit > 0 && static_cast<int64_t>(visible.size()) > limit) {
          visible.erase(visible.begin(), visible.end() - limit);
        }
        EXPECT_EQ(counts[i], static_cast<int64_t>(visible.size()));
        visible.resize(300, -1);
        EXPECT_EQ(std::vector<int64_t>(lists.begin() + i * 300, lists.begin() + (i + 1) * 300), visible);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(StepMetadata, ComputesSlotsIn64Bits) {
  const int64_t block = std::numeric_limits<int32_t>::max();
  const GroupOptions group = {.rows_per_block = 64, .table = {{block, 1}}};
  const Step step({{0, 0, 63}, {0, 0, (int64_t{1} << 40) + 1}}, {group}, {{.ratio = 1024}});
  Run(step);
  EXPECT_THAT(ToInts(step.params.groups[0].slots), ElementsAre(block * 64 + 63, block * 64 + 1));
  EXPECT_THAT(ToInts(step.params.visible[0].counts), ElementsAre(0, 1 << 30));
}

TEST_F(StepMetadata, PadsDoNotChangeOtherRows) {
  const GroupOptions group = {.ratio = 2, .rows_per_block = 2, .table = {{4, 1}, {0, 3}}};
  const VisibleOptions window = {.limit = 4, .rows_per_block = 2, .table = {{4, 1}, {0, 3}}, .width = 4};
  const Step alone({{9, 1, 3}}, {group}, {window});
  const Step among_pads({{-1, -5, -1}, {9, 1, 3}, {7, kNoRequest, int64_t{1} << 62}}, {group}, {window});
  Run(alone);
  Run(among_pads);
  EXPECT_EQ(ToInts(alone.params.groups[0].slots)[0], ToInts(among_pads.params.groups[0].slots)[1]);
  EXPECT_TRUE(BitwiseEqual(among_pads.params.visible[0].slots.Rows(1, 1), alone.params.visible[0].slots));
}

TEST_F(StepMetadata, TakesAStepWithoutRows) {
  const Step step({}, {{.rows_per_block = 2, .table = {{4, 1}}}}, {{.ratio = 4}});
  Run(step);
  EXPECT_TRUE(step.Unchanged());
}

TEST_F(StepMetadata, DeclaresWhatItTouchesAndReadsTablesWhenReplayed) {
  const std::vector<std::vector<int64_t>> table = {{0, 1}, {2, 3}};
  Step step({{1, 0, 3}, {2, 1, 5}}, {{.ratio = 1, .rows_per_block = 4, .table = table}},
            {{.ratio = 1, .limit = 2, .rows_per_block = 4, .table = table, .width = 2}, {.ratio = 4}});
  step.params.visible[1].block_table = step.params.groups[0].block_table;  // of no use without a list
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), step.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "step_metadata");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read token_ids i32 [2]", "read requests i32 [2]", "read positions i64 [2]",
                          "write row_tokens i32 [2]", "write row_requests i32 [2]", "write row_positions i64 [2]",
                          "read groups.block_table i32 [2, 2]", "write groups.slots i64 [2]",
                          "write visible.counts i32 [2]", "read visible.block_table i32 [2, 2]",
                          "write visible.slots i32 [2, 2]", "write visible.counts i32 [2]"));
  EXPECT_TRUE(step.Unchanged());

  // New tables and lengths between capture and replay.
  SetInts(step.params.groups[0].block_table, {10, 11, 12, 13});
  SetInts(step.params.positions, {4, 0});
  records[0].run();
  EXPECT_THAT(ToInts(step.params.groups[0].slots), ElementsAre(44, 48));
}

TEST_F(StepMetadata, RefusesBadInputByNameAndWritesNothing) {
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.token_ids.data = nullptr; }, "token_ids: "},
      {[](Params& p) { p.token_ids.dtype = DType::kI64; }, "token_ids: expected i32"},
      {[](Params& p) { p.requests.extents[0] = 1; }, "requests: expected i32 [2], got i32 [1]"},
      {[](Params& p) { p.positions.dtype = DType::kI32; }, "positions: expected i64"},
      {[](Params& p) { p.row_tokens.data = nullptr; }, "row_tokens: "},
      {[](Params& p) { p.row_requests.extents[0] = 1; }, "row_requests: expected i32 [2]"},
      {[](Params& p) { p.row_positions.dtype = DType::kI32; }, "row_positions: expected i64"},
      {[](Params& p) { p.groups[1].ratio = 0; }, "groups[1].ratio: expected at least 1, got 0"},
      {[](Params& p) { p.groups[0].rows_per_block = 0; }, "groups[0].rows_per_block: expected at least 1"},
      {[](Params& p) { p.groups[1].block_table.data = nullptr; }, "groups[1].block_table: "},
      {[](Params& p) { p.groups[1].block_table.dtype = DType::kI64; }, "groups[1].block_table: expected i32"},
      {[](Params& p) { p.groups[1].block_table.extents[1] = 0; }, "groups[1].block_table: blocks of a request"},
      {[](Params& p) { p.groups[1].block_table.extents[0] = 1; }, "groups[1].block_table: expected i32 [2, any]"},
      {[](Params& p) { p.groups[1].slots.dtype = DType::kI32; }, "groups[1].slots: expected i64"},
      {[](Params& p) { p.groups[0].slots.extents[0] = 1; }, "groups[0].slots: expected i64 [2]"},
      {[](Params& p) { p.visible[0].ratio = -1; }, "visible[0].ratio: expected at least 1"},
      {[](Params& p) { p.visible[0].limit = -1; }, "visible[0].limit: expected at least 0"},
      {[](Params& p) { p.visible[1].counts.data = nullptr; }, "visible[1].counts: "},
      {[](Params& p) { p.visible[0].rows_per_block = 0; }, "visible[0].rows_per_block: expected at least 1"},
      {[](Params& p) { p.visible[0].block_table.data = nullptr; }, "visible[0].block_table: "},
      {[](Params& p) { p.visible[0].slots.dtype = DType::kI64; }, "visible[0].slots: expected i32"},
      {[](Params& p) { p.visible[0].slots.strides[0] = 1; }, "visible[0].slots"},
      {[](Params& p) { p.row_tokens = p.token_ids; }, "row_tokens"},
      {[](Params& p) { p.row_positions = p.positions; }, "row_positions"},
      {[](Params& p) { p.row_tokens.data = p.visible[0].block_table.data; }, "visible[0].block_table"},
      {[](Params& p) { p.row_requests = p.row_tokens; }, "row_tokens"},
      {[](Params& p) { p.groups[1].slots = p.groups[0].slots; }, "groups[1].slots"},
      {[](Params& p) { p.groups[1].slots = p.row_positions; }, "row_positions"},
      {[](Params& p) { p.visible[1].counts = p.visible[0].counts; }, "visible[1].counts"},
      {[](Params& p) { p.visible[0].slots.data = p.groups[0].block_table.data; }, "groups[0].block_table"},
  };
  const std::vector<std::vector<int64_t>> table = {{0, 1}, {2, 3}};
  for (const auto& test : cases) {
    Step step({{1, 0, 3}, {2, 1, 5}},
              {{.ratio = 1, .rows_per_block = 4, .table = table}, {.ratio = 4, .rows_per_block = 4, .table = table}},
              {{.ratio = 1, .limit = 2, .rows_per_block = 4, .table = table, .width = 2}, {.ratio = 4}});
    DSV4_EXPECT_OK(Validate(step.params));
    test.spoil(step.params);
    EXPECT_THAT(Validate(step.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), step.params), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_TRUE(step.Unchanged()) << test.message;
  }
}

}  // namespace
}  // namespace dsv4::step_metadata
