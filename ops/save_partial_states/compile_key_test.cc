#include "ops/save_partial_states/compile_key.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/save_partial_states/save_partial_states_warmup.h"
#include "runtime/device_testing.h"
#include "runtime/testing.h"

namespace dsv4::save_partial_states {
namespace {

// A step of the published model's shape. Pointers are never followed.
Params PublishedParams(int64_t head_dim, int64_t ratio, int64_t tokens = 5) {
  const int64_t head_size = (ratio == 4 ? 2 : 1) * head_dim;
  const int64_t block_size = ratio == 4 ? 4 : 8;
  const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  const TensorView projection = TensorView::Contiguous(at(0x100000), DType::kF32, {tokens, 2 * head_size});
  return {.kv = projection.Columns(0, head_size),
          .score = projection.Columns(head_size, head_size),
          .ape = WeightView(TensorView::Contiguous(at(0x2000000), DType::kF32, {ratio, head_size})),
          .positions = TensorView::Contiguous(at(0x3000000), DType::kI64, {tokens}),
          .slots = TensorView::Contiguous(at(0x4000000), DType::kI64, {tokens}),
          .state_cache = TensorView::Contiguous(at(0x5000000), DType::kF32, {9, block_size, 2 * head_size})};
}

void Shift(TensorView& view, int64_t bytes) { view.data = static_cast<uint8_t*>(view.data) + bytes; }

TEST(CompileKey, WarmupKeysAreThoseOfTheModel) {
  // head_size, vector_width, state_width, ratio, kv, score, ape, block and row strides, block_size.
  EXPECT_EQ(WarmupKeys(512, 4), (std::vector<CompileKey>{{1024, 4, 1024, 4, 2048, 2048, 1024, 8192, 2048, 4}}));
  EXPECT_EQ(WarmupKeys(512, 128), (std::vector<CompileKey>{{512, 4, 512, 128, 1024, 1024, 512, 8192, 1024, 8}}));
  EXPECT_EQ(WarmupKeys(128, 4), (std::vector<CompileKey>{{256, 4, 256, 4, 512, 512, 256, 2048, 512, 4}}));
  EXPECT_EQ(WarmupKeys(128, 128), (std::vector<CompileKey>{{128, 4, 128, 128, 256, 256, 128, 2048, 256, 8}}));
  EXPECT_EQ(WarmupKeys(1, 4), (std::vector<CompileKey>{{2, 2, 2, 4, 4, 4, 2, 16, 4, 4}}));
  EXPECT_EQ(WarmupKeys(1, 128), (std::vector<CompileKey>{{1, 1, 1, 128, 2, 2, 1, 16, 2, 8}}));
}

TEST(CompileKey, NoWarmupKeysForOtherRatiosAndSizes) {
  for (const int64_t ratio : {-4, 0, 1, 2, 3, 5, 64, 127, 129, 256}) {
    EXPECT_TRUE(WarmupKeys(512, ratio).empty()) << ratio;
  }
  for (const int64_t head_dim : {0, -1, -512}) {
    EXPECT_TRUE(WarmupKeys(head_dim, 4).empty()) << head_dim;
    EXPECT_TRUE(WarmupKeys(head_dim, 128).empty()) << head_dim;
  }
}

TEST(CompileKey, RowsOfAWarmupKeyDoNotOverlap) {
  for (const int64_t head_dim : {1, 3, 64, 128, 512}) {
    for (const int64_t ratio : {4, 128}) {
      const CompileKey key = WarmupKeys(head_dim, ratio)[0];
      EXPECT_GE(key.row_stride, 2 * key.state_width);
      EXPECT_GE(key.block_stride, key.block_size * key.row_stride);
    }
  }
}

TEST(CompileKey, PublishedLayersHaveKernelsOfTheirOwn) {
  int kernel = 0;
  for (const int64_t head_dim : {512, 128}) {
    for (const int64_t ratio : {4, 128}) {
      for (const int64_t tokens : {1, 7, 4096}) {
        EXPECT_EQ(FindSpecialised(Dispatch(PublishedParams(head_dim, ratio, tokens))), kernel);
      }
      ++kernel;
    }
  }
}

TEST(CompileKey, EveryFieldCounts) {
  ASSERT_EQ(FindSpecialised(Dispatch(PublishedParams(512, 4))), 0);
  const std::vector<void (*)(Params&)> changes = {
      [](Params& p) { p.kv.extents[1] = p.score.extents[1] = 512; },
      [](Params& p) { p.state_cache.extents[2] = 2040; },
      [](Params& p) { p.state_cache.extents[1] = 3; },
      [](Params& p) { p.state_cache.strides[0] += 16; },
      [](Params& p) { p.state_cache.strides[1] += 4; },
      [](Params& p) { p.kv.strides[0] += 4; },
      [](Params& p) { p.score.strides[0] += 4; },
      [](Params& p) { p.ape = WeightView(p.ape.view().FirstRows(3)); },
      [](Params& p) {
        TensorView ape = p.ape.view();
        ape.strides[0] += 4;
        p.ape = WeightView(ape);
      },
      [](Params& p) { p.kv.dtype = p.score.dtype = DType::kBf16; },
      [](Params& p) { p.state_cache.dtype = DType::kBf16; },
      [](Params& p) { Shift(p.kv, 8); },
  };
  std::vector<CompileKey> keys = {Dispatch(PublishedParams(512, 4))};
  for (const auto& change : changes) {
    Params params = PublishedParams(512, 4);
    change(params);
    keys.push_back(Dispatch(params));
    EXPECT_EQ(FindSpecialised(keys.back()), -1) << keys.size() - 2;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(keys[i] == keys[j]) << i << " and " << j;
  }
}

TEST(CompileKey, VectorsAreAsWideAsEverythingAllows) {
  const auto width = [](void (*change)(Params&)) {
    Params params = PublishedParams(512, 4);
    change(params);
    return Dispatch(params).vector_width;
  };
  EXPECT_EQ(width([](Params&) {}), 4);
  EXPECT_EQ(width([](Params& p) { Shift(p.kv, 8); }), 2);
  EXPECT_EQ(width([](Params& p) { Shift(p.score, 4); }), 1);
  EXPECT_EQ(width([](Params& p) { Shift(p.state_cache, 8); }), 2);
  EXPECT_EQ(width([](Params& p) {
              TensorView ape = p.ape.view();
              Shift(ape, 12);
              p.ape = WeightView(ape);
            }),
            1);
  EXPECT_EQ(width([](Params& p) { p.kv.strides[0] += 2; }), 2);
  EXPECT_EQ(width([](Params& p) { p.score.strides[0] += 1; }), 1);
  EXPECT_EQ(width([](Params& p) { p.state_cache.strides[1] += 6; }), 2);
  EXPECT_EQ(width([](Params& p) { p.state_cache.strides[0] += 1; }), 1);
  EXPECT_EQ(width([](Params& p) { p.kv.extents[1] = p.score.extents[1] = 1022; }), 2);
  EXPECT_EQ(width([](Params& p) { p.kv.extents[1] = p.score.extents[1] = 7; }), 1);
  EXPECT_EQ(width([](Params& p) { p.state_cache.extents[2] = 2 * 1026; }), 2);  // the score half starts off by two
  // bf16 accesses are half as wide in bytes.
  EXPECT_EQ(width([](Params& p) {
              p.kv.dtype = p.score.dtype = DType::kBf16;
              Shift(p.kv, 8);
            }),
            4);
  EXPECT_EQ(width([](Params& p) {
              p.kv.dtype = p.score.dtype = DType::kBf16;
              Shift(p.kv, 4);
            }),
            2);
}

TEST(CompileKey, BlocksCoverEveryTokenWithWholePasses) {
  for (const int64_t abreast : {1, 2, 4}) {
    int64_t previous = 0;
    for (int64_t tokens = 1; tokens < 20000; tokens = tokens * 3 / 2 + 1) {
      const int64_t per_block = TokensPerBlock(tokens, abreast);
      EXPECT_EQ(per_block % abreast, 0);
      EXPECT_GE(per_block, previous);  // never fewer at more tokens
      previous = per_block;
    }
    EXPECT_EQ(TokensPerBlock(1, abreast), abreast);  // as many blocks as there can be
  }
}

class WarmupTest : public DeviceTest {};

TEST_F(WarmupTest, InputsDispatchToTheirKeyAndArePads) {
  std::vector<CompileKey> keys(kSpecialisedKeys.begin(), kSpecialisedKeys.end());
  keys.push_back(WarmupKeys(1, 128)[0]);
  keys.push_back(WarmupKeys(65, 4)[0]);
  keys.push_back(WarmupKeys(128, 4)[0]);
  keys.back().input_dtype = keys.back().cache_dtype = DType::kBf16;
  for (const CompileKey& key : keys) {
    DSV4_ASSERT_OK_AND_ASSIGN(const WarmupTensors inputs, WarmupInputs(device(), key));
    DSV4_EXPECT_OK(Validate(inputs.params));
    EXPECT_EQ(Dispatch(inputs.params), key) << "head size " << key.head_size;
    EXPECT_EQ(inputs.params.kv.extents[0], 1);
    EXPECT_EQ(inputs.params.state_cache.extents[0], 1);
    int64_t slot = 0;
    DSV4_ASSERT_OK(stream().CopyToHost(&slot, inputs.params.slots.data, sizeof(slot)));
    DSV4_ASSERT_OK(stream().Synchronize());
    EXPECT_EQ(slot, -1);
  }
}

TEST_F(WarmupTest, RunsForEveryKey) {
  for (const int64_t ratio : {4, 128}) {
    for (const int64_t head_dim : {1, 64, 128, 512}) {
      DSV4_EXPECT_OK(Warmup(device(), WarmupKeys(head_dim, ratio)));
    }
  }
  DSV4_EXPECT_OK(Warmup(device(), {}));
}

}  // namespace
}  // namespace dsv4::save_partial_states
