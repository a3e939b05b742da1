// Checked mode, and what pads own.
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4::save_partial_states {
namespace {

constexpr int64_t kBlocks = 3, kBlockSize = 4, kSlots = kBlocks * kBlockSize;

// Tokens whose kv and score are their index + 1, at slots that a test chooses, in a cache of zeros of 12 slots.
class Tokens {
 public:
  explicit Tokens(const std::vector<int64_t>& slots, int64_t head_size = 8)
      : count_(static_cast<int64_t>(slots.size())),
        kv_(DType::kF32, {count_, head_size}),
        ape_(DType::kF32, {4, head_size}, std::vector<float>(4 * head_size, 0.0f)),
        positions_(DType::kI64, {count_}),
        slots_(TestTensor::OfInts(DType::kI64, {count_}, slots)),
        cache_(DType::kF32, {kBlocks, kBlockSize, 2 * head_size}) {
    for (int64_t i = 0; i < count_; ++i) {
      SetFloats(kv_.view().Rows(i, 1), std::vector<float>(head_size, static_cast<float>(i + 1)));
      positions_.data<int64_t>()[i] = i;
    }
    cache_.Poison(0);
  }

  Params params() const {
    return {.kv = kv_.view(),
            .score = kv_.view(),
            .ape = ape_.weight(),
            .positions = positions_.view(),
            .slots = slots_.view(),
            .state_cache = cache_.view()};
  }
  // The token, counted from 1, that each slot holds; 0 for none.
  std::vector<int> Held() const {
    std::vector<int> held(kSlots);
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      const float* row = cache_.view().At<float>(slot / kBlockSize, slot % kBlockSize);
      held[slot] = static_cast<int>(row[0]);
      for (int64_t c = 0; c < cache_.view().extents[2]; ++c) EXPECT_EQ(row[c], row[0]) << "slot " << slot;
    }
    cache_.CheckGuards();
    return held;
  }

 private:
  int64_t count_;
  TestTensor kv_, ape_, positions_, slots_, cache_;
};

std::vector<int> HeldBy(const std::vector<std::pair<int64_t, int>>& slot_and_token) {
  std::vector<int> held(kSlots);
  for (const auto& [slot, token] : slot_and_token) held[slot] = token;
  return held;
}

class SavePartialStatesSlots : public OpTest {
 protected:
  void SetUp() override {
    OpTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    device().set_check_slots(true);
    stream().set_blocking(false);
  }
};

TEST_F(SavePartialStatesSlots, GoodSlotsAreWrittenAndNothingIsReported) {
  const Tokens tokens({0, -1, kSlots - 1, std::numeric_limits<int64_t>::min(), 5, -1});
  DSV4_ASSERT_OK(Record(stream(), tokens.params()));
  DSV4_EXPECT_OK(stream().Synchronize());
  EXPECT_EQ(tokens.Held(), HeldBy({{0, 1}, {kSlots - 1, 3}, {5, 5}}));
}

TEST_F(SavePartialStatesSlots, TheFirstTokenPastTheCacheIsNamedAndNoneIsWritten) {
  const Tokens tokens({0, 3, kSlots, 5, kSlots + 1, std::numeric_limits<int64_t>::max(), 7});
  DSV4_ASSERT_OK(Record(stream(), tokens.params()));
  EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange,
                                               "save_partial_states: token 2 has slot 12, past the cache of 12 slots"));
  EXPECT_EQ(tokens.Held(), HeldBy({{0, 1}, {3, 2}, {5, 4}, {7, 7}}));
  DSV4_EXPECT_OK(stream().Synchronize());  // told once
}

TEST_F(SavePartialStatesSlots, ARepeatedSlotIsRefusedAndTheFirstTokenKeepsIt) {
  const Tokens tokens({4, -1, 9, 4, -1, 9, 4});
  DSV4_ASSERT_OK(Record(stream(), tokens.params()));
  EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange,
                                               "save_partial_states: token 3 has slot 4, which an earlier token has too"));
  EXPECT_EQ(tokens.Held(), HeldBy({{4, 1}, {9, 3}}));
}

TEST_F(SavePartialStatesSlots, TheFirstIsFoundAmongManyTokens) {
  std::vector<int64_t> slots(1000, -1);
  for (const int64_t i : {997, 640, 641, 702}) slots[i] = kSlots + i;
  const Tokens tokens(slots);
  for (int repeat = 0; repeat < 20; ++repeat) {
    DSV4_ASSERT_OK(Record(stream(), tokens.params()));
    EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange, "token 640 has slot 652"));
  }
  EXPECT_EQ(tokens.Held(), HeldBy({}));
}

TEST_F(SavePartialStatesSlots, OfSeveralStepsTheFirstIsReported) {
  const Tokens first({0, 1, 2, kSlots}), second({kSlots + 7});
  DSV4_ASSERT_OK(Record(stream(), first.params()));
  DSV4_ASSERT_OK(Record(stream(), second.params()));
  EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange, "token 3 has slot 12"));
  DSV4_EXPECT_OK(stream().Synchronize());
}

TEST_F(SavePartialStatesSlots, EverySizeIsChecked) {
  // 1024 and 512 have kernels of their own when nothing is checked.
  for (const int64_t head_size : {1, 2, 3, 130, 512, 1024}) {
    const Tokens tokens({kSlots - 1, kSlots, 0}, head_size);
    DSV4_ASSERT_OK(Record(stream(), tokens.params()));
    EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kOutOfRange, "token 1 has slot 12"));
    EXPECT_EQ(tokens.Held(), HeldBy({{kSlots - 1, 1}, {0, 3}}));
  }
}

TEST_F(SavePartialStatesSlots, UncheckedModeReportsNothing) {
  device().set_check_slots(false);
  const Tokens tokens({4, 5, 4});  // two rows may race for a slot; both are inside
  DSV4_ASSERT_OK(Record(stream(), tokens.params()));
  DSV4_EXPECT_OK(stream().Synchronize());
}

// The pad's kv and score lie where there is no memory: reading them ends the test.
TEST_F(SavePartialStatesSlots, WhatAPadOwnsNeedNotExist) {
  device().set_check_slots(false);
  for (const int64_t head_size : {1, 7, 256, 1024}) {
    const Tokens tokens({-1, 6}, head_size);
    Params params = tokens.params();
    params.kv.data = params.kv.At<float>(1) - (int64_t{1} << 44);
    params.kv.strides[0] = int64_t{1} << 44;
    params.score = params.kv;
    DSV4_ASSERT_OK(Record(stream(), params));
    DSV4_ASSERT_OK(stream().Synchronize());
    EXPECT_EQ(tokens.Held(), HeldBy({{6, 2}}));
  }
}

}  // namespace
}  // namespace dsv4::save_partial_states
