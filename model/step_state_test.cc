#include "model/step_state.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "model/cache_plan.h"
#include "model/config.h"
#include "runtime/device.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr int64_t kMaxRows = 6;
constexpr int64_t kMaxLogitRows = 3;
constexpr CacheSizes kSizes = {
    .max_requests = 3, .max_context = 700, .max_rows_per_request = 6, .cache_tokens = 2100};

class StepStateTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.sliding_window = 5;
    config_.layers = {{}, {.ratio = 4, .overlap = true, .indexer = true}, {.ratio = 128}, {.ratio = 2}};
    plan_ = PlanCaches(config_, kSizes);
    groups_ = plan_.Groups();
    DSV4_ASSERT_OK_AND_ASSIGN(device_, CreateDevice(DeviceKind::kCpu));
    DSV4_ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream());
    DSV4_ASSERT_OK_AND_ASSIGN(state_,
                              StepState::Create(*device_, config_, plan_, kSizes, kMaxRows, kMaxLogitRows));
    // Blocks in descending order, so that nothing is where its index is.
    for (size_t g = 0; g < groups_.size(); ++g) {
      int32_t block = static_cast<int32_t>(groups_[g].num_blocks);
      tables_.emplace_back();
      for (int64_t r = 0; r < kSizes.max_requests; ++r) {
        std::vector<int32_t>& table = tables_.back().emplace_back();
        for (int64_t b = 0; b < groups_[g].table_blocks; ++b) table.push_back(--block);
        DSV4_ASSERT_OK(state_->SetBlockTable(*stream_, static_cast<int64_t>(g), r, table));
      }
    }
  }

  void SetRow(int64_t row, int32_t request, int64_t position, int32_t token) {
    StepInputs& inputs = state_->host_inputs();
    *inputs.requests.At<int32_t>(row) = request;
    *inputs.positions.At<int64_t>(row) = position;
    *inputs.token_ids.At<int32_t>(row) = token;
  }

  void RunMetadata(int64_t rows) {
    DSV4_ASSERT_OK(state_->Upload(*stream_));
    DSV4_ASSERT_OK(state_->RecordMetadata(*stream_, rows));
    DSV4_ASSERT_OK(stream_->Synchronize());
  }

  int64_t SlotOf(int64_t group, int64_t request, int64_t row) const {
    const CacheGroupPlan& plan = groups_[group];
    const std::vector<int32_t>& table = tables_[group][request];
    return table[row / plan.rows_per_block % plan.table_blocks] * plan.rows_per_block + row % plan.rows_per_block;
  }

  ModelConfig config_;
  CachePlan plan_;
  std::vector<CacheGroupPlan> groups_;
  std::vector<std::vector<std::vector<int32_t>>> tables_;  // [group][request][block]
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StepState> state_;
};

// Positions are those of rows; -1 for a request is a pad.
struct Row {
  int32_t request;
  int64_t position;
  int32_t token;
};

TEST_F(StepStateTest, ComputesSlotsCountsAndListsOfEveryGroup) {
  const std::vector<std::vector<Row>> steps = {
      {{0, 0, 11}, {1, 3, 12}, {-1, 99, -7}, {2, 4, 13}, {2, 5, 14}, {0, 1, 15}},
      {{1, 127, 1}, {1, 128, 2}, {2, 255, 3}, {2, 256, 4}, {0, 699, 5}, {-5, -1, 6}},
      {{-1, 0, 0}, {-1, 0, 0}, {-1, 0, 0}, {-1, 0, 0}, {-1, 0, 0}, {1, 511, 9}},
  };
  for (const std::vector<Row>& rows : steps) {
    for (size_t i = 0; i < rows.size(); ++i) {
      SetRow(static_cast<int64_t>(i), rows[i].request, rows[i].position, rows[i].token);
    }
    ASSERT_NO_FATAL_FAILURE(RunMetadata(kMaxRows));
    const StepContext context = state_->Context(kMaxRows);
    EXPECT_EQ(context.rows, kMaxRows);
    ASSERT_EQ(context.compressed.size(), 3u);
    for (int64_t i = 0; i < kMaxRows; ++i) {
      const Row& row = rows[i];
      const bool live = row.request >= 0;
      SCOPED_TRACE(testing::Message() << "row " << i << ", request " << row.request << ", position " << row.position);
      EXPECT_EQ(*context.tokens.At<int32_t>(i), live ? row.token : 0);
      EXPECT_EQ(*context.requests.At<int32_t>(i), live ? row.request : 0);
      EXPECT_EQ(*context.positions.At<int64_t>(i), live ? row.position : 0);

      EXPECT_EQ(*context.window_slots.At<int64_t>(i), live ? SlotOf(0, row.request, row.position) : -1);
      const int64_t in_window = live ? std::min<int64_t>(row.position + 1, config_.sliding_window) : 0;
      EXPECT_EQ(*context.window_counts.At<int32_t>(i), in_window);
      for (int64_t k = 0; k < config_.sliding_window; ++k) {
        const int64_t position = row.position + 1 - in_window + k;
        EXPECT_EQ(*context.window_list.At<int32_t>(i, k), k < in_window ? SlotOf(0, row.request, position) : -1);
      }

      for (size_t c = 0; c < context.compressed.size(); ++c) {
        SCOPED_TRACE(testing::Message() << "compressed kind " << c);
        const CompressedStep& step = context.compressed[c];
        const LayerKind& kind = plan_.compressed[c].kind;
        const int64_t state_group = 1 + 2 * static_cast<int64_t>(c);
        const int64_t entry_group = state_group + 1;
        EXPECT_EQ(*step.state_slots.At<int64_t>(i), live ? SlotOf(state_group, row.request, row.position) : -1);
        const bool at_boundary = live && (row.position + 1) % kind.ratio == 0;
        EXPECT_EQ(*step.entry_slots.At<int64_t>(i),
                  at_boundary ? SlotOf(entry_group, row.request, row.position / kind.ratio) : -1);
        const int64_t visible = live ? (row.position + 1) / kind.ratio : 0;
        EXPECT_EQ(*step.entry_counts.At<int32_t>(i), visible);
        EXPECT_EQ(step.entry_list.empty(), kind.indexer);
        for (int64_t k = 0; !kind.indexer && k < step.entry_list.extents[1]; ++k) {
          ASSERT_EQ(*step.entry_list.At<int32_t>(i, k), k < visible ? SlotOf(entry_group, row.request, k) : -1) << k;
        }
      }
    }
  }
}

TEST_F(StepStateTest, AContextHasTheFirstRowsOfEverything) {
  for (int64_t rows : {int64_t{1}, int64_t{4}, kMaxRows}) {
    const StepContext context = state_->Context(rows);
    EXPECT_EQ(context.rows, rows);
    for (const TensorView& view : {context.tokens, context.requests, context.positions, context.window_slots,
                                   context.window_list, context.window_counts}) {
      EXPECT_EQ(view.extents[0], rows);
    }
    const StepContext full = state_->Context(kMaxRows);
    EXPECT_EQ(context.window_list.data, full.window_list.data);
    for (size_t c = 0; c < context.compressed.size(); ++c) {
      const CompressedStep& step = context.compressed[c];
      for (const TensorView& view : {step.state_slots, step.entry_slots, step.entry_counts}) {
        EXPECT_EQ(view.extents[0], rows);
      }
      EXPECT_EQ(step.entry_list.extents[0], plan_.compressed[c].kind.indexer ? 0 : rows);
      // Tables are of requests, not of rows.
      EXPECT_EQ(step.state_block_table.extents[0], kSizes.max_requests);
      EXPECT_EQ(step.entry_block_table.extents[0], kSizes.max_requests);
    }
  }
}

TEST_F(StepStateTest, RowsPastTheStepKeepTheirBits) {
  for (int64_t i = 0; i < kMaxRows; ++i) SetRow(i, 0, 10 + i, 20);
  ASSERT_NO_FATAL_FAILURE(RunMetadata(kMaxRows));
  for (int64_t i = 0; i < kMaxRows; ++i) SetRow(i, 1, 40 + i, 30);
  ASSERT_NO_FATAL_FAILURE(RunMetadata(4));
  const StepContext context = state_->Context(kMaxRows);
  for (int64_t i = 0; i < kMaxRows; ++i) {
    EXPECT_EQ(*context.tokens.At<int32_t>(i), i < 4 ? 30 : 20);
    EXPECT_EQ(*context.window_slots.At<int64_t>(i), i < 4 ? SlotOf(0, 1, 40 + i) : SlotOf(0, 0, 10 + i));
  }
}

TEST_F(StepStateTest, ClearedInputsArePads) {
  for (int64_t i = 0; i < kMaxRows; ++i) SetRow(i, 1, 7, 3);
  StepInputs& inputs = state_->host_inputs();
  for (int64_t i = 0; i < kMaxRows; ++i) *inputs.next_tokens.At<int32_t>(i) = 4;
  for (int64_t l = 0; l < kMaxLogitRows; ++l) {
    *inputs.logit_rows.At<int32_t>(l) = 1;
    *inputs.temperatures.At<float>(l) = 1.0f;
    *inputs.seeds.At<int64_t>(l) = 2;
    *inputs.request_ids.At<int64_t>(l) = 3;
  }
  state_->ClearHostInputs();
  ASSERT_NO_FATAL_FAILURE(RunMetadata(kMaxRows));
  const StepInputs& device_inputs = state_->device_inputs();
  const StepContext context = state_->Context(kMaxRows);
  for (int64_t i = 0; i < kMaxRows; ++i) {
    EXPECT_EQ(*context.window_slots.At<int64_t>(i), -1);
    EXPECT_EQ(*device_inputs.next_tokens.At<int32_t>(i), -1);
  }
  for (int64_t l = 0; l < kMaxLogitRows; ++l) {
    EXPECT_EQ(*device_inputs.logit_rows.At<int32_t>(l), -1);
    EXPECT_EQ(*device_inputs.temperatures.At<float>(l), 0.0f);
    EXPECT_EQ(*device_inputs.seeds.At<int64_t>(l), 0);
    EXPECT_EQ(*device_inputs.request_ids.At<int64_t>(l), 0);
  }
}

TEST_F(StepStateTest, UploadsEveryInput) {
  StepInputs& host = state_->host_inputs();
  const StepInputs& device = state_->device_inputs();
  for (TensorView StepInputs::*field :
       {&StepInputs::token_ids, &StepInputs::requests, &StepInputs::positions, &StepInputs::next_tokens,
        &StepInputs::logit_rows, &StepInputs::seeds, &StepInputs::request_ids}) {
    std::vector<int64_t> values((host.*field).num_elements());
    for (size_t i = 0; i < values.size(); ++i) values[i] = 100 + static_cast<int64_t>(i);
    SetInts(host.*field, values);
  }
  SetFloats(host.temperatures, {0.5f, 1.5f, 2.5f});
  DSV4_ASSERT_OK(state_->Upload(*stream_));
  DSV4_ASSERT_OK(stream_->Synchronize());
  for (TensorView StepInputs::*field :
       {&StepInputs::token_ids, &StepInputs::requests, &StepInputs::positions, &StepInputs::next_tokens,
        &StepInputs::logit_rows, &StepInputs::seeds, &StepInputs::request_ids, &StepInputs::temperatures}) {
    EXPECT_NE((device.*field).data, (host.*field).data);
    EXPECT_TRUE(BitwiseEqual(device.*field, host.*field));
  }
}

TEST_F(StepStateTest, TheRestOfATableIsBlockZero) {
  const int64_t group = 4;  // entries of ratio 128
  ASSERT_EQ(groups_[group].table_blocks, 3);
  DSV4_ASSERT_OK(state_->SetBlockTable(*stream_, group, 1, {7}));
  DSV4_ASSERT_OK(stream_->Synchronize());
  const TensorView& table = state_->Context(1).compressed[1].entry_block_table;
  EXPECT_EQ(ToInts(table.Index(1)), (std::vector<int64_t>{7, 0, 0}));
  EXPECT_EQ(ToInts(table.Index(0)), std::vector<int64_t>(tables_[group][0].begin(), tables_[group][0].end()));
  EXPECT_EQ(ToInts(table.Index(2)), std::vector<int64_t>(tables_[group][2].begin(), tables_[group][2].end()));
}

TEST_F(StepStateTest, RefusesABlockTableThatDoesNotFit) {
  const TensorView& table = state_->Context(1).compressed[1].entry_block_table;
  const std::vector<int64_t> before = ToInts(table);
  EXPECT_THAT(state_->SetBlockTable(*stream_, 4, 1, {7, 6, 5, 4}),
              StatusIs(absl::StatusCode::kInvalidArgument, "block table: expected at most 3 blocks, got 4"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, 4, 3, {7}),
              StatusIs(absl::StatusCode::kInvalidArgument, "block table: expected a request row of 0 to 2, got 3"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, 4, -1, {7}), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, 7, 1, {7}),
              StatusIs(absl::StatusCode::kInvalidArgument, "block table: expected a group of 0 to 6, got 7"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, -1, 1, {7}), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, 4, 1, {7, 9}),
              StatusIs(absl::StatusCode::kInvalidArgument, "block table: expected blocks of 0 to 8, got 9"));
  EXPECT_THAT(state_->SetBlockTable(*stream_, 4, 1, {-1}), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
  EXPECT_EQ(ToInts(table), before);
}

}  // namespace
}  // namespace dsv4
