#include "ops/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
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
// and of weighted values of up to 640 rows by as much again.
constexpr double kTolerance = 5e-6;
// With bf16 q the expected weights are rounded too: those within that error of a midpoint, one in 1000, go the other
// way, by 2^-8. That is 1.2e-4 of all outputs; of one row it may be 2^-8. Rounding no weight costs 1e-3 of all outputs.
constexpr double kBf16Tolerance = 2.5e-4;
constexpr double kBf16RowTolerance = 0x1p-8;
// Tensor cores cut off where others round, in every addition: four times the error of a score, so four times the weights
// that go the other way, and twice the difference.
constexpr double kTensorCores = 2;

struct Case {
  int64_t rows, heads, channels, rotary;
  int64_t window_width, entry_width;  // 0: no list of entries
  int64_t window_page, entry_page;    // rows a page
  RowFormat format;
  DType q_dtype;
  int64_t splits = 0;  // 0: no scratch
};

std::string Name(const Case& c) {
  return std::to_string(c.rows) + " rows of " + std::to_string(c.heads) + " heads of " + std::to_string(c.channels) + " " +
         DTypeName(c.q_dtype).data() + ", " + std::to_string(c.window_width) + " + " + std::to_string(c.entry_width) +
         " rows in " + RowFormatName(c.format).data() + ", " + std::to_string(c.splits) + " splits";
}

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
    if (c.splits > 0) {
      split_out = std::make_unique<TestTensor>(
          DType::kF32, std::initializer_list<int64_t>{c.rows, c.splits, c.heads, c.channels});
      split_sums =
          std::make_unique<TestTensor>(DType::kF32, std::initializer_list<int64_t>{c.rows, c.splits, c.heads, 2});
      params.split_out = split_out->view();
      params.split_sums = split_sums->view();
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
        // A power of two, so that weights are rounded to 8 bits.
        largest = std::ceil(largest / std::log(2.0)) * std::log(2.0);
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

  Case c;
  TestTensor q, window_pages, entry_pages, window_slots, entry_slots, sink, out, lse;
  std::unique_ptr<TestTensor> split_out, split_sums;
  PagedRows window, entries;
  sparse_attention::Params params;
};

class SparseAttentionTest : public OpTest {
 protected:
  void ExpectRight(const Attention& attention) {
    SCOPED_TRACE(Name(attention.c));
    std::vector<float> expected_out, expected_lse;
    attention.ComputeExpected(&expected_out, &expected_lse);
    const bool bf16 = attention.c.q_dtype == DType::kBf16;
    const double slack = bf16 && !on_cpu() ? kTensorCores : 1;
    const std::vector<float> out = attention.out.ToFloats();
    const int64_t channels = attention.c.channels;
    EXPECT_TRUE(IsClose(out, expected_out, channels, slack * (bf16 ? kBf16RowTolerance : kTolerance)));
    EXPECT_TRUE(IsClose(out, expected_out, attention.out.num_elements(), slack * (bf16 ? kBf16Tolerance : kTolerance)));
    const std::vector<float> lse = attention.lse.ToFloats();
    // Sums of weights err with their number of terms.
    const double lse_tolerance =
        1e-5 * std::max(1.0, static_cast<double>(attention.c.window_width + attention.c.entry_width) / 640);
    for (size_t k = 0; k < lse.size(); ++k) {
      if (std::isinf(expected_lse[k])) {
        EXPECT_EQ(lse[k], kInf) << "head " << k;
      } else {
        EXPECT_NEAR(lse[k], expected_lse[k], lse_tolerance) << "head " << k;
      }
    }
    for (const TestTensor* tensor :
         {&attention.out, &attention.lse, &attention.window_pages, &attention.entry_pages}) {
      tensor->CheckGuards();
    }
    if (attention.split_out != nullptr) attention.split_out->CheckGuards();
    if (attention.split_sums != nullptr) attention.split_sums->CheckGuards();
  }
};

constexpr Case kCases[] = {
    {1, 64, 512, 64, 128, 40, 64, 64, RowFormat::kFp8, DType::kBf16},
    {2, 4, 128, 64, 32, 16, 64, 2, RowFormat::kFp8, DType::kF32},
    {3, 5, 128, 64, 33, 0, 7, 1, RowFormat::kFp8, DType::kBf16},
    {31, 1, 66, 2, 1, 3, 3, 2, RowFormat::kFp8, DType::kF32},
    {32, 2, 24, 8, 9, 31, 4, 16, RowFormat::kF32, DType::kF32},
    {33, 3, 10, 4, 5, 2, 2, 2, RowFormat::kBf16, DType::kBf16},
    {2, 64, 512, 64, 128, 512, 64, 64, RowFormat::kFp8, DType::kBf16, 5},
    {2, 67, 512, 64, 128, 70, 64, 2, RowFormat::kFp8, DType::kBf16, 2},
    {3, 5, 512, 64, 33, 100, 7, 3, RowFormat::kBf16, DType::kBf16, 3},
    {2, 3, 128, 64, 128, 300, 64, 64, RowFormat::kFp8, DType::kF32, 2},
    {2, 9, 192, 64, 65, 0, 8, 1, RowFormat::kF32, DType::kBf16, 1},
};

TEST_F(SparseAttentionTest, IsOneSoftmaxOverBothListsWithASink) {
  for (const Case& c : kCases) {
    const Attention attention(c);
    attention.Run(stream());
    ExpectRight(attention);
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
    ExpectRight(attention);
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
    ExpectRight(attention);
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
  ExpectRight(packed);
}

// What the published sizes' kernels take: bf16 q of 512 channels, and several splits.
constexpr Case kPublished[] = {
    {1, 64, 512, 64, 128, 512, 64, 64, RowFormat::kFp8, DType::kBf16, 5},
    {1, 64, 512, 64, 128, 512, 64, 64, RowFormat::kBf16, DType::kBf16, 5},
};

TEST_F(SparseAttentionTest, GivesTheSameResultInAnyNumberOfSplits) {
  for (Case c : kPublished) {
    for (const int64_t splits : {0, 1, 2, 3, 4, 5, 10, 17}) {
      c.splits = splits;
      const Attention attention(c);
      attention.Run(stream());
      ExpectRight(attention);
    }
  }
}

TEST_F(SparseAttentionTest, AddsUpSplitsOfWhichSomeHoldNothingValid) {
  for (const Case& c : kPublished) {
    // Five splits are of 128 listed rows. Only what `is_valid` says is valid.
    const auto fill = [&](const Attention& attention, const auto& is_valid) {
      for (const TestTensor* slots : {&attention.window_slots, &attention.entry_slots}) {
        const bool is_window = slots == &attention.window_slots;
        for (int64_t t = 0; t < slots->num_elements(); ++t) {
          const int64_t listed = is_window ? t : 128 + t;
          slots->data<int32_t>()[t] = is_valid(listed) ? static_cast<int32_t>(1 + listed % 300) : -1;
        }
      }
    };
    const Attention attention(c);
    fill(attention, [](int64_t listed) { return listed / 128 == 1 || listed / 128 == 4; });
    attention.Run(stream());
    ExpectRight(attention);
    fill(attention, [](int64_t listed) { return listed == 639; });
    attention.Run(stream());
    ExpectRight(attention);
    fill(attention, [](int64_t) { return false; });
    attention.Run(stream());
    ExpectRight(attention);
  }
}

TEST_F(SparseAttentionTest, LeavesTheScratchOfARowThatFitsOneSplit) {
  for (const Case& c : kPublished) {
    Attention attention(c);
    const TestTensor window = TestTensor::OfInts(DType::kI32, {1}, {50});
    const TestTensor entries = TestTensor::OfInts(DType::kI32, {1}, {14});
    attention.params.window_lengths = window.view();
    attention.params.entry_lengths = entries.view();
    attention.Run(stream());
    ExpectRight(attention);
    EXPECT_THAT(attention.split_out->Bytes(), Each(0xFF));
    EXPECT_THAT(attention.split_sums->Bytes(), Each(0xFF));
    const std::vector<float> alone = attention.out.ToFloats();
    attention.params.split_out = attention.params.split_sums = TensorView();
    attention.Run(stream());
    EXPECT_EQ(attention.out.ToFloats(), alone);
  }
}

TEST_F(SparseAttentionTest, TakesListsOfThousands) {
  // As of a layer of ratio 128 at a long context: 32 splits of 3 tiles and a rest.
  const Case c = {1, 2, 512, 64, 128, 5000, 64, 2, RowFormat::kFp8, DType::kBf16, 32};
  Attention attention(c);
  const TestTensor lengths = TestTensor::OfInts(DType::kI32, {1}, {4999});
  attention.params.entry_lengths = lengths.view();
  attention.Run(stream());
  ExpectRight(attention);
}

TEST_F(SparseAttentionTest, RepeatsItsBits) {
  for (const Case& c : kCases) {
    const Attention attention(c);
    attention.Run(stream());
    const std::vector<uint8_t> out = attention.out.Bytes(), lse = attention.lse.Bytes();
    attention.Run(stream());
    EXPECT_EQ(attention.out.Bytes(), out);
    EXPECT_EQ(attention.lse.Bytes(), lse);
  }
}

TEST_F(SparseAttentionTest, KeepsTheLargestAndSmallestRowValues) {
  // Scales at both ends of what encoders write, and every e4m3 code of a number, through one valid row with no sink.
  for (const int64_t heads : {1, 64}) {
    const Attention attention({1, heads, 512, 64, 4, 0, 4, 1, RowFormat::kFp8, DType::kBf16});
    SetFloats(attention.sink.view(), std::vector<float>(static_cast<size_t>(heads), -kInf));
    SetFloats(attention.q.view(), std::vector<float>(static_cast<size_t>(heads * 512), 0.0f));
    SetInts(attention.window_slots.view(), {2, -1, -1, -1});
    uint8_t* const page = attention.window_pages.data<uint8_t>();
    uint8_t* const codes = page + 2 * 576;
    uint8_t* const scales = page + 4 * 576 + 2 * 8;
    for (const int first_scale : {105, 126, 133, 134, 135, 150, 240}) {
      for (int channel = 0; channel < 448; ++channel) {
        const int code = channel % 256;
        codes[channel] = static_cast<uint8_t>(code % 128 == 127 ? 0 : code);
      }
      for (int group = 0; group < 7; ++group) scales[group] = static_cast<uint8_t>(first_scale + (group < 4 ? group % 2 : 0));
      attention.Run(stream());
      const std::vector<float> out = attention.out.ToFloats();
      for (int64_t h = 0; h < heads; ++h) {
        for (int channel = 0; channel < 448; ++channel) {
          const double expected = std::ldexp(E4m3Value(codes[channel]), scales[channel / 64] - 127);
          ASSERT_EQ(out[static_cast<size_t>(h * 512 + channel)], static_cast<float>(expected))
              << "head " << h << ", channel " << channel << ", scale byte " << int{scales[channel / 64]};
        }
      }
    }
  }
}

TEST_F(SparseAttentionTest, TakesInfiniteSinksAndLargeScores) {
  const Case c = {2, 4, 24, 8, 9, 4, 4, 4, RowFormat::kF32, DType::kF32};
  const Attention attention(c);
  SetFloats(attention.sink.view(), {-kInf, kInf, 3e38f, -3e38f});
  attention.Run(stream());
  for (const int64_t row : {0, 1}) {
    EXPECT_THAT(ToFloats(attention.out.view().Index(row).Rows(1, 2)), Each(0.0f));  // +inf, and one that overflows
  }
  ExpectRight(attention);
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
  ExpectRight(attention);
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

TEST_F(SparseAttentionTest, GivesAPublishedRowTheSameBitsInAnyCompany) {
  for (Case c : kPublished) {
    c.rows = 3;
    const Attention all(c), alone(c);
    all.Run(stream());
    sparse_attention::Params params = alone.params;
    for (TensorView* view : {&params.q, &params.window_slots, &params.entry_slots, &params.out, &params.lse,
                             &params.split_out, &params.split_sums}) {
      *view = view->Rows(1, 1);
    }
    DSV4_ASSERT_OK(sparse_attention::Record(stream(), params));
    EXPECT_TRUE(BitwiseEqual(alone.out.view().Rows(1, 1), all.out.view().Rows(1, 1)));
    EXPECT_TRUE(BitwiseEqual(alone.lse.view().Rows(1, 1), all.lse.view().Rows(1, 1)));
    EXPECT_THAT(ToFloats(alone.out.view().Rows(0, 1)), Each(testing::IsNan()));
    EXPECT_THAT(ToFloats(alone.out.view().Rows(2, 1)), Each(testing::IsNan()));
  }
}

TEST_F(SparseAttentionTest, FollowsTheStridesOfItsViews) {
  // q, out, lse and scratch are parts of larger tensors.
  for (const Case& c : {kPublished[0], Case{2, 3, 128, 64, 128, 300, 64, 64, RowFormat::kFp8, DType::kF32, 2}}) {
    const Attention plain(c);
    plain.Run(stream());
    Attention strided(c);
    const TestTensor q(c.q_dtype, {c.rows, c.heads + 3, c.channels + 8}), out(DType::kF32, {c.rows, c.heads + 1, c.channels + 2});
    const TestTensor lse(DType::kF32, {c.rows, c.heads + 5});
    const TestTensor split_out(DType::kF32, {c.rows, c.splits + 1, c.heads, c.channels});
    const TestTensor split_sums(DType::kF32, {c.rows, c.splits + 1, c.heads, 2});
    const auto part = [](const TestTensor& tensor, const TensorView& of) {
      TensorView view = tensor.view();
      for (int i = 0; i < view.rank; ++i) view.extents[i] = of.extents[i];
      return view;
    };
    strided.params.q = part(q, plain.params.q);
    SetFloats(strided.params.q, plain.q.ToFloats());
    strided.params.out = part(out, plain.params.out);
    strided.params.lse = part(lse, plain.params.lse);
    strided.params.split_out = part(split_out, plain.params.split_out);
    strided.params.split_sums = part(split_sums, plain.params.split_sums);
    strided.Run(stream());
    EXPECT_EQ(ToFloats(strided.params.out), plain.out.ToFloats());
    EXPECT_EQ(ToFloats(strided.params.lse), plain.lse.ToFloats());
    int64_t written = 0;
    for (const float value : out.ToFloats()) written += std::isnan(value) ? 0 : 1;
    EXPECT_EQ(written, plain.out.num_elements());
    out.CheckGuards();
    lse.CheckGuards();
    split_out.CheckGuards();
    split_sums.CheckGuards();
  }
}

TEST_F(SparseAttentionTest, DeclaresWhatItTouches) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  Attention attention({2, 3, 24, 8, 5, 4, 4, 2, RowFormat::kF32, DType::kBf16, 2});
  const TestTensor lengths = TestTensor::OfInts(DType::kI32, {2}, {5, 5});
  attention.params.window_lengths = lengths.view();
  const std::vector<OpRecord> records = Capture([&] { return sparse_attention::Record(stream(), attention.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "sparse_attention");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read q bf16 [2, 3, 24]", "read window " + attention.window_pages.view().ToString(),
                          "read window_slots i32 [2, 5]", "read window_lengths i32 [2]",
                          "read entries " + attention.entry_pages.view().ToString(), "read entry_slots i32 [2, 4]",
                          "before wait sink f32 [3]", "write out f32 [2, 3, 24]", "write lse f32 [2, 3]",
                          "write split_out f32 [2, 2, 3, 24]", "write split_sums f32 [2, 2, 3, 2]"));
  // Lists and lengths are read when the record runs.
  SetInts(lengths.view(), {0, 0});
  SetInts(attention.entry_slots.view(), std::vector<int64_t>(8, -1));
  records[0].run();
  EXPECT_THAT(attention.lse.ToFloats(), Each(kInf));
}

TEST_F(SparseAttentionTest, RefusesBadInputByName) {
  const Attention attention({2, 3, 128, 64, 5, 4, 4, 2, RowFormat::kFp8, DType::kF32, 2});
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
  refused("split_out: expected f32 [2, any, 3, 128]", [](auto& p) { p.split_out = TensorView(); });
  refused("split_out: expected f32 [2, any, 3, 128]", [](auto& p) { p.split_out = p.split_out.FirstRows(1); });
  refused("split_sums: expected f32 [2, 2, 3, 2]", [](auto& p) { p.split_sums = TensorView(); });
  refused("split_sums: expected f32 [2, 1, 3, 2]", [](auto& p) { p.split_out.extents[1] = 1; });
  refused("splits of split_out: expected at least 1, got 0", [](auto& p) { p.split_out.extents[1] = 0; });
  refused("out and q: ", [](auto& p) { p.out = p.q; });
  refused("lse and split_out: ", [](auto& p) { p.lse = p.split_out.Index(0).Index(0).Columns(0, 3).FirstRows(2); });
  refused("lse and sink: ", [&](auto& p) {
    p.lse = attention.sink.view().Reshape({1, 3});
    p.split_out = p.split_sums = TensorView();
    for (TensorView* view : {&p.q, &p.window_slots, &p.entry_slots, &p.out}) *view = view->FirstRows(1);
  });
  EXPECT_THAT(attention.out.Bytes(), Each(0xFF));
  EXPECT_THAT(attention.lse.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
