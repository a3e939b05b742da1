#include "ops/indexer_logits/indexer_logits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class IndexerLogitsTest : public OpTest {};

struct Case {
  int64_t heads, channels, rows_per_page;
};
constexpr Case kCases[] = {{64, 128, 64}, {3, 32, 1}, {16, 128, 4}, {1, 96, 7}};
constexpr RowFormat kFormats[] = {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Key, RowFormat::kMxfp4Key};

// Two requests, whose keys lie in scattered pages; request 1's table is a ring of 2 blocks.
struct Indexer {
  static constexpr int64_t kPages = 9;

  Indexer(const Case& c, RowFormat format, const std::vector<int64_t>& visible, const std::vector<int64_t>& of_request)
      : c(c),
        rows(static_cast<int64_t>(visible.size())),
        width(*std::max_element(visible.begin(), visible.end()) + 3),
        page_bytes(PageStrideBytes(format, c.rows_per_page, c.channels, 0) + 64),
        pages(DType::kU8, {kPages, page_bytes}),
        weights(DType::kF32, {rows, c.heads}, RandomFloats(rows * c.heads, 2)),
        block_table(TestTensor::OfInts(DType::kI32, {2, 2}, {8, 3, 1, 5})),
        requests(TestTensor::OfInts(DType::kI32, {rows}, of_request)),
        counts(TestTensor::OfInts(DType::kI32, {rows}, visible)),
        logits(DType::kF32, {rows, width}) {
    const PagedRows keys = {.pages = pages.view(),
                            .format = format,
                            .rows_per_page = c.rows_per_page,
                            .row_size = c.channels,
                            .rope_size = 0};
    for (const int64_t block : {8, 3, 1, 5}) {
      for (int64_t row = 0; row < c.rows_per_page; ++row) {
        const int64_t slot = block * c.rows_per_page + row;
        EncodeRow(keys, slot, RandomFloats(c.channels, static_cast<uint64_t>(100 + slot)).data());
      }
    }
    params = {.weights = weights.view(),
              .keys = keys,
              .block_table = block_table.view(),
              .requests = requests.view(),
              .counts = counts.view(),
              .logits = logits.view()};
    const int64_t elements = rows * c.heads * c.channels;
    const std::vector<float> random = RandomFloats(elements, 1, 3.0f);
    switch (format) {
      case RowFormat::kMxfp4Key:
        q_values =
            std::make_unique<TestTensor>(DType::kE2m1x2, std::initializer_list<int64_t>{rows, c.heads, c.channels / 2});
        q_scales =
            std::make_unique<TestTensor>(DType::kE8m0, std::initializer_list<int64_t>{rows, c.heads, c.channels / 32});
        for (int64_t k = 0; k < elements; k += 2) {
          const size_t i = static_cast<size_t>(k);
          const uint8_t even = NearestE2m1(random[i]), odd = NearestE2m1(random[i + 1]);
          const uint8_t scale = static_cast<uint8_t>(125 + k / 32 % 5);
          q_values->data<uint8_t>()[k / 2] = static_cast<uint8_t>(even | odd << 4);
          q_scales->data<uint8_t>()[k / 32] = scale;
          exact_q.push_back(std::ldexp(E2m1Value(even), scale - 127));
          exact_q.push_back(std::ldexp(E2m1Value(odd), scale - 127));
        }
        params.q_scales = q_scales->view();
        break;
      case RowFormat::kFp8Key:
        q_values =
            std::make_unique<TestTensor>(DType::kE4m3, std::initializer_list<int64_t>{rows, c.heads, c.channels});
        for (int64_t k = 0; k < elements; ++k) {
          const uint8_t code = NearestE4m3(random[static_cast<size_t>(k)]);
          q_values->data<uint8_t>()[k] = code;
          exact_q.push_back(E4m3Value(code));
        }
        break;
      default:
        q_values = std::make_unique<TestTensor>(format == RowFormat::kF32 ? DType::kF32 : DType::kBf16,
                                                std::initializer_list<int64_t>{rows, c.heads, c.channels});
        q_values->Set(random);
        for (const float value : q_values->ToFloats()) exact_q.push_back(value);
    }
    params.q_values = q_values->view();
  }

  // Where entry j of a request is, spelled out.
  int64_t Slot(int64_t request, int64_t j) const {
    constexpr int64_t kTable[2][2] = {{8, 3}, {1, 5}};
    return kTable[request][j / c.rows_per_page % 2] * c.rows_per_page + j % c.rows_per_page;
  }

  Case c;
  int64_t rows, width, page_bytes;
  TestTensor pages, weights, block_table, requests, counts, logits;
  std::unique_ptr<TestTensor> q_values, q_scales;
  std::vector<double> exact_q;
  indexer_logits::Params params;
};

TEST_F(IndexerLogitsTest, ScoresEveryVisibleEntry) {
  for (const Case& c : kCases) {
    for (const RowFormat format : kFormats) {
      SCOPED_TRACE(RowFormatName(format));
      const int64_t most = 2 * c.rows_per_page;
      const Indexer indexer(c, format, {most, 1, most + 3, std::max<int64_t>(most - 1, 1), 2}, {0, 1, 1, 0, 1});
      DSV4_ASSERT_OK(indexer_logits::Record(stream(), indexer.params));
      for (int64_t i = 0; i < indexer.rows; ++i) {
        const int64_t count = indexer.counts.data<int32_t>()[i];
        const float* logits = indexer.logits.data<float>() + i * indexer.width;
        for (int64_t j = 0; j < count; ++j) {
          std::vector<float> key(static_cast<size_t>(c.channels));
          DecodeRow(indexer.params.keys, indexer.Slot(indexer.requests.data<int32_t>()[i], j), key.data());
          double score = 0;
          double magnitude = 0;
          for (int64_t h = 0; h < c.heads; ++h) {
            double product = 0;
            for (int64_t k = 0; k < c.channels; ++k) {
              const double term = indexer.exact_q[static_cast<size_t>((i * c.heads + h) * c.channels + k)] *
                                  key[static_cast<size_t>(k)];
              product += term;
              magnitude += std::abs(indexer.weights.data<float>()[i * c.heads + h] * term);
            }
            score += indexer.weights.data<float>()[i * c.heads + h] * std::max(product, 0.0);
          }
          // Each product, and each of the sums' chains of at most 32 + 64 additions, errs by at most 2^-24 of the
          // terms' magnitudes; a tenth of that worst case is still far above what rounding does, and far below one
          // term.
          EXPECT_NEAR(logits[j], score, 10 * 0x1p-24 * magnitude) << "row " << i << ", entry " << j;
        }
        for (int64_t j = count; j < indexer.width; ++j) EXPECT_THAT(logits[j], testing::IsNan());
      }
      indexer.logits.CheckGuards();
      indexer.pages.CheckGuards();
    }
  }
}

TEST_F(IndexerLogitsTest, CountsNoNegativeProducts) {
  // q and k of 1 and -1: products of 32 and -32, weights of both signs.
  const Indexer indexer({4, 32, 2}, RowFormat::kF32, {2}, {0});
  for (int64_t k = 0; k < 4 * 32; ++k) indexer.q_values->data<float>()[k] = k / 32 % 2 == 0 ? 1.0f : -1.0f;
  EncodeRow(indexer.params.keys, indexer.Slot(0, 0), std::vector<float>(32, 1.0f).data());
  EncodeRow(indexer.params.keys, indexer.Slot(0, 1), std::vector<float>(32, -2.0f).data());
  indexer.weights.data<float>()[0] = 3;
  indexer.weights.data<float>()[1] = 5;
  indexer.weights.data<float>()[2] = -4;
  indexer.weights.data<float>()[3] = -7;
  DSV4_ASSERT_OK(indexer_logits::Record(stream(), indexer.params));
  EXPECT_EQ(indexer.logits.data<float>()[0], (3 - 4) * 32);
  EXPECT_EQ(indexer.logits.data<float>()[1], (5 - 7) * 64);
}

TEST_F(IndexerLogitsTest, ReadsNothingForARowThatSeesNothing) {
  for (const RowFormat format : kFormats) {
    const Indexer indexer({3, 32, 4}, format, {0, 4, -1}, {1 << 30, 0, -7});
    const Indexer alone({3, 32, 4}, format, {4, 4}, {0, 0});
    DSV4_ASSERT_OK(indexer_logits::Record(stream(), indexer.params));
    EXPECT_THAT(ToFloats(indexer.logits.view().Rows(0, 1)), Each(testing::IsNan()));
    EXPECT_THAT(ToFloats(indexer.logits.view().Rows(2, 1)), Each(testing::IsNan()));
    DSV4_ASSERT_OK(indexer_logits::Record(stream(), alone.params));
    // The row between them: as in other company.
    EXPECT_TRUE(
        BitwiseEqual(indexer.logits.view().Rows(1, 1).Columns(0, 4), alone.logits.view().Rows(1, 1).Columns(0, 4)));
    indexer.logits.CheckGuards();
  }
}

TEST_F(IndexerLogitsTest, IgnoresEntriesPastTheCount) {
  for (const RowFormat format : kFormats) {
    Indexer indexer({3, 32, 4}, format, {5}, {0});
    DSV4_ASSERT_OK(indexer_logits::Record(stream(), indexer.params));
    const std::vector<float> before = indexer.logits.ToFloats();
    std::vector<std::vector<float>> visible;
    for (int64_t j = 0; j < 5; ++j) {
      visible.emplace_back(32);
      DecodeRow(indexer.params.keys, indexer.Slot(0, j), visible.back().data());
    }
    // All other bytes are NaN patterns.
    indexer.pages.Poison();
    for (int64_t j = 0; j < 5; ++j)
      EncodeRow(indexer.params.keys, indexer.Slot(0, j), visible[static_cast<size_t>(j)].data());
    DSV4_ASSERT_OK(indexer_logits::Record(stream(), indexer.params));
    const std::vector<float> after = indexer.logits.ToFloats();
    for (size_t j = 0; j < 5; ++j) EXPECT_EQ(after[j], before[j]);
    for (size_t j = 5; j < after.size(); ++j) EXPECT_THAT(after[j], testing::IsNan());
  }
}

TEST_F(IndexerLogitsTest, DeclaresWhatItTouches) {
  const Indexer indexer({3, 32, 4}, RowFormat::kMxfp4Key, {1, 2}, {0, 1});
  const std::vector<OpRecord> records = Capture([&] { return indexer_logits::Record(stream(), indexer.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "indexer_logits");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read q_values e2m1x2 [2, 3, 16]", "read q_scales e8m0 [2, 3, 1]", "read weights f32 [2, 3]",
                          "read keys " + indexer.pages.view().ToString(), "read block_table i32 [2, 2]",
                          "read requests i32 [2]", "read counts i32 [2]", "write logits f32 [2, 5]"));
  // Counts and tables are read when the record runs: a replay at another length.
  indexer.counts.data<int32_t>()[0] = 5;
  indexer.counts.data<int32_t>()[1] = 0;
  records[0].run();
  EXPECT_THAT(ToFloats(indexer.logits.view().Rows(0, 1)), Each(testing::Not(testing::IsNan())));
  EXPECT_THAT(ToFloats(indexer.logits.view().Rows(1, 1)), Each(testing::IsNan()));
}

TEST_F(IndexerLogitsTest, RefusesBadInputByName) {
  const Indexer fp8({3, 32, 4}, RowFormat::kFp8Key, {1, 2}, {0, 1});
  const Indexer fp4({3, 32, 4}, RowFormat::kMxfp4Key, {1, 2}, {0, 1});
  const auto refused = [&](indexer_logits::Params params, const char* message, const auto& change) {
    change(params);
    EXPECT_THAT(indexer_logits::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused(fp8.params, "keys (fp8_key): expected rows_per_page", [](auto& p) { p.keys.rows_per_page = 0; });
  refused(fp8.params, "keys: expected u8 [any, any]", [](auto& p) { p.keys.pages = TensorView(); });
  refused(fp8.params, "keys: expected a format of indexer keys, got fp8", [](auto& p) {
    p.keys.format = RowFormat::kFp8;
    p.keys.row_size = 64;
  });
  refused(fp8.params, "q_values: expected e4m3 [any, any, 32]", [&](auto& p) { p.q_values = fp4.params.q_values; });
  refused(fp4.params, "q_values: expected e2m1x2 [any, any, 16]", [&](auto& p) { p.q_values = fp8.params.q_values; });
  refused(fp4.params, "q_scales: expected e8m0 [2, 3, 1]", [](auto& p) { p.q_scales = TensorView(); });
  refused(fp8.params, "weights: expected f32 [2, 3]", [](auto& p) { p.weights = p.weights.Columns(0, 2); });
  refused(fp8.params, "block_table: expected i32 [any, any]", [](auto& p) { p.block_table.dtype = DType::kI64; });
  refused(fp8.params, "blocks of block_table: expected at least 1, got 0",
          [](auto& p) { p.block_table.extents[1] = 0; });
  refused(fp8.params, "requests: expected i32 [2]", [](auto& p) { p.requests = TensorView(); });
  refused(fp8.params, "counts: expected i32 [2]", [](auto& p) { p.counts = p.counts.FirstRows(1); });
  refused(fp8.params, "logits: expected f32 [2, any]", [](auto& p) { p.logits.dtype = DType::kBf16; });
  refused(fp8.params, "logits and weights: ", [&](auto& p) { p.logits = fp8.weights.view().Columns(1, 2); });
  EXPECT_THAT(fp8.logits.Bytes(), Each(0xFF));
  EXPECT_THAT(fp4.logits.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
