#include "ops/indexer_query/indexer_query.h"

#include <algorithm>
#include <bit>
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

// A rotation is two products and a sum, each within 2^-24, a Hadamard rotation of 128 channels 7 more additions.
constexpr double kF32Tolerance = 1e-6;
// The expected values round to bf16 at the same places, but one in 2^-9 / 2^-22 / 2, or 4000, falls the other way, by
// 2^-8: sqrt(1 / 4000) * 2^-8 = 6e-5. Leaving out the rounding between the rotations costs 1e-3.
constexpr double kBf16Tolerance = 2e-4;

class IndexerQueryTest : public OpTest {};

struct Case {
  int64_t rows, heads, channels, rotary;
  bool hadamard;
};

struct Query {
  explicit Query(const Case& c, DType dtype, RowFormat format)
      : q(dtype, {c.rows, c.heads, c.channels}, RandomFloats(c.rows * c.heads * c.channels, 1, 2.0f)),
        weights(DType::kF32, {c.rows, c.heads}, RandomFloats(c.rows * c.heads, 2)),
        positions(DType::kI64, {c.rows}),
        cos_sin(RandomRotations(50, c.rotary, 3)),
        out_weights(DType::kF32, {c.rows, c.heads}) {
    for (int64_t i = 0; i < c.rows; ++i) positions.data<int64_t>()[i] = (i * 17 + 3) % 50;
    params = {.q = q.view(),
              .weights = weights.view(),
              .positions = positions.view(),
              .cos_sin = cos_sin.weight(),
              .hadamard = c.hadamard,
              .format = format,
              .out_weights = out_weights.view()};
    switch (format) {
      case RowFormat::kFp8Key:
        out_values.emplace(DType::kE4m3, std::initializer_list<int64_t>{c.rows, c.heads, c.channels});
        break;
      case RowFormat::kMxfp4Key:
        out_values.emplace(DType::kE2m1x2, std::initializer_list<int64_t>{c.rows, c.heads, c.channels / 2});
        out_scales.emplace(DType::kE8m0, std::initializer_list<int64_t>{c.rows, c.heads, c.channels / 32});
        params.out_scales = out_scales->view();
        break;
      default:
        out_values.emplace(dtype, std::initializer_list<int64_t>{c.rows, c.heads, c.channels});
    }
    params.out_values = out_values->view();
  }

  void CheckGuards() const {
    for (const TestTensor* tensor : {&q, &*out_values, &out_weights}) tensor->CheckGuards();
    if (out_scales) out_scales->CheckGuards();
  }

  TestTensor q, weights, positions, cos_sin, out_weights;
  std::optional<TestTensor> out_values, out_scales;
  indexer_query::Params params;
};

constexpr Case kCases[] = {{1, 64, 128, 64, true}, {2, 16, 128, 64, false}, {3, 5, 32, 8, true},
                           {33, 2, 96, 32, false}, {31, 1, 64, 64, true},   {32, 3, 128, 0, true}};

// The rotated query, in double, rounded to q's type where the contract rounds.
std::vector<float> ExpectedRotated(const Case& c, const Query& query, DType dtype) {
  const std::vector<float> q = query.q.ToFloats();
  const auto round = [&](double value) { return dtype == DType::kBf16 ? NearestBf16(value) : value; };
  std::vector<float> expected;
  for (int64_t i = 0; i < c.rows; ++i) {
    const float* table = query.cos_sin.data<float>() + query.positions.data<int64_t>()[i] * c.rotary;
    for (int64_t h = 0; h < c.heads; ++h) {
      const auto begin = q.begin() + (i * c.heads + h) * c.channels;
      std::vector<double> row(begin, begin + c.channels);
      for (int64_t pair = 0; pair < c.rotary / 2; ++pair) {
        const size_t k = static_cast<size_t>(c.channels - c.rotary + 2 * pair);
        const double a = row[k], b = row[k + 1];
        const double cosine = table[pair], sine = table[c.rotary / 2 + pair];
        row[k] = round(a * cosine - b * sine);
        row[k + 1] = round(a * sine + b * cosine);
      }
      if (c.hadamard) {
        std::vector<double> mixed(row.size(), 0.0);
        for (size_t a = 0; a < row.size(); ++a) {
          for (size_t b = 0; b < row.size(); ++b) mixed[a] += std::popcount(a & b) % 2 == 0 ? row[b] : -row[b];
        }
        for (size_t a = 0; a < row.size(); ++a) {
          row[a] = round(mixed[a] / std::sqrt(static_cast<double>(c.channels)));
        }
      }
      for (const double value : row) expected.push_back(static_cast<float>(value));
    }
  }
  return expected;
}

TEST_F(IndexerQueryTest, RotatesAndScalesTheWeights) {
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const Query query(c, dtype, dtype == DType::kF32 ? RowFormat::kF32 : RowFormat::kBf16);
      const std::vector<uint8_t> before = query.q.Bytes();
      DSV4_ASSERT_OK(indexer_query::Record(stream(), query.params));
      EXPECT_TRUE(IsClose(query.out_values->ToFloats(), ExpectedRotated(c, query, dtype), c.channels,
                          dtype == DType::kF32 ? kF32Tolerance : kBf16Tolerance));
      std::vector<float> expected_weights = query.weights.ToFloats();
      for (float& weight : expected_weights) {
        weight = static_cast<float>(weight / std::sqrt(static_cast<double>(c.channels)) /
                                    std::sqrt(static_cast<double>(c.heads)));
      }
      EXPECT_TRUE(IsClose(query.out_weights.ToFloats(), expected_weights, c.heads, kF32Tolerance));
      EXPECT_EQ(query.q.Bytes(), before);
      query.CheckGuards();
    }
  }
}

TEST_F(IndexerQueryTest, LeavesTheFirstChannelsWhereThereIsNoHadamard) {
  const Case c = {4, 3, 48, 16, false};
  const Query query(c, DType::kBf16, RowFormat::kBf16);
  DSV4_ASSERT_OK(indexer_query::Record(stream(), query.params));
  const std::vector<float> q = query.q.ToFloats(), out = query.out_values->ToFloats();
  for (size_t flat = 0; flat < q.size(); ++flat) {
    if (flat % 48 < 32) {
      ASSERT_EQ(out[flat], q[flat]) << flat;
    }
  }
}

// The quantised forms of what the unquantised format gives, which the tests above check.
TEST_F(IndexerQueryTest, QuantizesToFp8AndFoldsTheScaleIntoTheWeights) {
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const Query exact(c, dtype, RowFormat::kBf16);
      const Query query(c, dtype, RowFormat::kFp8Key);
      for (const Query* q : {&exact, &query}) {
        // A head of zeros, and one whose largest magnitude is below the floor.
        SetFloats(q->q.view().Rows(0, 1).Index(0).FirstRows(1), std::vector<float>(static_cast<size_t>(c.channels)));
        if (c.heads > 1) {
          SetFloats(q->q.view().Index(0).Rows(1, 1), std::vector<float>(static_cast<size_t>(c.channels), 1e-7f));
        }
        DSV4_ASSERT_OK(indexer_query::Record(stream(), q->params));
      }
      const std::vector<float> values = exact.out_values->ToFloats();
      const std::vector<float> weights = exact.out_weights.ToFloats();
      for (int64_t head = 0; head < c.rows * c.heads; ++head) {
        const float* row = values.data() + head * c.channels;
        double largest = 0;
        for (int64_t k = 0; k < c.channels; ++k) largest = std::max<double>(largest, std::abs(row[k]));
        const int exponent = ScaleExponent(largest, 1e-4, 448);
        for (int64_t k = 0; k < c.channels; ++k) {
          ASSERT_EQ(query.out_values->data<uint8_t>()[head * c.channels + k],
                    NearestE4m3(std::ldexp(row[k], -exponent)))
              << "head " << head << ", channel " << k;
        }
        EXPECT_EQ(query.out_weights.data<float>()[head], std::ldexp(weights[static_cast<size_t>(head)], exponent));
      }
      query.CheckGuards();
    }
  }
}

TEST_F(IndexerQueryTest, QuantizesToMxfp4WithAScalePer32Channels) {
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const Query exact(c, dtype, RowFormat::kBf16);
      const Query query(c, dtype, RowFormat::kMxfp4Key);
      for (const Query* q : {&exact, &query}) {
        SetFloats(q->q.view().Index(0).FirstRows(1), std::vector<float>(static_cast<size_t>(c.channels)));
        DSV4_ASSERT_OK(indexer_query::Record(stream(), q->params));
      }
      const std::vector<float> values = exact.out_values->ToFloats();
      for (int64_t block = 0; block < c.rows * c.heads * c.channels / 32; ++block) {
        const float* row = values.data() + block * 32;
        double largest = 0;
        for (int64_t k = 0; k < 32; ++k) largest = std::max<double>(largest, std::abs(row[k]));
        const int exponent = ScaleExponent(largest, 6 * 0x1p-126, 6);
        ASSERT_EQ(query.out_scales->data<uint8_t>()[block], exponent + 127) << "block " << block;
        for (int64_t k = 0; k < 32; k += 2) {
          const int pair = NearestE2m1(std::ldexp(row[k], -exponent)) | NearestE2m1(std::ldexp(row[k + 1], -exponent))
                                                                            << 4;
          ASSERT_EQ(query.out_values->data<uint8_t>()[block * 16 + k / 2], pair) << "block " << block << " at " << k;
        }
      }
      // The scales are not in the weights.
      EXPECT_EQ(query.out_weights.ToFloats(), exact.out_weights.ToFloats());
      query.CheckGuards();
    }
  }
}

TEST_F(IndexerQueryTest, GivesARowTheSameBitsInAnyCompany) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kFp8Key, RowFormat::kMxfp4Key}) {
    const Case c = {33, 3, 64, 32, true};
    const Query all(c, DType::kBf16, format);
    DSV4_ASSERT_OK(indexer_query::Record(stream(), all.params));
    const Query some(c, DType::kBf16, format);
    for (int64_t pad = 0; pad < 33; pad += 2) {
      SetFloats(some.q.view().Rows(pad, 1), std::vector<float>(3 * 64, std::numeric_limits<float>::quiet_NaN()));
      some.positions.data<int64_t>()[pad] = 0;
    }
    indexer_query::Params params = some.params;
    for (TensorView* view : {&params.q, &params.weights, &params.positions, &params.out_values, &params.out_weights}) {
      *view = view->Rows(4, 20);
    }
    if (format == RowFormat::kMxfp4Key) params.out_scales = params.out_scales.Rows(4, 20);
    DSV4_ASSERT_OK(indexer_query::Record(stream(), params));
    for (int64_t i = 5; i < 24; i += 2) {
      EXPECT_TRUE(BitwiseEqual(some.out_values->view().Rows(i, 1), all.out_values->view().Rows(i, 1)));
      EXPECT_TRUE(BitwiseEqual(some.out_weights.view().Rows(i, 1), all.out_weights.view().Rows(i, 1)));
    }
    EXPECT_THAT(ToFloats(some.out_weights.view().Rows(0, 4)), Each(testing::IsNan()));
    EXPECT_THAT(ToFloats(some.out_weights.view().Rows(24, 9)), Each(testing::IsNan()));
  }
}

TEST_F(IndexerQueryTest, DeclaresWhatItTouches) {
  const Query query({2, 3, 32, 8, true}, DType::kBf16, RowFormat::kMxfp4Key);
  const std::vector<OpRecord> records = Capture([&] { return indexer_query::Record(stream(), query.params); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "indexer_query");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read q bf16 [2, 3, 32]", "read weights f32 [2, 3]", "read positions i64 [2]",
                          "before wait cos_sin f32 [50, 8]", "write out_values e2m1x2 [2, 3, 16]",
                          "write out_scales e8m0 [2, 3, 1]", "write out_weights f32 [2, 3]"));
  EXPECT_THAT(query.out_values->Bytes(), Each(0xFF));
}

TEST_F(IndexerQueryTest, RefusesBadInputByName) {
  const Query fp8({2, 3, 32, 8, true}, DType::kF32, RowFormat::kFp8Key);
  const Query fp4({2, 3, 32, 8, true}, DType::kF32, RowFormat::kMxfp4Key);
  const Query ragged({2, 3, 48, 8, false}, DType::kF32, RowFormat::kFp8Key);
  const auto refused = [&](indexer_query::Params params, const char* message, const auto& change) {
    change(params);
    EXPECT_THAT(indexer_query::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused(fp8.params, "q: expected f32 or bf16 [any, any, any]", [](auto& p) { p.q = TensorView(); });
  refused(fp8.params, "weights: expected f32 [2, 3]", [](auto& p) { p.weights = p.weights.FirstRows(1); });
  refused(fp8.params, "positions: expected i64 [2]", [](auto& p) { p.positions.dtype = DType::kI32; });
  refused(fp8.params, "cos_sin: expected f32 [any, any]", [](auto& p) { p.cos_sin = WeightView(); });
  const TestTensor odd(DType::kF32, {50, 7});
  const TestTensor wide(DType::kF32, {50, 34});
  refused(fp8.params, "cos_sin: expected an even number of at most 32 rotary channels, got 7",
          [&](auto& p) { p.cos_sin = odd.weight(); });
  refused(fp8.params, "cos_sin: expected an even number of at most 32 rotary channels, got 34",
          [&](auto& p) { p.cos_sin = wide.weight(); });
  refused(ragged.params, "q: expected a power of two of channels for hadamard, got 48",
          [](auto& p) { p.hadamard = true; });
  refused(ragged.params, "q: expected a multiple of 32 channels, got 48",
          [](auto& p) { p.format = RowFormat::kMxfp4Key; });
  refused(fp8.params, "format: expected that of an indexer key, got fp8", [](auto& p) { p.format = RowFormat::kFp8; });
  refused(fp8.params, "out_values: expected f32 or bf16 [2, 3, 32]", [](auto& p) { p.format = RowFormat::kBf16; });
  refused(fp8.params, "out_values: expected e2m1x2 [2, 3, 16]", [](auto& p) { p.format = RowFormat::kMxfp4Key; });
  refused(fp4.params, "out_values: expected e4m3 [2, 3, 32]", [](auto& p) { p.format = RowFormat::kFp8Key; });
  refused(fp4.params, "out_scales: expected e8m0 [2, 3, 1]", [](auto& p) { p.out_scales = TensorView(); });
  refused(fp8.params, "out_weights: expected f32 [2, 3]", [](auto& p) { p.out_weights = TensorView(); });
  refused(fp8.params, "out_weights and weights: ", [](auto& p) { p.out_weights = p.weights; });
  for (const Query* query : {&fp8, &fp4, &ragged}) {
    EXPECT_THAT(query->out_values->Bytes(), Each(0xFF));
    EXPECT_THAT(query->out_weights.Bytes(), Each(0xFF));
  }
}

}  // namespace
}  // namespace dsv4
