#include "ops/compress_store/compress_store.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/compress_store/kernel_choice.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "ops/testing/large_buffer.h"
#include "ops/testing/op_test.h"
#include "ops/testing/row_encoding.h"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/testing.h"

namespace dsv4::compress_store {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kFarPad = std::numeric_limits<int64_t>::min();

// A pooling weight's exponent, at most about 10, is rounded to 2^-24 of itself: 6e-7 of the weight. A sum of up to 256
// terms in one fp32 chain errs like a random walk, sqrt(256) * 2^-24 = 1e-6 of it, and the mean square the same.
constexpr double kTolerance = 3e-6;

struct Options {
  int64_t ratio = 4;
  bool overlap = true;
  int64_t head_size = 8;
  int64_t rope_size = 4;
  int64_t block_size = 4;
  int64_t table_blocks = 0;  // 0: as many as the context needs, so that blocks are addressed by absolute position
  int64_t num_requests = 2;
  int64_t max_positions = 48;
  DType state_dtype = DType::kF32;
  DType norm_dtype = DType::kF32;
  RowFormat format = RowFormat::kF32;
  int64_t rows_per_page = 3;
  bool hadamard = false;
  float eps = 1e-6f;
};

struct Row {
  int64_t state_slot = 0;
  int32_t request = 0;
  int64_t position = 0;
  int64_t entry_slot = 0;
};

// The caches of a few requests. The state cache holds NaN but for the rows that a test puts there, and so do the pages.
class Caches {
 public:
  explicit Caches(const Options& options, uint64_t seed = 1)
      : options_(options),
        seed_(seed),
        width_(options.overlap ? 2 * options.head_size : options.head_size),
        table_blocks_(options.table_blocks > 0 ? options.table_blocks
                                               : (options.max_positions + options.block_size - 1) / options.block_size),
        num_entries_(options.num_requests * (options.max_positions / options.ratio + 1)),
        state_(options.state_dtype, {options.num_requests * table_blocks_ + 3, options.block_size, 2 * width_}),
        table_(DType::kI32, {options.num_requests, table_blocks_}),
        norm_(options.norm_dtype, {options.head_size}, RandomFloats(options.head_size, seed + 1)),
        cos_sin_(RandomRotations(options.max_positions, options.rope_size, seed + 2)),
        pages_(DType::kU8,
               {(num_entries_ + options.rows_per_page - 1) / options.rows_per_page + 1, PageBytes(options)}) {
    std::mt19937_64 random(seed + 3);
    std::vector<int64_t> blocks(options.num_requests * table_blocks_ + 3);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random);
    blocks.resize(options.num_requests * table_blocks_);
    SetInts(table_.view(), blocks);
    entry_slots_.resize(num_entries_);
    std::iota(entry_slots_.begin(), entry_slots_.end(), 1);  // slot 0 is no request's
    std::shuffle(entry_slots_.begin(), entry_slots_.end(), random);
  }

  static int64_t PageBytes(const Options& options) {
    // A little longer than what is used, so that neighbouring pages do not touch.
    return PageStrideBytes(options.format, options.rows_per_page, options.head_size, options.rope_size) + 12;
  }

  // [value | score] of a token: what its state row holds.
  std::vector<float> State(int64_t request, int64_t position) const {
    std::vector<float> state = RandomFloats(2 * width_, seed_ * 1000003 + request * 10007 + position, 2.0f);
    if (options_.state_dtype == DType::kBf16) {
      for (float& x : state) x = static_cast<float>(NearestBf16(x));
    }
    return state;
  }
  int64_t StateSlot(int64_t request, int64_t position) const {
    const int64_t block =
        table_.data<int32_t>()[request * table_blocks_ + position / options_.block_size % table_blocks_];
    return block * options_.block_size + position % options_.block_size;
  }
  void PutState(int64_t request, int64_t position) {
    const int64_t slot = StateSlot(request, position);
    SetFloats(state_.view().Index(slot / options_.block_size).Rows(slot % options_.block_size, 1),
              State(request, position));
  }
  // The rows that the entry of this position pools, and no others.
  void PutWindow(int64_t request, int64_t position) {
    const int64_t pooled = (options_.overlap ? 2 : 1) * options_.ratio;
    for (int64_t t = std::max<int64_t>(position - pooled + 1, 0); t <= position; ++t) PutState(request, t);
  }

  int64_t EntrySlot(int64_t request, int64_t position) const {
    return entry_slots_[request * (num_entries_ / options_.num_requests) + position / options_.ratio];
  }
  bool IsBoundary(int64_t position) const { return (position + 1) % options_.ratio == 0; }
  Row MakeRow(int64_t request, int64_t position) const {
    return {.state_slot = StateSlot(request, position),
            .request = static_cast<int32_t>(request),
            .position = position,
            .entry_slot = IsBoundary(position) ? EntrySlot(request, position) : -1};
  }

  PagedRows entries() const {
    return {.pages = pages_.view(),
            .format = options_.format,
            .rows_per_page = options_.rows_per_page,
            .row_size = options_.head_size,
            .rope_size = options_.rope_size};
  }
  std::vector<float> Entry(int64_t slot) const {
    std::vector<float> entry(options_.head_size);
    DecodeRow(entries(), slot, entry.data());
    return entry;
  }

  // The entry of the window that ends at this position, in double, before it is stored.
  std::vector<float> Expected(int64_t request, int64_t position) const {
    const int64_t d = options_.head_size, dr = options_.rope_size, ratio = options_.ratio;
    std::vector<double> entry(d);
    std::map<int64_t, std::vector<float>> states;
    for (int64_t t = std::max<int64_t>(position - 2 * ratio + 1, 0); t <= position; ++t) states[t] = State(request, t);
    for (int64_t c = 0; c < d; ++c) {
      double weights = 0, values = 0;
      const auto pool = [&](int64_t t, int64_t column) {
        const double weight = std::exp(static_cast<double>(states[t][width_ + column]));
        weights += weight;
        values += weight * static_cast<double>(states[t][column]);
      };
      if (options_.overlap) {
        for (int64_t t = position - 2 * ratio + 1; t <= position - ratio; ++t) {
          if (t >= 0) pool(t, c);
        }
        for (int64_t t = position - ratio + 1; t <= position; ++t) pool(t, d + c);
      } else {
        for (int64_t t = position - ratio + 1; t <= position; ++t) pool(t, c);
      }
      entry[c] = values / weights;
    }
    double squares = 0;
    for (const double x : entry) squares += x * x;
    const std::vector<float> norm = norm_.ToFloats();
    for (int64_t c = 0; c < d; ++c) entry[c] *= norm[c] / std::sqrt(squares / d + options_.eps);
    const float* rotation = cos_sin_.data<float>() + (position + 1 - ratio) * dr;
    for (int64_t i = 0; i < dr / 2; ++i) {
      const double a = entry[d - dr + 2 * i], b = entry[d - dr + 2 * i + 1];
      entry[d - dr + 2 * i] = a * rotation[i] - b * rotation[dr / 2 + i];
      entry[d - dr + 2 * i + 1] = a * rotation[dr / 2 + i] + b * rotation[i];
    }
    std::vector<float> result(entry.begin(), entry.end());
    for (int64_t a = 0; options_.hadamard && a < d; ++a) {
      double sum = 0;
      for (int64_t b = 0; b < d; ++b)
        sum += std::popcount(static_cast<uint64_t>(a & b)) % 2 == 0 ? entry[b] : -entry[b];
      result[a] = static_cast<float>(sum / std::sqrt(static_cast<double>(d)));
    }
    return result;
  }

  const Options& options() const { return options_; }
  const TestTensor& state() const { return state_; }
  const TestTensor& table() const { return table_; }
  const TestTensor& norm() const { return norm_; }
  const TestTensor& cos_sin() const { return cos_sin_; }
  const TestTensor& pages() const { return pages_; }

 private:
  Options options_;
  uint64_t seed_;
  int64_t width_, table_blocks_, num_entries_;
  TestTensor state_, table_, norm_, cos_sin_, pages_;
  std::vector<int64_t> entry_slots_;
};

// The rows of a step as tensors, and the parameters over them and the caches.
class Step {
 public:
  Step(const Caches& caches, const std::vector<Row>& rows)
      : state_slots_(DType::kI64, {Count(rows)}),
        requests_(DType::kI32, {Count(rows)}),
        positions_(DType::kI64, {Count(rows)}),
        entry_slots_(DType::kI64, {Count(rows)}) {
    for (int64_t i = 0; i < Count(rows); ++i) {
      state_slots_.data<int64_t>()[i] = rows[i].state_slot;
      requests_.data<int32_t>()[i] = rows[i].request;
      positions_.data<int64_t>()[i] = rows[i].position;
      entry_slots_.data<int64_t>()[i] = rows[i].entry_slot;
    }
    params_ = {.state_cache = caches.state().view(),
               .state_slots = state_slots_.view(),
               .state_block_table = caches.table().view(),
               .requests = requests_.view(),
               .positions = positions_.view(),
               .ratio = caches.options().ratio,
               .overlap = caches.options().overlap,
               .norm_weight = caches.norm().weight(),
               .eps = caches.options().eps,
               .cos_sin = caches.cos_sin().weight(),
               .hadamard = caches.options().hadamard,
               .entry_slots = entry_slots_.view(),
               .entries = caches.entries()};
  }
  Params& params() { return params_; }

 private:
  static int64_t Count(const std::vector<Row>& rows) { return static_cast<int64_t>(rows.size()); }
  TestTensor state_slots_, requests_, positions_, entry_slots_;
  Params params_;
};

class CompressStore : public OpTest {
 protected:
  void Run(const Caches& caches, const std::vector<Row>& rows) {
    Step step(caches, rows);
    DSV4_ASSERT_OK(Record(stream(), step.params()));
    DSV4_ASSERT_OK(stream().Synchronize());
    caches.pages().CheckGuards();
    caches.state().CheckGuards();
  }

  // Whether the pages hold these entries, (request, position), in fp32, and NaN bytes everywhere else.
  static void ExpectExactly(const Caches& caches, const std::vector<std::pair<int64_t, int64_t>>& entries) {
    std::vector<uint8_t> bytes = caches.pages().Bytes();
    const int64_t row_bytes = 4 * caches.options().head_size;
    for (const auto& [request, position] : entries) {
      const int64_t slot = caches.EntrySlot(request, position);
      EXPECT_TRUE(
          IsClose(caches.Entry(slot), caches.Expected(request, position), caches.options().head_size, kTolerance))
          << "request " << request << ", position " << position;
      const auto row = bytes.begin() + slot / caches.options().rows_per_page * Caches::PageBytes(caches.options()) +
                       slot % caches.options().rows_per_page * row_bytes;
      std::fill(row, row + row_bytes, 0xff);
    }
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0xff), static_cast<int64_t>(bytes.size()));
  }
};

TEST_F(CompressStore, PoolsNormalisesAndRotates) {
  // Ratio 2 without overlap. Channel 0: scores 0 and ln 3, so weights 1/4 and 3/4 of values 0 and 4: 3. Channel 1:
  // equal scores of values 3 and 5: 4. The mean square is 12.5; with eps 0 and weights 1 and 2 the row is
  // (3, 8) / sqrt(12.5); a quarter turn makes (a, b) to (-b, a).
  TestTensor state(DType::kF32, {1, 2, 4}, {0, 3, 0, 7, 4, 5, std::log(3.0f), 7});
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {0});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {1}, {1});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {1}, {0});
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {1}, {1});
  const TestTensor norm(DType::kF32, {2}, {1, 2});
  const TestTensor cos_sin(DType::kF32, {2, 2}, {0, 1, NAN, NAN});
  const TestTensor entry_slots = TestTensor::OfInts(DType::kI64, {1}, {1});
  const TestTensor pages(DType::kU8, {1, 16});
  const PagedRows entries = {
      .pages = pages.view(), .format = RowFormat::kF32, .rows_per_page = 2, .row_size = 2, .rope_size = 2};
  DSV4_ASSERT_OK(Record(stream(), {.state_cache = state.view(),
                                   .state_slots = slots.view(),
                                   .state_block_table = table.view(),
                                   .requests = requests.view(),
                                   .positions = positions.view(),
                                   .ratio = 2,
                                   .norm_weight = norm.weight(),
                                   .cos_sin = cos_sin.weight(),
                                   .entry_slots = entry_slots.view(),
                                   .entries = entries}));
  std::vector<float> entry(2);
  DecodeRow(entries, 1, entry.data());
  EXPECT_NEAR(entry[0], -8 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(entry[1], 3 / std::sqrt(12.5), 1e-6);
  EXPECT_EQ(pages.Bytes()[0], 0xff);  // row 0 is not touched
}

TEST_F(CompressStore, PoolsBothHalvesOfOverlappingWindows) {
  // Ratio 2, one channel pair. All scores are equal, so an entry is a mean: of columns 0..1 of the previous window's
  // rows and columns 2..3 of its own. Rows 0..3 hold 10 t + column: entry 1 pools {0, 10, 22, 32} and {1, 11, 23, 33}.
  TestTensor state(DType::kF32, {1, 4, 8});
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t c = 0; c < 8; ++c) state.data<float>()[8 * t + c] = c < 4 ? static_cast<float>(10 * t + c) : 0.5f;
  }
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {0});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {2}, {1, 3});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {2}, {0, 0});
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {2}, {1, 3});
  const TestTensor norm(DType::kF32, {2}, {1, 1});
  const TestTensor cos_sin(DType::kF32, {4, 2}, {1, 0, NAN, NAN, 1, 0, NAN, NAN});
  const TestTensor entry_slots = TestTensor::OfInts(DType::kI64, {2}, {0, 1});
  const TestTensor pages(DType::kU8, {1, 16});
  const PagedRows entries = {
      .pages = pages.view(), .format = RowFormat::kF32, .rows_per_page = 2, .row_size = 2, .rope_size = 2};
  DSV4_ASSERT_OK(Record(stream(), {.state_cache = state.view(),
                                   .state_slots = slots.view(),
                                   .state_block_table = table.view(),
                                   .requests = requests.view(),
                                   .positions = positions.view(),
                                   .ratio = 2,
                                   .overlap = true,
                                   .norm_weight = norm.weight(),
                                   .cos_sin = cos_sin.weight(),
                                   .entry_slots = entry_slots.view(),
                                   .entries = entries}));
  // The first entry has no previous window: the means of {2, 12} and {3, 13}.
  const double first_norm = std::sqrt((7.0 * 7 + 8 * 8) / 2), second_norm = std::sqrt((16.0 * 16 + 17 * 17) / 2);
  std::vector<float> entry(2);
  DecodeRow(entries, 0, entry.data());
  EXPECT_NEAR(entry[0], 7 / first_norm, 1e-6);
  EXPECT_NEAR(entry[1], 8 / first_norm, 1e-6);
  DecodeRow(entries, 1, entry.data());
  EXPECT_NEAR(entry[0], 16 / second_norm, 1e-6);
  EXPECT_NEAR(entry[1], 17 / second_norm, 1e-6);
}

// Every phase of every kind of window: a step of one request starts at each position and holds a boundary or two; all
// state rows outside the windows of its entries are NaN.
TEST_F(CompressStore, MatchesTheSpecificationAtEveryPhase) {
  struct Window {
    int64_t ratio;
    bool overlap;
  };
  int64_t variant = 0;
  for (const Window window : {Window{4, true}, Window{2, true}, Window{8, true}, Window{1, true}, Window{1, false},
                              Window{2, false}, Window{4, false}, Window{5, false}}) {
    for (int64_t start = 0; start < 3 * window.ratio; ++start) {
      const int64_t tokens[] = {1, 2, 3, window.ratio, window.ratio + 1, 2 * window.ratio + 1};
      for (const int64_t count : tokens) {
        variant += 1;
        const Options options = {.ratio = window.ratio,
                                 .overlap = window.overlap,
                                 .head_size = variant % 2 == 0 ? 8 : 6,
                                 .block_size = std::vector<int64_t>{1, 2, 3, 4, 8}[variant % 5],
                                 .num_requests = 1 + variant % 3,
                                 .state_dtype = variant % 4 == 0 ? DType::kBf16 : DType::kF32,
                                 .norm_dtype = variant % 3 == 0 ? DType::kBf16 : DType::kF32,
                                 .hadamard = variant % 4 == 0};
        SCOPED_TRACE(testing::Message() << "ratio " << window.ratio << ", overlap " << window.overlap << ", from "
                                        << start << ", " << count << " tokens, block size " << options.block_size);
        Caches caches(options, variant);
        std::vector<Row> rows;
        std::vector<std::pair<int64_t, int64_t>> entries;
        for (int64_t position = start; position < start + count; ++position) {
          for (int64_t request = 0; request < options.num_requests; ++request) {
            rows.push_back(caches.MakeRow(request, position));
            if (!caches.IsBoundary(position)) continue;
            caches.PutWindow(request, position);
            entries.push_back({request, position});
          }
        }
        Run(caches, rows);
        ExpectExactly(caches, entries);
        if (HasFailure()) return;
      }
    }
  }
}

// The compressors of the published layers, each of which has a kernel of its own.
struct Published {
  Kernel kernel;
  Options options;
};

std::vector<Published> PublishedLayers(int64_t windows, int64_t num_requests = 2) {
  const auto layer = [&](Kernel kernel, int64_t ratio, int64_t head_size, bool hadamard) {
    return Published{kernel,
                     {.ratio = ratio,
                      .overlap = ratio == 4,
                      .head_size = head_size,
                      .rope_size = 64,
                      .block_size = ratio == 4 ? 4 : 8,
                      .num_requests = num_requests,
                      .max_positions = windows * ratio,
                      .norm_dtype = DType::kBf16,
                      .rows_per_page = 2,
                      .hadamard = hadamard}};
  };
  return {layer(Kernel::kOverlapped512, 4, 512, false), layer(Kernel::kOverlapped128, 4, 128, false),
          layer(Kernel::kOverlapped128, 4, 128, true), layer(Kernel::kLong512, 128, 512, false)};
}

std::string Describe(const Options& options) {
  return "ratio " + std::to_string(options.ratio) + ", head size " + std::to_string(options.head_size) +
         (options.hadamard ? ", hadamard" : "");
}

TEST_F(CompressStore, PublishedLayersHaveKernelsOfTheirOwn) {
  for (const auto& [kernel, options] : PublishedLayers(2)) {
    SCOPED_TRACE(Describe(options));
    const Caches caches(options);
    Step step(caches, {caches.MakeRow(0, 0)});
    EXPECT_EQ(ChooseKernel(step.params()), kernel);
    const std::vector<std::function<void(Params&)>> changes = {
        [](Params& p) { p.state_cache.dtype = DType::kBf16; },
        [](Params& p) { p.state_cache.data = p.state_cache.At<float>(0, 0, 1); },
        [](Params& p) { p.state_cache.strides[1] += 2; },
        [](Params& p) { p.state_cache.extents[1] = 2; },
        [](Params& p) { p.ratio = 8; },
        [](Params& p) { p.overlap = !p.overlap; },
        [](Params& p) { p.entries.row_size = 256; },
        [](Params& p) { p.entries.rope_size = 62; },
    };
    for (size_t i = 0; i < changes.size(); ++i) {
      Params changed = step.params();
      changes[i](changed);
      EXPECT_EQ(ChooseKernel(changed), Kernel::kGeneric) << "change " << i;
    }
    // What only a warp that holds a whole row can do.
    for (const bool hadamard : {false, true}) {
      Params changed = step.params();
      changed.hadamard = hadamard;
      if (!hadamard) changed.entries.format = RowFormat::kFp8Key;
      EXPECT_EQ(ChooseKernel(changed), kernel == Kernel::kOverlapped128 ? kernel : Kernel::kGeneric);
    }
  }
}

TEST_F(CompressStore, MatchesTheSpecificationAtThePublishedSizes) {
  for (const auto& [kernel, options] : PublishedLayers(3)) {
    SCOPED_TRACE(Describe(options));
    Caches caches(options);
    std::vector<Row> rows;
    std::vector<std::pair<int64_t, int64_t>> entries;
    for (int64_t position = options.ratio - 1; position < 3 * options.ratio; position += options.ratio) {
      for (int64_t request = 0; request < 2; ++request) {
        caches.PutWindow(request, position);
        rows.push_back(caches.MakeRow(request, position));
        entries.push_back({request, position});
      }
    }
    Run(caches, rows);
    ExpectExactly(caches, entries);
  }
}

// Steps of many rows, as wide batches and prefill chunks have them: all at a boundary, few, or one in a window.
TEST_F(CompressStore, FindsTheEntriesAmongManyRows) {
  for (const auto& [kernel, options] : PublishedLayers(9, 3)) {
    for (const int64_t spacing : {int64_t{1}, int64_t{7}, options.ratio}) {
      for (const int64_t count : {31, 32, 33, 64, 65, 100, 129, 300}) {
        SCOPED_TRACE(testing::Message() << Describe(options) << ", " << count << " rows, one in " << spacing);
        Caches caches(options, count);
        std::vector<std::pair<int64_t, int64_t>> windows;
        for (int64_t request = 0; request < 3; ++request) {
          for (int64_t window = 1; window <= 9; ++window) windows.push_back({request, window * options.ratio - 1});
        }
        std::shuffle(windows.begin(), windows.end(), std::mt19937_64(static_cast<uint64_t>(count)));
        std::vector<Row> rows;
        std::vector<std::pair<int64_t, int64_t>> entries;
        for (int64_t i = 0; i < count; ++i) {
          if (i % spacing == spacing - 1 && entries.size() < windows.size()) {
            const auto& [request, position] = windows[entries.size()];
            caches.PutWindow(request, position);
            rows.push_back(caches.MakeRow(request, position));
            entries.push_back({request, position});
          } else if (i % 2 == 0) {
            rows.push_back({.state_slot = kFarPad, .request = -7, .position = 4 * i - 1, .entry_slot = 0});
          } else {
            rows.push_back(caches.MakeRow(i % 3, 2 + 4 * (i % 3)));  // off any boundary
          }
        }
        Run(caches, rows);
        ExpectExactly(caches, entries);
        if (HasFailure()) return;
      }
    }
  }
}

// Rows that weigh nothing: single ones, a whole block of them, and all but one.
TEST_F(CompressStore, IgnoresRowsOfScoreMinusInfinity) {
  for (const auto& [kernel, options] : PublishedLayers(2)) {
    SCOPED_TRACE(Describe(options));
    const int64_t position = 2 * options.ratio - 1, pooled = options.overlap ? 8 : 128;
    const int64_t width = options.overlap ? 2 * options.head_size : options.head_size;
    for (const int64_t weighty : {pooled - 8, pooled / 2, int64_t{1}}) {
      // Both hold the same values; those of the rows that weigh nothing differ.
      Caches one(options), other(options);
      for (Caches* caches : {&one, &other}) {
        caches->PutWindow(0, position);
        for (int64_t i = std::max<int64_t>(weighty, 1); i < pooled; ++i) {
          const int64_t slot = caches->StateSlot(0, position - i);
          const TensorView state =
              caches->state().view().Index(slot / options.block_size).Rows(slot % options.block_size, 1);
          SetFloats(state.Columns(width, width), std::vector<float>(width, -INFINITY));
          if (caches == &other) SetFloats(state.Columns(0, width), std::vector<float>(width, 5.0f));
        }
        Run(*caches, {caches->MakeRow(0, position)});
      }
      EXPECT_TRUE(BitwiseEqual(one.pages().view(), other.pages().view()));
      const std::vector<float> entry = one.Entry(one.EntrySlot(0, position));
      EXPECT_TRUE(std::all_of(entry.begin(), entry.end(), [](float x) { return std::isfinite(x); }));
      if (weighty != 1) continue;
      // One row alone: the entry is that row, normed and rotated.
      const std::vector<float> state = one.State(0, position);
      const int64_t begin = options.overlap ? options.head_size : 0;
      double squares = 0;
      for (int64_t c = begin; c < begin + options.head_size; ++c) squares += static_cast<double>(state[c]) * state[c];
      const std::vector<float> norm = one.norm().ToFloats();
      if (options.hadamard) continue;
      EXPECT_NEAR(entry[3], state[begin + 3] * norm[3] / std::sqrt(squares / options.head_size), 1e-5);
    }
  }
}

// NaN in the rows before the request's first (there are none, but a negative position has a block in a ring), and in
// the half of the columns that belongs to the next entry.
TEST_F(CompressStore, FirstOverlappedEntryPoolsItsOwnWindowOnly) {
  for (const int64_t ratio : {1, 2, 4, 8}) {
    for (const int64_t table_blocks : {0, 5}) {
      Caches caches({.ratio = ratio, .overlap = true, .block_size = 4, .table_blocks = table_blocks});
      const int64_t position = ratio - 1;
      caches.PutWindow(1, position);
      for (int64_t t = 0; t <= position; ++t) {
        const int64_t slot = caches.StateSlot(1, t);
        const TensorView state = caches.state().view().Index(slot / 4).Rows(slot % 4, 1);
        SetFloats(state.Columns(0, 8), std::vector<float>(8, NAN));
        SetFloats(state.Columns(16, 8), std::vector<float>(8, NAN));
      }
      Run(caches, {caches.MakeRow(1, position)});
      ExpectExactly(caches, {{1, position}});
    }
  }
}

TEST_F(CompressStore, FollowsARingOfBlocks) {
  for (const bool overlap : {true, false}) {
    for (const int64_t block_size : {1, 2, 4, 8}) {
      // The window, the widest step (5) and one block more.
      const int64_t table_blocks = ((overlap ? 8 : 4) + 4 + block_size - 1) / block_size + 1;
      Caches caches({.ratio = 4, .overlap = overlap, .block_size = block_size, .table_blocks = table_blocks});
      std::vector<std::pair<int64_t, int64_t>> entries;
      int64_t position = 0;
      while (position + 5 <= 48) {  // steps of 5 tokens; old rows are overwritten as the ring turns
        std::vector<Row> rows;
        for (int64_t end = position + 5; position < end; ++position) {
          caches.PutState(1, position);
          rows.push_back(caches.MakeRow(1, position));
          if (caches.IsBoundary(position)) entries.push_back({1, position});
        }
        Run(caches, rows);
      }
      ExpectExactly(caches, entries);
    }
  }
}

TEST_F(CompressStore, RowsOffTheBoundaryNeverWrite) {
  Caches caches({.ratio = 4, .overlap = true});
  for (int64_t position = 0; position < 7; ++position) {
    caches.PutState(0, position);
    Row row = caches.MakeRow(0, position);
    if (position != 3) row.entry_slot = 0;  // a slot where none is due: it must not be used
    Run(caches, {row});
    if (position < 3) ExpectExactly(caches, {});
    if (position >= 3) ExpectExactly(caches, {{0, 3}});
  }
}

// Slot 0 holds an entry; a row without a slot, taken for one at slot 0, would overwrite it.
TEST_F(CompressStore, AnEntryWithoutASlotIsNotStored) {
  for (const int64_t entry_slot : {int64_t{-1}, int64_t{-2}, int64_t{-3}, kFarPad}) {
    Caches caches({.ratio = 4, .overlap = true});
    for (int64_t t = 0; t < 8; ++t) caches.PutState(0, t);
    Row row = caches.MakeRow(0, 7);
    row.entry_slot = entry_slot;
    row.request = std::numeric_limits<int32_t>::max();  // not to be looked at
    Run(caches, {row});
    ExpectExactly(caches, {});
  }
}

TEST_F(CompressStore, PadsMayHoldAnything) {
  for (const int64_t pad_slot : {int64_t{-1}, int64_t{-4}, kFarPad}) {
    Caches with_pads({.ratio = 4, .overlap = true}), without({.ratio = 4, .overlap = true});
    for (Caches* caches : {&with_pads, &without}) {
      caches->PutWindow(0, 7);
      caches->PutWindow(1, 11);
    }
    const auto pad = [&](int64_t position, int32_t request) {
      return Row{.state_slot = pad_slot, .request = request, .position = position, .entry_slot = 0};
    };
    const int32_t largest = std::numeric_limits<int32_t>::max();
    Run(with_pads, {pad(-1, -1), with_pads.MakeRow(0, 7), pad(3, largest), pad(7, -largest),
                    pad(std::numeric_limits<int64_t>::max() - 1, 0), with_pads.MakeRow(1, 11), pad(kFarPad, 0)});
    Run(without, {without.MakeRow(0, 7), without.MakeRow(1, 11)});
    EXPECT_TRUE(BitwiseEqual(with_pads.pages().view(), without.pages().view()));
    ExpectExactly(with_pads, {{0, 7}, {1, 11}});
  }
}

TEST_F(CompressStore, PadsAloneChangeNothing) {
  Caches caches({.ratio = 2, .overlap = false});
  for (const size_t count : {1, 2, 3, 31, 32, 33}) {
    Run(caches, std::vector<Row>(count, {.state_slot = -1, .request = -1, .position = 1, .entry_slot = 0}));
    ExpectExactly(caches, {});
  }
}

TEST_F(CompressStore, RowsDoNotDependOnEachOther) {
  const Options options = {.ratio = 4,
                           .overlap = true,
                           .head_size = 128,
                           .rope_size = 64,
                           .num_requests = 11,
                           .format = RowFormat::kFp8Key,
                           .hadamard = true};
  Caches together(options), alone(options);
  std::vector<Row> rows;
  for (int64_t request = 0; request < 11; ++request) {
    for (const int64_t position : {3, 7, 11}) {
      together.PutWindow(request, position);
      alone.PutWindow(request, position);
      rows.push_back(together.MakeRow(request, position));
    }
  }
  ASSERT_EQ(rows.size(), 33u);
  Run(together, rows);
  std::shuffle(rows.begin(), rows.end(), std::mt19937_64(5));
  for (const Row& row : rows) Run(alone, {row});
  EXPECT_TRUE(BitwiseEqual(together.pages().view(), alone.pages().view()));
}

TEST_F(CompressStore, RowsOfPublishedLayersDoNotDependOnEachOther) {
  for (const auto& [kernel, options] : PublishedLayers(3, 11)) {
    SCOPED_TRACE(Describe(options));
    Caches together(options), alone(options);
    std::vector<Row> rows;
    for (int64_t request = 0; request < 11; ++request) {
      for (int64_t window = 1; window <= 3; ++window) {
        const int64_t position = window * options.ratio - 1;
        together.PutWindow(request, position);
        alone.PutWindow(request, position);
        rows.push_back(together.MakeRow(request, position));
      }
    }
    Run(together, rows);
    std::shuffle(rows.begin(), rows.end(), std::mt19937_64(5));
    for (const Row& row : rows) Run(alone, {row});
    EXPECT_TRUE(BitwiseEqual(together.pages().view(), alone.pages().view()));
  }
}

TEST_F(CompressStore, RotatesByTheFirstPositionOfTheEntrysOwnWindow) {
  for (const bool overlap : {true, false}) {
    for (const int64_t ratio : {2, 4, 8}) {
      Caches caches({.ratio = ratio, .overlap = overlap});
      const int64_t position = 3 * ratio - 1;
      caches.PutWindow(0, position);
      for (int64_t p = 0; p < 48; ++p) {
        if (p != 2 * ratio) SetFloats(caches.cos_sin().view().Rows(p, 1), std::vector<float>(4, NAN));
      }
      Run(caches, {caches.MakeRow(0, position)});
      ExpectExactly(caches, {{0, position}});
    }
  }
}

TEST_F(CompressStore, LargeScoresDoNotOverflow) {
  Caches caches({.ratio = 2, .overlap = false, .num_requests = 1});
  const float large = 3e38f;
  // Channel by channel the score of one row outweighs the other's by far more than exp can hold.
  const TensorView state = caches.state().view();
  for (int64_t t = 0; t < 2; ++t) {
    const int64_t slot = caches.StateSlot(0, t);
    std::vector<float> row(16);
    for (int64_t c = 0; c < 8; ++c) {
      row[c] = t == c % 2 ? 1.0f : 1000.0f;
      row[8 + c] = t == c % 2 ? large : -large;
    }
    SetFloats(state.Index(slot / 4).Rows(slot % 4, 1), row);
  }
  SetFloats(caches.norm().view(), std::vector<float>(8, 1.0f));
  Run(caches, {caches.MakeRow(0, 1)});
  const std::vector<float> entry = caches.Entry(caches.EntrySlot(0, 1));
  for (int64_t c = 0; c < 4; ++c) EXPECT_NEAR(entry[c], 1.0f, 1e-6) << c;  // past them is the rotary part
}

TEST_F(CompressStore, AnEntryOfZerosIsZero) {
  Caches caches({.ratio = 2, .overlap = false, .num_requests = 1, .format = RowFormat::kBf16});
  for (int64_t t = 0; t < 2; ++t) {
    const int64_t slot = caches.StateSlot(0, t);
    SetFloats(caches.state().view().Index(slot / 4).Rows(slot % 4, 1), std::vector<float>(16, 0.0f));
  }
  Run(caches, {caches.MakeRow(0, 1)});
  for (const float x : caches.Entry(caches.EntrySlot(0, 1))) EXPECT_EQ(x, 0.0f);
}

// The fp32 entry is held against the specification above; every other format is that entry, rounded to bf16 and then
// quantised, byte for byte, with all rows' values first in a page and the scales behind them.
TEST_F(CompressStore, StoresEveryFormatByteForByte) {
  struct Size {
    int64_t ratio, head_size;
  };
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kFp8, RowFormat::kFp8Key, RowFormat::kMxfp4Key}) {
    for (const auto [ratio, head_size] : {Size{4, 128}, Size{4, 192}, Size{4, 512}, Size{128, 512}}) {
      SCOPED_TRACE(testing::Message() << RowFormatName(format) << " " << head_size << ", ratio " << ratio);
      Options options = {.ratio = ratio,
                         .overlap = ratio == 4,
                         .head_size = head_size,
                         .rope_size = 64,
                         .block_size = ratio == 4 ? 4 : 8,
                         .max_positions = 6 * ratio,
                         .rows_per_page = 5};
      // One kernel for both, since kernels differ in the order of their sums.
      if (head_size == 512 && format == RowFormat::kFp8Key) options.block_size = 2;
      Caches exact(options);
      options.format = format;
      Caches stored(options);
      std::vector<Row> rows;
      for (int64_t position = ratio - 1; position < options.max_positions; position += ratio) {
        for (int64_t request = 0; request < 2; ++request) {
          exact.PutWindow(request, position);
          stored.PutWindow(request, position);
          rows.push_back(stored.MakeRow(request, position));
        }
      }
      Run(exact, rows);
      Run(stored, rows);

      const TestTensor expected(DType::kU8, {stored.pages().view().extents[0], Caches::PageBytes(options)});
      for (const Row& row : rows) {
        const EncodedRow encoded = EncodeByDefinition(format, exact.Entry(row.entry_slot), 64);
        const int64_t page = row.entry_slot / 5 * Caches::PageBytes(options), r = row.entry_slot % 5;
        const int64_t value_bytes = static_cast<int64_t>(encoded.values.size());
        uint8_t* const begin = expected.data<uint8_t>() + page;
        std::copy(encoded.values.begin(), encoded.values.end(), begin + r * value_bytes);
        std::copy(encoded.scales.begin(), encoded.scales.end(),
                  begin + 5 * value_bytes + r * static_cast<int64_t>(encoded.scales.size()));
      }
      EXPECT_TRUE(BitwiseEqual(stored.pages().view(), expected.view()));
    }
  }
}

// Saves and compresses tokens as a decoder does, in steps of any width.
class CompressStoreDecoding : public CompressStore {
 protected:
  // Tokens `begin` to `end` of request 0; those from `wrong_from` on are drafts that hold other values than the real
  // ones.
  void Decode(const Caches& caches, int64_t begin, int64_t end, int64_t wrong_from) {
    const int64_t width = caches.state().view().extents[2] / 2, tokens = end - begin;
    TestTensor projected(DType::kF32, {tokens, 2 * width});
    const TestTensor ape(DType::kF32, {caches.options().ratio, width},
                         RandomFloats(caches.options().ratio * width, 77));
    TestTensor positions(DType::kI64, {tokens}), slots(DType::kI64, {tokens});
    std::vector<Row> rows;
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t position = begin + i;
      SetFloats(projected.view().Rows(i, 1), caches.State(position >= wrong_from ? 1 : 0, position));
      positions.data<int64_t>()[i] = position;
      slots.data<int64_t>()[i] = caches.StateSlot(0, position);
      rows.push_back(caches.MakeRow(0, position));
    }
    DSV4_ASSERT_OK(save_partial_states::Record(stream(), {.kv = projected.view().Columns(0, width),
                                                          .score = projected.view().Columns(width, width),
                                                          .ape = ape.weight(),
                                                          .positions = positions.view(),
                                                          .slots = slots.view(),
                                                          .state_cache = caches.state().view()}));
    Run(caches, rows);
  }

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
};

TEST_F(CompressStoreDecoding, TokensOneAtATimeAndAllAtOnceAreEqual) {
  for (const bool overlap : {true, false}) {
    const Options options = {.ratio = 4, .overlap = overlap, .num_requests = 2};
    Caches at_once(options), one_by_one(options);
    Decode(at_once, 0, 9, kNone);
    for (int64_t position = 0; position < 9; ++position) Decode(one_by_one, position, position + 1, kNone);
    EXPECT_TRUE(BitwiseEqual(at_once.pages().view(), one_by_one.pages().view()));
    EXPECT_FALSE(std::isnan(one_by_one.Entry(one_by_one.EntrySlot(0, 7))[0]));
  }
}

TEST_F(CompressStoreDecoding, ChunksMaySplitAWindowAnywhere) {
  for (const int64_t ratio : {2, 4, 8}) {
    for (const bool overlap : {true, false}) {
      const Options options = {.ratio = ratio, .overlap = overlap};
      Caches at_once(options);
      Decode(at_once, 0, 40, kNone);
      for (int64_t first = 1; first < 40; ++first) {
        Caches in_two(options);
        Decode(in_two, 0, first, kNone);
        Decode(in_two, first, 40, kNone);
        EXPECT_TRUE(BitwiseEqual(in_two.pages().view(), at_once.pages().view())) << ratio << ", split at " << first;
      }
    }
  }
}

// Steps wider than the ratio, of which some tokens are accepted and the rest decoded again, over a ring.
TEST_F(CompressStoreDecoding, RejectedDraftsLeaveNoTrace) {
  constexpr int64_t kTokens = 36;
  const Options one_by_one_options = {.ratio = 4, .overlap = true};
  Caches one_by_one(one_by_one_options);
  for (int64_t position = 0; position < kTokens; ++position) Decode(one_by_one, position, position + 1, kNone);

  for (const int64_t width : {2, 4, 5, 8, 12}) {
    Options options = one_by_one_options;
    options.table_blocks = (2 * options.ratio + width - 1 + options.block_size - 1) / options.block_size + 1;
    for (int64_t phase = 0; phase < 8; ++phase) {
      for (int64_t accepted = 1; accepted <= width; ++accepted) {  // the first token of a step is no draft
        SCOPED_TRACE(testing::Message() << "width " << width << ", phase " << phase << ", accepted " << accepted);
        Caches verified(options);
        int64_t length = 0;
        if (phase > 0) Decode(verified, 0, phase, kNone);
        for (length = phase; length + width <= kTokens; length += accepted) {
          Decode(verified, length, length + width, length + accepted);
        }
        for (; length < kTokens; ++length) Decode(verified, length, length + 1, kNone);
        for (int64_t position = 3; position < kTokens; position += 4) {
          EXPECT_EQ(verified.Entry(verified.EntrySlot(0, position)),
                    one_by_one.Entry(one_by_one.EntrySlot(0, position)))
              << position;
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(CompressStore, AddressesCachesPastTwoToTheThirtyTwo) {
  // Ratio 1: an entry is its own state row, normed. 2^33 elements of state, 2^33 bytes of pages.
  constexpr int64_t kBlocks = int64_t{1} << 27, kPages = int64_t{1} << 27;
  const LargeBuffer state(device(), stream(), kBlocks * 16 * 4 * int64_t{sizeof(float)});
  const LargeBuffer pages(device(), stream(), kPages * 64);
  if (state.data() == nullptr || pages.data() == nullptr) GTEST_SKIP() << "no room for the caches";
  const PagedRows entries = {.pages = TensorView::Contiguous(pages.data(), DType::kU8, {kPages, 64}),
                             .format = RowFormat::kF32,
                             .rows_per_page = 8,
                             .row_size = 2,
                             .rope_size = 2};
  state.Put<float>(((kBlocks - 1) * 16 + 5) * 4, 3);
  state.Put<float>(((kBlocks - 1) * 16 + 5) * 4 + 1, 4);
  const TestTensor table = TestTensor::OfInts(DType::kI32, {1, 1}, {kBlocks - 1});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {1}, {kBlocks * 16 - 11});
  const TestTensor requests = TestTensor::OfInts(DType::kI32, {1}, {0});
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {1}, {5});
  const TestTensor norm(DType::kF32, {2}, {1, 1});
  const TestTensor cos_sin(DType::kF32, {6, 2}, {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0});
  const TestTensor entry_slots = TestTensor::OfInts(DType::kI64, {1}, {kPages * 8 - 2});
  DSV4_ASSERT_OK(Record(stream(), {.state_cache = TensorView::Contiguous(state.data(), DType::kF32, {kBlocks, 16, 4}),
                                   .state_slots = slots.view(),
                                   .state_block_table = table.view(),
                                   .requests = requests.view(),
                                   .positions = positions.view(),
                                   .ratio = 1,
                                   .norm_weight = norm.weight(),
                                   .cos_sin = cos_sin.weight(),
                                   .entry_slots = entry_slots.view(),
                                   .entries = entries}));
  EXPECT_NEAR(pages.Get<float>((kPages * 8 - 2) * 2), 3 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(pages.Get<float>((kPages * 8 - 2) * 2 + 1), 4 / std::sqrt(12.5), 1e-6);
}

TEST_F(CompressStore, TakesAStepWithoutTokens) {
  Caches caches({});
  Run(caches, {});
  ExpectExactly(caches, {});
}

TEST_F(CompressStore, DeclaresWhatItTouchesAndRunsWhenReplayed) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  Caches caches({.ratio = 4, .overlap = true, .num_requests = 1, .max_positions = 8});
  Step step(caches, {caches.MakeRow(0, 6)});
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), step.params()); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "compress_store");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(
      Declared(records[0]),
      ElementsAre("read state_cache f32 [5, 4, 32]", "read state_slots i64 [1]", "read state_block_table i32 [1, 2]",
                  "read requests i32 [1]", "read positions i64 [1]", "before wait norm_weight f32 [8]",
                  "before wait cos_sin f32 [8, 4]", "read entry_slots i64 [1]", "write entries u8 [2, 108]"));

  // Captured off a boundary, replayed at one.
  records[0].run();
  ExpectExactly(caches, {});
  *step.params().positions.At<int64_t>(0) = 7;
  *step.params().entry_slots.At<int64_t>(0) = caches.EntrySlot(0, 7);
  caches.PutWindow(0, 7);
  records[0].run();
  ExpectExactly(caches, {{0, 7}});
}

TEST_F(CompressStore, RefusesBadInputByNameAndWritesNothing) {
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.state_cache.data = nullptr; }, "state_cache: "},
      {[](Params& p) { p.state_cache.dtype = DType::kI32; }, "state_cache: expected f32 or bf16"},
      {[](Params& p) { p.state_cache.extents[2] = 31; }, "state_cache: expected f32 or bf16 [any, any, 32]"},
      {[](Params& p) { p.overlap = false; }, "state_cache: expected f32 or bf16 [any, any, 16]"},
      {[](Params& p) { p.state_cache.extents[1] = 0; }, "state_cache: block size"},
      {[](Params& p) { p.state_cache.strides[2] = 2; }, "state_cache: "},
      {[](Params& p) { p.state_slots.data = nullptr; }, "state_slots: "},
      {[](Params& p) { p.state_slots.dtype = DType::kI32; }, "state_slots: expected i64"},
      {[](Params& p) { p.state_block_table.dtype = DType::kI64; }, "state_block_table: expected i32"},
      {[](Params& p) { p.state_block_table = p.state_block_table.Index(0); }, "state_block_table: "},
      {[](Params& p) { p.state_block_table.extents[1] = 0; }, "state_block_table: blocks of a request"},
      {[](Params& p) { p.requests.extents[0] = 1; }, "requests: expected i32 [2], got i32 [1]"},
      {[](Params& p) { p.requests.dtype = DType::kI64; }, "requests: expected i32"},
      {[](Params& p) { p.positions.extents[0] = 1; }, "positions: expected i64 [2], got i64 [1]"},
      {[](Params& p) { p.positions.data = nullptr; }, "positions: "},
      {[](Params& p) { p.ratio = 0; }, "ratio: expected at least 1, got 0"},
      {[](Params& p) { p.ratio = -4; }, "ratio: expected at least 1, got -4"},
      {[](Params& p) { p.norm_weight = WeightView(); }, "norm_weight: "},
      {[](Params& p) { p.norm_weight = p.norm_weight.Rows(0, 7); }, "norm_weight: expected f32 or bf16 [8]"},
      {[](Params& p) { p.eps = -1e-6f; }, "eps: expected at least 0"},
      {[](Params& p) { p.eps = NAN; }, "eps: expected at least 0"},
      {[](Params& p) { p.cos_sin = WeightView(p.cos_sin.view().Columns(0, 2)); }, "cos_sin: expected f32 [any, 4]"},
      {[](Params& p) { p.cos_sin = WeightView(); }, "cos_sin: "},
      {[](Params& p) { p.entry_slots.dtype = DType::kI32; }, "entry_slots: expected i64"},
      {[](Params& p) { p.entry_slots.extents[0] = 1; }, "entry_slots: expected i64 [2], got i64 [1]"},
      {[](Params& p) { p.entries.pages.data = nullptr; }, "entries"},
      {[](Params& p) { p.entries.pages.dtype = DType::kF32; }, "entries"},
      {[](Params& p) { p.entries.rows_per_page = 0; }, "entries"},
      {[](Params& p) { p.entries.rows_per_page = 100; }, "entries"},
      {[](Params& p) { p.entries.pages.data = p.entries.pages.At<uint8_t>(0, 1); }, "entries"},
      {[](Params& p) { p.entries.rope_size = 3; }, "entries: expected an even number of rotary channels"},
      {[](Params& p) { p.entries.rope_size = 0; }, "entries: expected an even number of rotary channels"},
      {[](Params& p) { p.entries.rope_size = 10; }, "entries"},
      {[](Params& p) { p.entries.format = RowFormat::kFp8; }, "entries (fp8)"},
      {[](Params& p) { p.entries.format = RowFormat::kMxfp4Key; }, "entries (mxfp4_key)"},
      {[](Params& p) {
         p.hadamard = true;
         p.entries.row_size = 6;
       },
       "power of two"},
      {[](Params& p) { p.entries.pages.strides[0] = 0; }, "entries"},
      {[](Params& p) { p.entries.pages.extents[1] += 1; }, "entries"},  // into the next page
      {[](Params& p) { p.state_cache.data = p.entries.pages.data; }, "state_cache"},
      {[](Params& p) { p.state_slots.data = p.entries.pages.data; }, "state_slots"},
      {[](Params& p) { p.state_block_table.data = p.entries.pages.data; }, "state_block_table"},
      {[](Params& p) { p.requests.data = p.entries.pages.data; }, "requests"},
      {[](Params& p) { p.positions.data = p.entries.pages.data; }, "positions"},
      {[](Params& p) { p.entry_slots.data = p.entries.pages.data; }, "entry_slots"},
      {[](Params& p) { p.norm_weight = WeightView(TensorView::Contiguous(p.entries.pages.data, DType::kF32, {8})); },
       "norm_weight"},
      {[](Params& p) {
         p.cos_sin = WeightView(TensorView::Contiguous(p.entries.pages.data, DType::kF32, {2, 4}));
       },
       "cos_sin"},
  };
  for (const auto& test : cases) {
    Caches caches({});
    caches.PutWindow(0, 7);
    Step step(caches, {caches.MakeRow(0, 7), caches.MakeRow(0, 6)});
    DSV4_EXPECT_OK(Validate(step.params()));
    test.spoil(step.params());
    EXPECT_THAT(Validate(step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    ExpectExactly(caches, {});
  }
}

}  // namespace
}  // namespace dsv4::compress_store
