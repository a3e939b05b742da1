#include "ops/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A score errs by 2^-24 of the sum of its terms' magnitudes, up to about 10 here, so a weight by 1e-6; sums of weights
// and of weighted values of up to 170 rows by as much again.
constexpr double kTolerance = 5e-6;
// With bf16 q the expected weights are rounded too: those within that error of a midpoint, one in 1000, go the other
// way, by 2^-8. That is 1.2e-4 of all outputs; of one row it may be 2^-8. Rounding no weight costs 1e-3 of all outputs.
constexpr double kBf16Tolerance = 2.5e-4;
constexpr double kBf16RowTolerance = 0x1p-8;

class SparseAttentionTest : public OpTest {};

struct Case {
  int64_t rows, heads, channels, rotary;
  int64_t window_width, entry_width;  // 0: no list of entries
  int64_t window_page, entry_page;    // rows a page
  RowFormat format;
  DType q_dtype;
};

PagedRows Cache(const TestTensor& pages, RowFormat format, int64_t rows_per_page, int64_t channels, int64_t rotary) {
  return {.pages = pages.view(),
          .format = format,
          .rows_per_page = rows_per_page,
          .row_size = channels,
          .rope_size = rotary};
}

int64_t PageBytes(const Case& c, int64_t rows_per_page) {
  return PageStrideBytes(c.format, rows_per_page, c.channels, c.rotary) + 64;
}

struct Attention {
  static constexpr int64_t kPages = 5;

  explicit Attention(const Case& c)
      : c(c),
        q(c.q_dtype, {c.rows, c.heads, c.channels}, RandomFloats(c.rows * c.heads * c.channels, 1)),
        window_pages(DType::kU8, {kPages, PageBytes(c, c.window_page)}),
        entry_pages(DType::kU8, {kPages, PageBytes(c, c.entry_page)}),
        window_slots(DType::kI32, {c.rows, c.window_width}),
        entry_slots(DType::kI32, {c.rows, c.entry_width}),
        sink(DType::kF32, {c.heads}, RandomFloats(c.heads, 2)),
        out(DType::kF32, {c.rows, c.heads, c.channels}),
        lse(DType::kF32, {c.rows, c.heads}),
        window(Cache(window_pages, c.format, c.window_page, c.channels, c.rotary)),
        entries(Cache(entry_pages, c.format, c.entry_page, c.channels, c.rotary)) {
    // Slot 0 of both caches stays NaN in all its bytes.
    for (int64_t slot = 1; slot < window.num_slots(); ++slot) EncodeRow(window, slot, Key(slot).data());
    for (int64_t slot = 1; slot < entries.num_slots(); ++slot) EncodeRow(entries, slot, Key(1000 + slot).data());
    FillSlots(window_slots, window.num_slots());
    FillSlots(entry_slots, entries.num_slots());
    params = {.q = q.view(),
              .window = window,
              .window_slots = window_slots.view(),
              .sink = sink.weight(),
              .scale = 1.0f / std::sqrt(static_cast<float>(c.channels)),
              .out = out.view(),
              .lse = lse.view()};
    if (c.entry_width > 0) {
      params.entries = entries;
      params.entry_slots = entry_slots.view();
    }
  }

  std::vector<float> Key(int64_t seed) const { return RandomFloats(c.channels, static_cast<uint64_t>(500 + seed)); }

  // A pattern of valid slots with invalid ones anywhere among them.
  void FillSlots(const TestTensor& slots, int64_t num_slots) const {
    const int64_t width = slots.view().extents[1];
    for (int64_t i = 0; i < c.rows; ++i) {
      for (int64_t t = 0; t < width; ++t) {
        const int64_t slot = 1 + (i * 31 + t * 7) % (num_slots - 1);
        const int64_t pattern = (i + t) % 5;
        slots.data<int32_t>()[i * width + t] = static_cast<int32_t>(pattern == 3                 ? -1
                                                                    : pattern == 4 && t % 2 == 1 ? -1000000
                                                                                                 : slot);
      }
    }
  }

  void Run(Stream& stream) const { DSV4_ASSERT_OK(sparse_attention::Record(stream, params)); }

  // The specification, section 7.1, in double; with bf16 q the weights are rounded as the contract says.
  void ComputeExpected(std::vector<float>* expected_out, std::vector<float>* expected_lse) const {
    const std::vector<float> qs = q.ToFloats();
    for (int64_t i = 0; i < c.rows; ++i) {
      std::vector<std::vector<float>> keys;
      const auto gather = [&](const PagedRows& cache, const TensorView& slots, const TensorView& lengths) {
        if (slots.empty()) return;
        for (int64_t t = 0; t < slots.extents[1]; ++t) {
          if (!lengths.empty() && t >= *lengths.At<int32_t>(i)) continue;
          const int64_t slot = *slots.At<int32_t>(i, t);
          if (slot < 0) continue;
          keys.emplace_back(static_cast<size_t>(c.channels));
          DecodeRow(cache, slot, keys.back().data());
        }
      };
      gather(params.window, params.window_slots, params.window_lengths);
      gather(params.entries, params.entry_slots, params.entry_lengths);
      for (int64_t h = 0; h < c.heads; ++h) {
        const float* head = qs.data() + (i * c.heads + h) * c.channels;
        std::vector<double> scores;
        for (const std::vector<float>& key : keys) {
          double score = 0;
          for (size_t k = 0; k < key.size(); ++k) score += static_cast<double>(head[k]) * key[k];
          scores.push_back(score * params.scale);
        }
        double largest = -kInf;
        for (const double score : scores) largest = std::max(largest, score);
        double sum = 0;
        std::vector<double> values(static_cast<size_t>(c.channels), 0.0);
        for (size_t t = 0; t < keys.size(); ++t) {
          const double weight = std::exp(scores[t] - largest);
          sum += weight;
          const double factor = c.q_dtype == DType::kBf16 ? NearestBf16(weight) : weight;
          for (size_t k = 0; k < values.size(); ++k) values[k] += factor * keys[t][k];
        }
        const double divisor = sum + std::exp(static_cast<double>(sink.data<float>()[h]) - largest);
        for (const double value : values) {
          expected_out->push_back(keys.empty() ? 0.0f : static_cast<float>(value / divisor));
        }
        expected_lse->push_back(keys.empty() ? kInf : static_cast<float>(largest + std::log(sum)));
      }
    }
  }

  void ExpectRight() const {
    std::vector<float> expected_out, expected_lse;
    ComputeExpected(&expected_out, &expected_lse);
    const bool bf16 = c.q_dtype == DType::kBf16;
    EXPECT_TRUE(IsClose(out.ToFloats(), expected_out, c.channels, bf16 ? kBf16RowTolerance : kTolerance));
    EXPECT_TRUE(IsClose(out.ToFloats(), expected_out, out.num_elements(), bf16 ? kBf16Tolerance : kTolerance));
    const std::vector<float> actual_lse = lse.ToFloats();
    for (size_t k = 0; k < actual_lse.size(); ++k) {
      if (std::isinf(expected_lse[k])) {
        EXPECT_EQ(actual_lse[k], kInf);
      } else {
        EXPECT_NEAR(actual_lse[k], expected_lse[k], 1e-5) << k;
      }
    }
    out.CheckGuards();
    lse.CheckGuards();
    window_pages.CheckGuards();
    entry_pages.CheckGuards();
  }

  Case c;
  TestTensor q, window_pages, entry_pages, window_slots, entry_slots, sink, out, lse;
  PagedRows window, entries;
  sparse_attention::Params params;
};

constexpr Case kCases[] = {
    {1, 64, 512, 64, 128, 40, 64, 64, RowFormat::kFp8, DType::kBf16},
    {2, 4, 128, 64, 32, 16, 64, 2, RowFormat::kFp8, DType::kF32},
    {3, 5, 128, 64, 33, 0, 7, 1, RowFormat::kFp8, DType::kBf16},
    {31, 1, 66, 2, 1, 3, 3, 2, RowFormat::kFp8, DType::kF32},
    {32, 2, 24, 8, 9, 31, 4, 16, RowFormat::kF32, DType::kF32},
    {33, 3, 10, 4, 5, 2, 2, 2, RowFormat::kBf16, DType::kBf16},
};

TEST_F(SparseAttentionTest, IsOneSoftmaxOverBothListsWithASink) {
  for (const Case& c : kCases) {
    const Attention attention(c);
    attention.Run(stream());
    attention.ExpectRight();
  }
}

TEST_F(SparseAttentionTest, UsesTheLeftmostRowsOnlyWhereLengthsAreGiven) {
  for (const Case& c : kCases) {
    Attention attention(c);
    std::vector<int64_t> window_lengths, entry_lengths;
    for (int64_t i = 0; i < c.rows; ++i) {
      window_lengths.push_back(i % (c.window_width + 1));
      entry_lengths.push_back((i * 3 + 1) % (c.entry_width + 1));
    }
    const TestTensor window = TestTensor::OfInts(DType::kI32, {c.rows}, window_lengths);
    const TestTensor entries = TestTensor::OfInts(DType::kI32, {c.rows}, entry_lengths);
    attention.params.window_lengths = window.view();
    if (c.entry_width > 0) attention.params.entry_lengths = entries.view();
    // What stands past the lengths must not be looked at.
    for (int64_t i = 0; i < c.rows; ++i) {
      for (int64_t t = window_lengths[static_cast<size_t>(i)]; t < c.window_width; ++t) {
        attention.window_slots.data<int32_t>()[i * c.window_width + t] = t % 2 == 0 ? 0 : 1 << 30;
      }
    }
    attention.Run(stream());
    attention.ExpectRight();
  }
}

TEST_F(SparseAttentionTest, RoundsTheOutputOnceToItsType) {
  Attention attention(kCases[2]);
  attention.Run(stream());
  const TestTensor rounded(DType::kBf16, {3, 5, 128}, attention.out.ToFloats());
  const TestTensor out(DType::kBf16, {3, 5, 128});
  attention.params.out = out.view();
  attention.Run(stream());
  EXPECT_TRUE(BitwiseEqual(out.view(), rounded.view()));
}

TEST_F(SparseAttentionTest, GivesZeroAndInfiniteLseToARowWithNothingValid) {
  for (const Case& c : kCases) {
    const Attention attention(c);
    SetInts(attention.window_slots.view(), std::vector<int64_t>(static_cast<size_t>(c.rows * c.window_width), -1));
    SetInts(attention.entry_slots.view(), std::vector<int64_t>(static_cast<size_t>(c.rows * c.entry_width), -7));
    SetFloats(attention.q.view(), std::vector<float>(static_cast<size_t>(attention.q.num_elements()), kNan));
    attention.Run(stream());
    EXPECT_THAT(attention.out.ToFloats(), Each(0.0f));
    EXPECT_THAT(attention.lse.ToFloats(), Each(kInf));
  }
}

TEST_F(SparseAttentionTest, DoesNotReadInvalidRows) {
  // Row 0 of both caches is NaN; the lists hold one valid slot.
  for (const Case& c : kCases) {
    const Attention attention(c);
    std::vector<int64_t> slots(static_cast<size_t>(c.rows * c.window_width), -1);
    for (int64_t i = 0; i < c.rows; ++i) slots[static_cast<size_t>(i * c.window_width)] = 2;
    SetInts(attention.window_slots.view(), slots);
    SetInts(attention.entry_slots.view(), std::vector<int64_t>(static_cast<size_t>(c.rows * c.entry_width), -1));
    attention.Run(stream());
    attention.ExpectRight();
    EXPECT_THAT(attention.out.ToFloats(), Each(testing::Not(testing::IsNan())));
  }
}

TEST_F(SparseAttentionTest, GivesTheSameBitsWhereverInvalidSlotsStand) {
  const Case c = {1, 3, 128, 64, 40, 40, 64, 64, RowFormat::kFp8, DType::kBf16};
  const Attention packed(c), masked_first(c), scattered(c);
  const auto fill = [](const TestTensor& slots, int64_t begin, int64_t step) {
    std::vector<int64_t> values(40, -1);
    for (int64_t t = 0; t < 8; ++t) values[static_cast<size_t>(begin + t * step)] = 3 + 5 * t;
    SetInts(slots.view(), values);
  };
  for (const Attention* attention : {&packed, &masked_first, &scattered}) {
    const int64_t begin = attention == &masked_first ? 16 : attention == &scattered ? 1 : 0;
    const int64_t step = attention == &scattered ? 5 : 1;
    fill(attention->window_slots, begin, step);
    fill(attention->entry_slots, begin, step);
    attention->Run(stream());
    EXPECT_TRUE(BitwiseEqual(attention->out.view(), packed.out.view()));
    EXPECT_TRUE(BitwiseEqual(attention->lse.view(), packed.lse.view()));
  }
  packed.ExpectRight();
}

TEST_F(SparseAttentionTest, TakesInfiniteSinksAndLargeScores) {
  const Case c = {2, 4, 24, 8, 9, 4, 4, 4, RowFormat::kF32, DType::kF32};
  const Attention attention(c);
  SetFloats(attention.sink.view(), {-kInf, kInf, 3e38f, -3e38f});
  attention.Run(stream());
  for (const int64_t row : {0, 1}) {
    EXPECT_THAT(ToFloats(attention.out.view().Index(row).Rows(1, 2)), Each(0.0f));  // +inf, and one that overflows
  }
  attention.ExpectRight();
  // -inf is no sink: the weights add up to 1, so of equal values the output is that value.
  for (int64_t slot = 1; slot < attention.window.num_slots(); ++slot) {
    EncodeRow(attention.window, slot, std::vector<float>(24, 2.5f).data());
  }
  for (int64_t slot = 1; slot < attention.entries.num_slots(); ++slot) {
    EncodeRow(attention.entries, slot, std::vector<float>(24, 2.5f).data());
  }
  attention.Run(stream());
  EXPECT_THAT(ToFloats(attention.out.view().Index(0).FirstRows(1)), Each(testing::FloatNear(2.5f, 1e-5f)));

  // Scores of several hundred: exp would overflow without the maximum.
  Attention large(c);
  large.params.scale = 100.0f;
  large.Run(stream());
  EXPECT_THAT(large.out.ToFloats(), Each(testing::Not(testing::IsNan())));
  std::vector<float> expected_out, expected_lse;
  large.ComputeExpected(&expected_out, &expected_lse);
  // A score of up to 2000 errs by 2^-24 of its terms: 1e-4, and so do weight and output.
  EXPECT_TRUE(IsClose(large.out.ToFloats(), expected_out, 24, 1e-3));
}

TEST_F(SparseAttentionTest, LeavesTheSinkOutOfLse) {
  const Attention attention(kCases[4]);
  attention.Run(stream());
  const std::vector<float> before = attention.lse.ToFloats();
  SetFloats(attention.sink.view(), {50, -50});
  attention.Run(stream());
  EXPECT_EQ(attention.lse.ToFloats(), before);
}

TEST_F(SparseAttentionTest, ReadsPackedPages) {
  // Two tokens in a page of 64, in a page stride above rows times row size.
  const Attention attention({1, 2, 512, 64, 2, 0, 64, 1, RowFormat::kFp8, DType::kF32});
  SetInts(attention.window_slots.view(), {64 + 5, 64 + 6});
  attention.Run(stream());
  attention.ExpectRight();
  // The rows as EncodeRow took them, but for e4m3's rounding: relative 2^-4 a value, about 3 % of the row.
  SetFloats(attention.sink.view(), {-kInf, -kInf});
  for (const int64_t row : {5, 6}) {
    SetInts(attention.window_slots.view(), {64 + row, -1});
    attention.Run(stream());
    const std::vector<float> out = attention.out.ToFloats();
    EXPECT_TRUE(IsClose({out.begin(), out.begin() + 512}, attention.Key(64 + row), 512, 0.04));
  }
}

TEST_F(SparseAttentionTest, GivesARowTheSameBitsInAnyCompany) {
  const Case c = {33, 3, 128, 64, 9, 5, 8, 8, RowFormat::kFp8, DType::kBf16};
  const Attention all(c);
  all.Run(stream());
  const Attention some(c);
  for (int64_t pad = 0; pad < 33; pad += 2) {
    SetFloats(some.q.view().Rows(pad, 1), std::vector<float>(3 * 128, kNan));
    SetInts(some.window_slots.view().Rows(pad, 1), std::vector<int64_t>(9, -1));
    SetInts(some.entry_slots.view().Rows(pad, 1), std::vector<int64_t>(5, -1));
  }
  sparse_attention::Params params = some.params;
  for (TensorView* view : {&params.q, &params.window_slots, &params.entry_slots, &params.out, &params.lse}) {
    *view = view->Rows(4, 20);
  }
  DSV4_ASSERT_OK(sparse_attention::Record(stream(), params));
  for (int64_t i = 4; i < 24; ++i) {
    if (i % 2 == 1) {
      EXPECT_TRUE(BitwiseEqual(some.out.view().Rows(i, 1), all.out.view().Rows(i, 1))) << i;
      EXPECT_TRUE(BitwiseEqual(some.lse.view().Rows(i, 1), all.lse.view().Rows(i, 1))) << i;
    } else {
      EXPECT_THAT(ToFloats(some.out.view().Rows(i, 1)), Each(0.0f)) << i;
      EXPECT_THAT(ToFloats(some.lse.view().Rows(i, 1)), Each(kInf)) << i;
    }
  }
  EXPECT_THAT(ToFloats(some.out.view().Rows(0, 4)), Each(testing::IsNan()));
  EXPECT_THAT(ToFloats(some.out.view().Rows(24, 9)), Each(testing::IsNan()));
}

TEST_F(SparseAttentionTest, DeclaresWhatItTouches) {
  Attention attention({2, 3, 24, 8, 5, 4, 4, 2, RowFormat::kF32, DType::kBf16});
  const TestTensor lengths = TestTensor::OfInts(DType::kI32, {2}, {5, 5});
  attention.params.window_lengths = lengths.view();
  const std::vector<OpRecord> records = Capture([&] { return sparse_attention::Record(stream(), attention.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "sparse_attention");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read q bf16 [2, 3, 24]", "read window " + attention.window_pages.view().ToString(),
                          "read window_slots i32 [2, 5]", "read window_lengths i32 [2]",
                          "read entries " + attention.entry_pages.view().ToString(), "read entry_slots i32 [2, 4]",
                          "before wait sink f32 [3]", "write out f32 [2, 3, 24]", "write lse f32 [2, 3]"));
  // Lists and lengths are read when the record runs.
  SetInts(lengths.view(), {0, 0});
  SetInts(attention.entry_slots.view(), std::vector<int64_t>(8, -1));
  records[0].run();
  EXPECT_THAT(attention.lse.ToFloats(), Each(kInf));
}

TEST_F(SparseAttentionTest, RefusesBadInputByName) {
  const Attention attention({2, 3, 128, 64, 5, 4, 4, 2, RowFormat::kFp8, DType::kF32});
  const TestTensor lengths = TestTensor::OfInts(DType::kI32, {3}, {5, 5, 5});
  const auto refused = [&](const char* message, const auto& change) {
    sparse_attention::Params params = attention.params;
    change(params);
    EXPECT_THAT(sparse_attention::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("q: expected f32 or bf16 [any, any, any]", [](auto& p) { p.q = TensorView(); });
  refused("window: expected u8 [any, any]", [](auto& p) { p.window = PagedRows{.rows_per_page = 1, .row_size = 128}; });
  refused("window (fp8): expected rows_per_page", [](auto& p) { p.window.rows_per_page = -4; });
  refused("window: expected rows of 128 channels, got 64", [](auto& p) {
    p.window.format = RowFormat::kF32;
    p.window.row_size = 64;
    p.window.rows_per_page = 1;
  });
  refused("window_slots: expected i32 [2, any]", [](auto& p) { p.window_slots.dtype = DType::kI64; });
  refused("window_lengths: expected i32 [2]", [&](auto& p) { p.window_lengths = lengths.view(); });
  refused("entries: expected u8 [any, any]", [](auto& p) { p.entries.pages = TensorView(); });
  refused("entries (fp8): expected pages of at least", [](auto& p) { p.entries.rows_per_page = 100; });
  refused("entry_slots: expected i32 [2, any]", [](auto& p) { p.entry_slots = p.entry_slots.FirstRows(1); });
  refused("entry_lengths: expected i32 [2]", [&](auto& p) { p.entry_lengths = lengths.view(); });
  refused("sink: expected f32 [3]", [](auto& p) { p.sink = WeightView(); });
  refused("out: expected f32 or bf16 [2, 3, 128]", [](auto& p) { p.out = p.out.FirstRows(1); });
  refused("lse: expected f32 [2, 3]", [](auto& p) { p.lse = TensorView(); });
  refused("out and q: ", [](auto& p) { p.out = p.q; });
  refused("lse and sink: ", [&](auto& p) {
    p.lse = attention.sink.view().Reshape({1, 3});
    for (TensorView* view : {&p.q, &p.window_slots, &p.entry_slots, &p.out}) *view = view->FirstRows(1);
  });
  EXPECT_THAT(attention.out.Bytes(), Each(0xFF));
  EXPECT_THAT(attention.lse.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
