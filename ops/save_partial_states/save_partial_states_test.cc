#include "ops/save_partial_states/save_partial_states.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/testing/large_buffer.h"
#include "ops/testing/op_test.h"
#include "runtime/dtype.h"
#include "runtime/testing.h"

namespace dsv4::save_partial_states {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kPad = -1;
constexpr int64_t kFarPad = std::numeric_limits<int64_t>::min();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int64_t tokens = 1;
  int64_t head_size = 1;
  int64_t ratio = 1;
  int64_t block_size = 1;
  DType input_dtype = DType::kF32;
  DType cache_dtype = DType::kF32;
  int64_t unused_columns = 0;  // state width - head size
  bool published = false;      // kv and score are halves of contiguous rows, as in the model
  bool merged = false;         // kv and score are halves of rows of one odd-strided buffer, at an odd element
  bool spread = false;         // the cache's rows and blocks have space between them
};

// `count` different slots of `blocks * block_size`, in random order.
std::vector<int64_t> RandomSlots(int64_t count, int64_t num_slots, uint64_t seed) {
  std::vector<int64_t> slots(num_slots);
  for (int64_t i = 0; i < num_slots; ++i) slots[i] = i;
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < count; ++i) std::swap(slots[i], slots[i + random() % (num_slots - i)]);
  slots.resize(count);
  return slots;
}

// Inputs and a poisoned cache with a block to spare at both ends. Everything starts random, nothing is a pad.
class Step {
 public:
  explicit Step(const Shape& shape, uint64_t seed = 1)
      : shape_(shape),
        num_blocks_((shape.tokens + shape.block_size - 1) / shape.block_size + 1),
        inputs_(shape.input_dtype, {2 * shape.tokens, 2 * shape.head_size + 3}),
        ape_(DType::kF32, {shape.ratio, shape.head_size}),
        positions_(DType::kI64, {shape.tokens}),
        slots_(DType::kI64, {shape.tokens}),
        cache_(shape.cache_dtype, {num_blocks_ + 2, shape.block_size + (shape.spread ? 1 : 0),
                                   2 * (shape.head_size + shape.unused_columns) + (shape.spread ? 5 : 0)}) {
    const TensorView& in = inputs_.view();
    if (shape.published) {
      const TensorView rows = TensorView::Contiguous(in.data, in.dtype, {shape.tokens, 2 * shape.head_size});
      params_.kv = rows.Columns(0, shape.head_size);
      params_.score = rows.Columns(shape.head_size, shape.head_size);
    } else if (shape.merged) {
      const TensorView rows = in.FirstRows(shape.tokens);
      params_.kv = rows.Columns(1, shape.head_size);
      params_.score = rows.Columns(1 + shape.head_size, shape.head_size);
    } else {
      params_.kv = TensorView::Contiguous(in.data, in.dtype, {shape.tokens, shape.head_size});
      params_.score =
          TensorView::Contiguous(in.At<uint8_t>(0) + params_.kv.num_bytes(), in.dtype, {shape.tokens, shape.head_size});
    }
    SetFloats(params_.kv, RandomFloats(shape.tokens * shape.head_size, 4 * seed));
    SetFloats(params_.score, RandomFloats(shape.tokens * shape.head_size, 4 * seed + 1));
    ape_.Set(RandomFloats(shape.ratio * shape.head_size, 4 * seed + 2));
    params_.ape = ape_.weight();
    std::mt19937_64 random(4 * seed + 3);
    for (int64_t i = 0; i < shape.tokens; ++i) positions_.data<int64_t>()[i] = random() % (int64_t{1} << 40);
    params_.positions = positions_.view();
    SetSlots(RandomSlots(shape.tokens, num_blocks_ * shape.block_size, seed));
    params_.slots = slots_.view();
    params_.state_cache = cache_.view().Rows(1, num_blocks_);
    params_.state_cache.extents[1] = shape.block_size;
    params_.state_cache.extents[2] = 2 * (shape.head_size + shape.unused_columns);
  }

  Params& params() { return params_; }
  const TestTensor& cache() const { return cache_; }
  const TestTensor& ape() const { return ape_; }
  int64_t num_slots() const { return num_blocks_ * shape_.block_size; }
  void SetSlots(const std::vector<int64_t>& slots) { SetInts(slots_.view(), slots); }
  int64_t& slot(int64_t i) { return slots_.data<int64_t>()[i]; }
  int64_t& position(int64_t i) { return positions_.data<int64_t>()[i]; }

  // NaN in all that token i owns, and a position that must not be used.
  void MakePad(int64_t i, int64_t pad_slot) {
    slot(i) = pad_slot;
    position(i) = i % 2 == 0 ? kFarPad : std::numeric_limits<int64_t>::max();
    const std::vector<float> nans(shape_.head_size, kNan);
    SetFloats(params_.kv.Rows(i, 1), nans);
    SetFloats(params_.score.Rows(i, 1), nans);
  }

  // The bytes of the whole cache buffer as they are to be after the op, from those of now.
  std::vector<uint8_t> ExpectedBytes() const {
    std::vector<uint8_t> bytes = cache_.Bytes();
    const std::vector<float> kv = ToFloats(params_.kv), score = ToFloats(params_.score), ape = ape_.ToFloats();
    const int64_t element_bytes = DTypeBytes(shape_.cache_dtype);
    uint8_t* cache = bytes.data() + (params_.state_cache.As<uint8_t>() - cache_.view().As<uint8_t>());
    for (int64_t i = 0; i < shape_.tokens; ++i) {
      const int64_t slot = slots_.data<int64_t>()[i];
      if (slot < 0) continue;
      const int64_t row_begin = slot / shape_.block_size * params_.state_cache.strides[0] +
                                slot % shape_.block_size * params_.state_cache.strides[1];
      const int64_t phase = positions_.data<int64_t>()[i] % shape_.ratio;
      for (int64_t c = 0; c < shape_.head_size; ++c) {
        // A sum of two floats in double, rounded to float, is the correctly rounded sum (53 >= 2 * 24 + 2).
        const float biased = static_cast<float>(static_cast<double>(score[i * shape_.head_size + c]) +
                                                static_cast<double>(ape[phase * shape_.head_size + c]));
        StoreRounded(kv[i * shape_.head_size + c], cache + (row_begin + c) * element_bytes);
        StoreRounded(biased, cache + (row_begin + shape_.head_size + shape_.unused_columns + c) * element_bytes);
      }
    }
    return bytes;
  }

 private:
  void StoreRounded(float value, uint8_t* at) const {
    const float rounded = shape_.cache_dtype == DType::kBf16 ? static_cast<float>(NearestBf16(value)) : value;
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    if (shape_.cache_dtype == DType::kBf16) bits >>= 16;
    std::memcpy(at, &bits, DTypeBytes(shape_.cache_dtype));
  }

  Shape shape_;
  int64_t num_blocks_;
  TestTensor inputs_, ape_, positions_, slots_, cache_;
  Params params_;
};

class SavePartialStates : public OpTest {
 protected:
  // Runs the step and compares every byte of the cache's buffer, rows between, before and after the cache included.
  void RunAndCheck(Step& step) {
    const std::vector<uint8_t> expected = step.ExpectedBytes();
    DSV4_ASSERT_OK(Record(stream(), step.params()));
    DSV4_ASSERT_OK(stream().Synchronize());
    EXPECT_EQ(FirstDifference(step.cache().Bytes(), expected), -1);
    step.cache().CheckGuards();
  }

  static int64_t FirstDifference(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
    if (a.size() != b.size()) return 0;
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] != b[i]) return static_cast<int64_t>(i);
    }
    return -1;
  }
};

TEST_F(SavePartialStates, WritesKvAndBiasedScoreAtTheSlot) {
  const TestTensor kv(DType::kF32, {2, 2}, {1, 2, 3, 4});
  const TestTensor score(DType::kF32, {2, 2}, {10, 20, 30, 40});
  const TestTensor ape(DType::kF32, {4, 2}, {0.1f, 0.2f, 0.25f, 0.5f, 0.3f, 0.4f, 0.75f, 0.125f});
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {2}, {9, 3});  // phases 1 and 3
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {2}, {5, 0});      // block 1, row 2; block 0, row 0
  TestTensor cache(DType::kF32, {2, 3, 4});
  cache.Poison(0);
  DSV4_ASSERT_OK(Record(stream(), {.kv = kv.view(),
                                   .score = score.view(),
                                   .ape = ape.weight(),
                                   .positions = positions.view(),
                                   .slots = slots.view(),
                                   .state_cache = cache.view()}));
  EXPECT_THAT(cache.ToFloats(), ElementsAre(3, 4, 30.75f, 40.125f, 0, 0, 0, 0, 0, 0, 0, 0,  //
                                            0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 10.25f, 20.5f));
}

TEST_F(SavePartialStates, MatchesTheSpecificationForEveryShape) {
  const int64_t ratios[] = {1, 2, 4, 128}, block_sizes[] = {1, 4, 8, 16};
  std::mt19937_64 random(1);
  for (int64_t tokens = 1; tokens <= 65; ++tokens) {
    for (const int64_t head_size : {1, 7, 128, 130, 512, 1000, 1024}) {
      const Shape shape = {.tokens = tokens,
                           .head_size = head_size,
                           .ratio = ratios[random() % 4],
                           .block_size = block_sizes[random() % 4],
                           .input_dtype = random() % 2 == 0 ? DType::kF32 : DType::kBf16,
                           .cache_dtype = random() % 3 == 0 ? DType::kBf16 : DType::kF32,
                           .unused_columns = random() % 2 == 0 ? 0 : 3,
                           .merged = random() % 2 == 0,
                           .spread = random() % 2 == 0};
      SCOPED_TRACE(testing::Message() << tokens << " tokens, head size " << head_size << ", ratio " << shape.ratio
                                      << ", block size " << shape.block_size << ", " << DTypeName(shape.input_dtype)
                                      << " to " << DTypeName(shape.cache_dtype) << ", merged " << shape.merged
                                      << ", spread " << shape.spread << ", unused " << shape.unused_columns);
      Step step(shape, random());
      for (int64_t i = 0; i < tokens; ++i) {
        if (random() % 5 == 0) step.MakePad(i, random() % 2 == 0 ? kPad : kFarPad);
      }
      RunAndCheck(step);
      if (HasFailure()) return;
    }
  }
}

TEST_F(SavePartialStates, MatchesTheSpecificationForThePublishedLayers) {
  for (size_t kernel = 0; kernel < kSpecialisedKeys.size(); ++kernel) {
    const CompileKey& key = kSpecialisedKeys[kernel];
    for (const int64_t tokens : {1, 2, 3, 4, 5, 31, 32, 33, 131, 132, 133, 265, 528, 529, 1057}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens, head size " << key.head_size << ", ratio "
                                      << key.compress_ratio);
      Step step({.tokens = tokens,
                 .head_size = key.head_size,
                 .ratio = key.compress_ratio,
                 .block_size = key.block_size,
                 .published = true},
                tokens);
      for (int64_t i = 2; i < tokens; i += 5) step.MakePad(i, i % 2 == 0 ? kPad : kFarPad);
      ASSERT_EQ(FindSpecialised(Dispatch(step.params())), static_cast<int>(kernel));
      RunAndCheck(step);
      if (HasFailure()) return;
    }
  }
}

TEST_F(SavePartialStates, IndexesTheBiasByPositionModuloTheRatio) {
  for (const int64_t ratio : {1, 2, 4, 128}) {
    Step step({.tokens = 65, .head_size = 3, .ratio = ratio, .block_size = 8});
    // Every phase, around 0, 2^31, 2^32 and the largest position.
    const int64_t starts[] = {0, (int64_t{1} << 31) - 8, (int64_t{1} << 32) - 8,
                              std::numeric_limits<int64_t>::max() - 15};
    for (int64_t i = 0; i < 64; ++i) step.position(i) = starts[i / 16] + i % 16;
    step.position(64) = 2 * ratio - 1;
    RunAndCheck(step);
  }
}

TEST_F(SavePartialStates, KeepsEveryBitOfItsInputs) {
  // Signed zero, subnormals, infinities, and a NaN with a payload: kv is copied. 0 is added to the score.
  const uint32_t bits[] = {0x80000000u, 0x00000001u, 0x807fffffu, 0x7f800000u, 0xff800000u, 0x7fc12345u, 0x7f7fffffu};
  TestTensor kv(DType::kF32, {1, 7}), score(DType::kF32, {1, 7});
  std::memcpy(kv.data<float>(), bits, sizeof(bits));
  std::memcpy(score.data<float>(), bits, sizeof(bits));
  const TestTensor ape(DType::kF32, {1, 7}, std::vector<float>(7, -0.0f));
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {1}, {0});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {1}, {0});
  TestTensor cache(DType::kF32, {1, 1, 14});
  DSV4_ASSERT_OK(Record(stream(), {.kv = kv.view(),
                                   .score = score.view(),
                                   .ape = ape.weight(),
                                   .positions = positions.view(),
                                   .slots = slots.view(),
                                   .state_cache = cache.view()}));
  EXPECT_EQ(std::memcmp(cache.data<float>(), bits, sizeof(bits)), 0);
  for (int i = 0; i < 7; ++i) {
    const float sum = cache.data<float>()[7 + i];
    if (std::isnan(score.data<float>()[i])) {
      EXPECT_TRUE(std::isnan(sum)) << i;  // a GPU's sum has a NaN of its own
    } else {
      EXPECT_EQ(std::memcmp(&sum, &bits[i], sizeof(sum)), 0) << i;
    }
  }
}

TEST_F(SavePartialStates, SkipsPadRowsWhereverTheyAre) {
  for (const int64_t tokens : {1, 2, 3, 33}) {
    for (const int64_t pad_slot : {kPad, kFarPad, int64_t{-2}, int64_t{-8}, int64_t{-9}}) {
      for (const int64_t first : {int64_t{0}, tokens / 2, tokens - 1}) {  // from `first` every second row is a pad
        Step step({.tokens = tokens, .head_size = 5, .ratio = 4, .block_size = 8, .merged = tokens % 2 == 0});
        for (int64_t i = first; i < tokens; i += 2) step.MakePad(i, pad_slot);
        RunAndCheck(step);
      }
    }
  }
}

TEST_F(SavePartialStates, PadsAloneChangeNothing) {
  for (const int64_t pad_slot : {kPad, kFarPad}) {
    Step step({.tokens = 65, .head_size = 130, .ratio = 128, .block_size = 8});
    for (int64_t i = 0; i < 65; ++i) step.MakePad(i, pad_slot);
    const std::vector<uint8_t> before = step.cache().Bytes();
    DSV4_ASSERT_OK(Record(stream(), step.params()));
    EXPECT_EQ(step.cache().Bytes(), before);
    step.cache().CheckGuards();
  }
}

// The pad's kv and score lie in a page that cannot be read.
TEST_F(SavePartialStates, DoesNotReadWhatAPadOwns) {
  if (!on_cpu()) GTEST_SKIP() << "a page that cannot be read is the host's";
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  void* const memory = mmap(nullptr, 3 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  TensorView rows = TensorView::Contiguous(memory, DType::kF32, {3, page_bytes / 4});
  SetFloats(rows, std::vector<float>(rows.num_elements(), 0.5f));
  ASSERT_EQ(mprotect(rows.Row<float>(1), page_bytes, PROT_NONE), 0);

  const TestTensor ape(DType::kF32, {4, 2}, std::vector<float>(8, 1));
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {3}, {4, -7, 6});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {3}, {0, -1, 2});
  TestTensor cache(DType::kF32, {1, 4, 4});
  cache.Poison(0);
  DSV4_EXPECT_OK(Record(stream(), {.kv = rows.Columns(0, 2),
                                   .score = rows.Columns(2, 2),
                                   .ape = ape.weight(),
                                   .positions = positions.view(),
                                   .slots = slots.view(),
                                   .state_cache = cache.view()}));
  EXPECT_THAT(cache.ToFloats(), ElementsAre(0.5f, 0.5f, 1.5f, 1.5f, 0, 0, 0, 0, 0.5f, 0.5f, 1.5f, 1.5f, 0, 0, 0, 0));
  munmap(memory, 3 * page_bytes);
}

TEST_F(SavePartialStates, PadsDoNotChangeWhatLiveRowsWrite) {
  const Shape shape = {.tokens = 33, .head_size = 128, .ratio = 4, .block_size = 4};
  Step with_garbage(shape), with_zeros(shape);
  for (int64_t i = 1; i < 33; i += 3) {
    with_garbage.MakePad(i, kFarPad);
    with_zeros.slot(i) = kPad;
    with_zeros.position(i) = 0;
  }
  DSV4_ASSERT_OK(Record(stream(), with_garbage.params()));
  DSV4_ASSERT_OK(Record(stream(), with_zeros.params()));
  EXPECT_TRUE(BitwiseEqual(with_garbage.cache().view(), with_zeros.cache().view()));
}

TEST_F(SavePartialStates, RowsDoNotDependOnEachOther) {
  const Shape shape = {.tokens = 17, .head_size = 130, .ratio = 4, .block_size = 4, .input_dtype = DType::kBf16};
  Step together(shape), alone(shape);
  DSV4_ASSERT_OK(Record(stream(), together.params()));
  for (int64_t i = 16; i >= 0; --i) {  // one at a time, and in another order
    Params row = alone.params();
    row.kv = row.kv.Rows(i, 1);
    row.score = row.score.Rows(i, 1);
    row.positions = row.positions.Rows(i, 1);
    row.slots = row.slots.Rows(i, 1);
    DSV4_ASSERT_OK(Record(stream(), row));
  }
  EXPECT_TRUE(BitwiseEqual(together.cache().view(), alone.cache().view()));
}

TEST_F(SavePartialStates, LeavesColumnsPastTheHeadSizeAlone) {
  Step step({.tokens = 3, .head_size = 7, .ratio = 2, .block_size = 4, .unused_columns = 9});
  RunAndCheck(step);
  const TensorView cache = step.params().state_cache;
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t c = 7; c < 16; ++c) {
      EXPECT_TRUE(std::isnan(*cache.At<float>(step.slot(i) / 4, step.slot(i) % 4, c)));  // still poisoned
      EXPECT_TRUE(std::isnan(*cache.At<float>(step.slot(i) / 4, step.slot(i) % 4, 16 + c)));
    }
  }
}

TEST_F(SavePartialStates, AddressesCachesPastTwoToTheThirtyOne) {
  struct Case {
    int64_t blocks, block_size, state_width;
    std::vector<int64_t> slots;
  };
  for (const Case& test : {
           // 2^31 + 2^21 elements: the last rows lie past what an int counts. This one has a kernel of its own.
           Case{(int64_t{1} << 18) + 256, 4, 1024, {((int64_t{1} << 18) + 256) * 4 - 1, int64_t{1} << 20, 5}},
           // The same, of rows that no wide access fits.
           Case{(int64_t{1} << 18) + 256, 4, 1023, {((int64_t{1} << 18) + 256) * 4 - 1, int64_t{1} << 20, 5}},
           // Slots that an int does not count, of 2^33 + 64 elements.
           Case{(int64_t{1} << 29) + 4, 8, 1, {(int64_t{1} << 32) + 31, (int64_t{1} << 32) + 1, int64_t{1} << 31, 2}},
       }) {
    const int64_t elements = test.blocks * test.block_size * 2 * test.state_width;
    const LargeBuffer memory(device(), stream(), elements * static_cast<int64_t>(sizeof(float)));
    if (memory.data() == nullptr) GTEST_SKIP() << "no room for a cache of " << elements << " floats";
    const int64_t tokens = static_cast<int64_t>(test.slots.size());
    const TestTensor projection(DType::kF32, {tokens, 2 * test.state_width},
                                std::vector<float>(tokens * 2 * test.state_width, 1.0f));
    const TestTensor ape(DType::kF32, {4, test.state_width}, std::vector<float>(4 * test.state_width, 1.0f));
    const TestTensor positions = TestTensor::OfInts(DType::kI64, {tokens}, std::vector<int64_t>(tokens, 0));
    const TestTensor slots = TestTensor::OfInts(DType::kI64, {tokens}, test.slots);
    const Params params = {.kv = projection.view().Columns(0, test.state_width),
                           .score = projection.view().Columns(test.state_width, test.state_width),
                           .ape = ape.weight(),
                           .positions = positions.view(),
                           .slots = slots.view(),
                           .state_cache = TensorView::Contiguous(memory.data(), DType::kF32,
                                                                 {test.blocks, test.block_size, 2 * test.state_width})};
    EXPECT_EQ(FindSpecialised(Dispatch(params)) >= 0, test.state_width == 1024);
    DSV4_ASSERT_OK(Record(stream(), params));
    const std::set<int64_t> written(test.slots.begin(), test.slots.end());
    for (const int64_t slot : test.slots) {
      const int64_t begin = slot * 2 * test.state_width;
      EXPECT_EQ(memory.Get<float>(begin), 1.0f) << slot;
      EXPECT_EQ(memory.Get<float>(begin + test.state_width - 1), 1.0f) << slot;
      EXPECT_EQ(memory.Get<float>(begin + test.state_width), 2.0f) << slot;
      EXPECT_EQ(memory.Get<float>(begin + 2 * test.state_width - 1), 2.0f) << slot;
      // Where an address of 32 bits, signed or not, of elements or of bytes, would have gone.
      for (const int64_t wrapped : {begin & 0x7fffffff, begin & 0xffffffff, (begin * 4 & 0xffffffff) / 4}) {
        if (written.count(wrapped / (2 * test.state_width)) == 0) {
          EXPECT_EQ(memory.Get<float>(wrapped), 0.0f) << slot;
        }
      }
    }
  }
}

TEST_F(SavePartialStates, TakesAStepWithoutTokens) {
  Step step({.tokens = 1, .head_size = 4, .ratio = 4, .block_size = 4});
  Params params = step.params();
  for (TensorView* view : {&params.kv, &params.score, &params.positions, &params.slots}) *view = view->FirstRows(0);
  const std::vector<uint8_t> before = step.cache().Bytes();
  DSV4_EXPECT_OK(Record(stream(), params));
  EXPECT_EQ(step.cache().Bytes(), before);
}

TEST_F(SavePartialStates, DeclaresWhatItTouchesAndRunsWhenReplayed) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  Step step({.tokens = 2, .head_size = 3, .ratio = 4, .block_size = 2});
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), step.params()); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "save_partial_states");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read kv f32 [2, 3]", "read score f32 [2, 3]", "before wait ape f32 [4, 3]",
                          "read positions i64 [2]", "read slots i64 [2]", "write state_cache f32 [2, 2, 6]"));

  step.SetSlots({3, 0});  // after the capture
  SetFloats(step.params().kv, {1, 2, 3, 4, 5, 6});
  const std::vector<uint8_t> expected = step.ExpectedBytes();
  records[0].run();
  EXPECT_EQ(step.cache().Bytes(), expected);
}

TEST_F(SavePartialStates, RefusesBadInputByNameAndWritesNothing) {
  const auto narrow = [](TensorView& view) { view.extents[view.rank - 1] -= 1; };
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.kv.data = nullptr; }, "kv: "},
      {[](Params& p) { p.kv.dtype = DType::kI32; }, "kv: expected f32 or bf16"},
      {[](Params& p) { p.kv = p.kv.Index(0); }, "kv: "},
      {[](Params& p) { p.kv.strides[1] = 2; }, "kv: "},
      {[](Params& p) { p.kv.extents[1] = p.score.extents[1] = 0; }, "kv: head size"},
      {[](Params& p) { p.score.data = nullptr; }, "score: "},
      {[](Params& p) { p.score.dtype = DType::kBf16; }, "score: expected f32 [4, 6]"},
      {[&](Params& p) { narrow(p.score); }, "score: expected f32 [4, 6], got f32 [4, 5]"},
      {[](Params& p) { p.score.extents[0] = 3; }, "score: "},
      {[](Params& p) { p.ape = WeightView(); }, "ape: "},
      {[](Params& p) { p.ape = WeightView(p.ape.view().Columns(0, 5)); }, "ape: expected f32 [any, 6]"},
      {[](Params& p) { p.ape = WeightView(p.ape.view().FirstRows(0)); }, "ape: ratio"},
      {[&](Params& p) { narrow(p.positions); }, "positions: expected i64 [4], got i64 [3]"},
      {[](Params& p) { p.positions.dtype = DType::kI32; }, "positions: expected i64"},
      {[](Params& p) { p.positions.strides[0] = 2; }, "positions: "},
      {[&](Params& p) { narrow(p.slots); }, "slots: expected i64 [4], got i64 [3]"},
      {[](Params& p) { p.slots.dtype = DType::kI32; }, "slots: expected i64"},
      {[](Params& p) { p.slots.data = nullptr; }, "slots: "},
      {[](Params& p) { p.state_cache.data = nullptr; }, "state_cache: "},
      {[](Params& p) { p.state_cache.dtype = DType::kU8; }, "state_cache: expected f32 or bf16"},
      {[](Params& p) { p.state_cache = p.state_cache.Index(0); }, "state_cache: "},
      {[](Params& p) { p.state_cache.extents[1] = 0; }, "state_cache: block size"},
      {[](Params& p) { p.state_cache.extents[2] = 10; }, "state_cache: expected rows of 2 * state width"},
      {[](Params& p) { p.state_cache.extents[2] = 13; }, "state_cache: expected rows of 2 * state width"},
      {[](Params& p) { p.state_cache.strides[1] = 11; }, "state_cache"},
      {[](Params& p) { p.state_cache.strides[0] = 0; }, "state_cache"},
      {[](Params& p) { p.state_cache.strides[2] = 2; }, "state_cache"},
      {[](Params& p) { p.kv.data = p.state_cache.At<float>(0, 1); }, "kv"},
      {[](Params& p) { p.score.data = p.state_cache.At<float>(0, 1); }, "score"},
      {[](Params& p) {
         p.ape = WeightView(TensorView::Contiguous(p.state_cache.data, DType::kF32, {4, 6}));
       },
       "ape"},
      {[](Params& p) { p.positions.data = p.state_cache.data; }, "positions"},
      {[](Params& p) { p.slots.data = p.state_cache.data; }, "slots"},
  };
  for (const auto& test : cases) {
    Step step({.tokens = 4, .head_size = 6, .ratio = 4, .block_size = 4});
    const std::vector<uint8_t> before = step.cache().Bytes();
    DSV4_EXPECT_OK(Validate(step.params()));
    test.spoil(step.params());
    EXPECT_THAT(Validate(step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_EQ(step.cache().Bytes(), before) << test.message;
  }
}

TEST_F(SavePartialStates, TakesKvAndScoreInterleavedWithinOneBuffer) {
  Step step({.tokens = 4, .head_size = 6, .ratio = 4, .block_size = 4, .merged = true});
  EXPECT_EQ(step.params().kv.strides[0], step.params().score.strides[0]);
  EXPECT_EQ(step.params().score.As<float>() - step.params().kv.As<float>(), 6);
  RunAndCheck(step);
}

}  // namespace
}  // namespace dsv4::save_partial_states
