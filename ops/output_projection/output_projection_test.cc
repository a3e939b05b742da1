#include "ops/output_projection/output_projection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

// fp32: two products of up to 512 terms in a row, each within about 1e-6.
constexpr double kF32Tolerance = 4e-6;
// bf16: as the expected values round at the same places, only those near a midpoint differ: one in 1000, by 2^-8, is
// 1.2e-4. Leaving out a rounding costs 1e-3.
constexpr double kBf16Tolerance = 3e-4;
// e4m3: one code in 10^4 may differ (a low-rank value that rounded to bf16 the other way), by 2^-4: 6e-4. Quantising
// the first product's input too, or not quantising, costs 2e-2.
constexpr double kFp8Tolerance = 2e-3;

class OutputProjectionTest : public OpTest {};

struct Case {
  int64_t rows, heads, channels, rotary, groups, rank, out;  // rank: of each group
};
constexpr Case kCases[] = {{1, 4, 128, 64, 2, 48, 96}, {2, 3, 10, 4, 3, 5, 7}, {3, 2, 64, 64, 1, 130, 33},
                           {31, 4, 32, 8, 4, 3, 64},   {32, 1, 6, 0, 1, 1, 1}, {33, 6, 16, 2, 2, 9, 200}};

struct Projection {
  Projection(const Case& c, DType dtype, DType weight_dtype = DType::kF32)
      : c(c),
        o(dtype, {c.rows, c.heads, c.channels}, RandomFloats(c.rows * c.heads * c.channels, 1)),
        positions(DType::kI64, {c.rows}),
        cos_sin(RandomRotations(40, c.rotary, 2)),
        wo_a({.rows = c.groups * c.rank,
              .cols = c.heads / c.groups * c.channels,
              .dtype = weight_dtype,
              .block_rows = 128,
              .block_cols = 128,
              .seed = 3}),
        wo_b({.rows = c.out,
              .cols = c.groups * c.rank,
              .dtype = weight_dtype,
              .block_rows = 128,
              .block_cols = 128,
              .seed = 4}),
        rotated(dtype, {c.rows, c.heads, c.channels}),
        low_rank(dtype, {c.rows, c.groups * c.rank}),
        out(DType::kF32, {c.rows, c.out}) {
    for (int64_t i = 0; i < c.rows; ++i) positions.data<int64_t>()[i] = (i * 11 + 5) % 40;
  }

  output_projection::Params Params() const {
    return {.o = o.view(),
            .positions = positions.view(),
            .cos_sin = cos_sin.weight(),
            .wo_a = wo_a.view(),
            .groups = c.groups,
            .wo_b = wo_b.view(),
            .rotated = rotated.view(),
            .low_rank = low_rank.view(),
            .out = out.view()};
  }

  // The specification, section 8.
  std::vector<float> Expected(bool quantize) const {
    const auto round = [&](double x) { return o.view().dtype == DType::kBf16 ? NearestBf16(x) : x; };
    const std::vector<float> values = o.ToFloats();
    const int64_t width = c.heads * c.channels;
    std::vector<float> expected;
    for (int64_t i = 0; i < c.rows; ++i) {
      const float* table = cos_sin.data<float>() + positions.data<int64_t>()[i] * c.rotary;
      std::vector<double> row(values.begin() + i * width, values.begin() + (i + 1) * width);
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t pair = 0; pair < c.rotary / 2; ++pair) {
          double& a = row[static_cast<size_t>((h + 1) * c.channels - c.rotary + 2 * pair)];
          double& b = row[static_cast<size_t>((h + 1) * c.channels - c.rotary + 2 * pair + 1)];
          const double cosine = table[pair], sine = table[c.rotary / 2 + pair];
          const double back_a = a * cosine + b * sine;
          const double back_b = b * cosine - a * sine;
          a = round(back_a);
          b = round(back_b);
        }
      }
      std::vector<double> t;
      const int64_t group_width = width / c.groups;
      for (int64_t r = 0; r < c.groups * c.rank; ++r) {
        double sum = 0;
        for (int64_t k = 0; k < group_width; ++k) {
          sum += wo_a.At(r, k) * row[static_cast<size_t>(r / c.rank * group_width + k)];
        }
        t.push_back(round(sum));
      }
      if (quantize) t = QuantizedActivations(t, 128);
      for (int64_t d = 0; d < c.out; ++d) {
        double sum = 0;
        for (size_t r = 0; r < t.size(); ++r) sum += wo_b.At(d, static_cast<int64_t>(r)) * t[r];
        expected.push_back(static_cast<float>(sum));
      }
    }
    return expected;
  }

  void CheckGuards() const {
    for (const TestTensor* tensor : {&o, &rotated, &low_rank, &out}) tensor->CheckGuards();
  }

  Case c;
  TestTensor o, positions, cos_sin;
  TestWeight wo_a, wo_b;
  TestTensor rotated, low_rank, out;
};

TEST_F(OutputProjectionTest, RotatesBackAndProjectsInGroups) {
  for (const Case& c : kCases) {
    for (const DType weight_dtype : {DType::kF32, DType::kBf16, DType::kE4m3}) {
      const Projection projection(c, DType::kF32, weight_dtype);
      const std::vector<uint8_t> before = projection.o.Bytes();
      DSV4_ASSERT_OK(output_projection::Record(stream(), projection.Params()));
      EXPECT_TRUE(IsClose(projection.out.ToFloats(), projection.Expected(false), c.rows * c.out, kF32Tolerance));
      EXPECT_EQ(projection.o.Bytes(), before);
      projection.CheckGuards();
    }
  }
}

TEST_F(OutputProjectionTest, RoundsItsScratchToBf16) {
  for (const Case& c : {kCases[0], kCases[5]}) {
    const Projection projection(c, DType::kBf16, DType::kE4m3);
    DSV4_ASSERT_OK(output_projection::Record(stream(), projection.Params()));
    EXPECT_TRUE(IsClose(projection.out.ToFloats(), projection.Expected(false), c.rows * c.out, kBf16Tolerance));
    projection.CheckGuards();
  }
}

TEST_F(OutputProjectionTest, QuantizesTheInputOfTheSecondProductOnly) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Projection projection({8, 4, 128, 64, 2, 100, 96}, dtype, DType::kE4m3);
    output_projection::Params params = projection.Params();
    params.quantize_activations = true;
    DSV4_ASSERT_OK(output_projection::Record(stream(), params));
    EXPECT_TRUE(IsClose(projection.out.ToFloats(), projection.Expected(true), 8 * 96, kFp8Tolerance));
  }
}

// One rounding per operation, so these are the only right bits.
TEST_F(OutputProjectionTest, RotatesWithTheBitsOfSeparateOperations) {
  for (const Case& c : {Case{3, 4, 128, 64, 2, 16, 16}, Case{2, 3, 10, 4, 3, 5, 7}, Case{2, 2, 24, 16, 1, 4, 4}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const Projection projection(c, dtype);
      const TestTensor wide(dtype, {c.rows, c.heads, c.channels + 3});  // and rows that no wide access fits
      for (const bool strided : {false, true}) {
        output_projection::Params params = projection.Params();
        if (strided) {
          params.o = wide.view();
          params.o.extents[2] = c.channels;
          SetFloats(params.o, projection.o.ToFloats());
        }
        DSV4_ASSERT_OK(output_projection::Record(stream(), params));
        std::vector<float> expected = projection.o.ToFloats();
        for (int64_t head = 0; head < c.rows * c.heads; ++head) {
          const float* table =
              projection.cos_sin.data<float>() + projection.positions.data<int64_t>()[head / c.heads] * c.rotary;
          for (int64_t pair = 0; pair < c.rotary / 2; ++pair) {
            float& a = expected[static_cast<size_t>((head + 1) * c.channels - c.rotary + 2 * pair)];
            float& b = expected[static_cast<size_t>((head + 1) * c.channels - c.rotary + 2 * pair + 1)];
            const float cosine = table[pair], sine = table[c.rotary / 2 + pair];
            const float back = a * cosine + b * sine;
            b = b * cosine - a * sine;
            a = back;
          }
        }
        const TestTensor rounded(dtype, {c.rows, c.heads, c.channels}, expected);
        EXPECT_TRUE(BitwiseEqual(projection.rotated.view(), rounded.view())) << c.channels;
        projection.CheckGuards();
      }
    }
  }
}

TEST_F(OutputProjectionTest, GivesARowTheSameBitsInAnyCompany) {
  const auto check = [&](const Case& c, DType weight_dtype) {
    const Projection all(c, DType::kBf16, weight_dtype);
    DSV4_ASSERT_OK(output_projection::Record(stream(), all.Params()));
    const Projection some(c, DType::kBf16, weight_dtype);
    for (int64_t pad = 0; pad < 33; pad += 2) {
      SetFloats(some.o.view().Rows(pad, 1),
                std::vector<float>(static_cast<size_t>(c.heads * c.channels), std::numeric_limits<float>::quiet_NaN()));
      some.positions.data<int64_t>()[pad] = 0;
    }
    output_projection::Params params = some.Params();
    for (TensorView* view : {&params.o, &params.positions, &params.rotated, &params.low_rank, &params.out}) {
      *view = view->Rows(4, 20);
    }
    DSV4_ASSERT_OK(output_projection::Record(stream(), params));
    for (int64_t i = 5; i < 24; i += 2) {
      EXPECT_TRUE(BitwiseEqual(some.out.view().Rows(i, 1), all.out.view().Rows(i, 1))) << i;
    }
    EXPECT_THAT(ToFloats(some.out.view().Rows(0, 4)), Each(testing::IsNan()));
    EXPECT_THAT(ToFloats(some.out.view().Rows(24, 9)), Each(testing::IsNan()));
  };
  check({33, 4, 24, 8, 2, 9, 20}, DType::kF32);
  check({33, 4, 128, 64, 2, 64, 48}, DType::kE4m3);  // products for tensor cores on a GPU
}

TEST_F(OutputProjectionTest, RecordsARotationAndTwoProducts) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  const Projection projection({2, 4, 8, 4, 2, 3, 5}, DType::kBf16);
  const std::vector<OpRecord> records =
      Capture([&] { return output_projection::Record(stream(), projection.Params()); });
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0].op, "inverse_rope");
  EXPECT_THAT(Declared(records[0]), ElementsAre("read o bf16 [2, 4, 8]", "read positions i64 [2]",
                                                "before wait cos_sin f32 [40, 4]", "write rotated bf16 [2, 4, 8]"));
  EXPECT_EQ(records[1].op, "linear");
  EXPECT_THAT(Declared(records[1]),
              ElementsAre("read x bf16 [2, 32]", "before wait weight f32 [6, 16]", "write out bf16 [2, 6]"));
  EXPECT_EQ(records[2].op, "linear");
  EXPECT_THAT(Declared(records[2]),
              ElementsAre("read x bf16 [2, 6]", "before wait weight f32 [5, 6]", "write out f32 [2, 5]"));
  EXPECT_THAT(projection.out.Bytes(), Each(0xFF));
  EXPECT_THAT(projection.rotated.Bytes(), Each(0xFF));
}

TEST_F(OutputProjectionTest, RefusesBadInputByName) {
  const Projection projection({2, 4, 8, 4, 2, 3, 5}, DType::kF32);
  const TestWeight other({.rows = 6, .cols = 15});
  const TestWeight uneven({.rows = 7, .cols = 16});
  const TestTensor odd(DType::kF32, {40, 5});
  const TestTensor wide(DType::kF32, {2, 4, 9});
  const auto refused = [&](const char* message, const auto& change) {
    output_projection::Params params = projection.Params();
    change(params);
    EXPECT_THAT(Capture([&] {
                  EXPECT_THAT(output_projection::Record(stream(), params),
                              StatusIs(absl::StatusCode::kInvalidArgument, message));
                  return absl::OkStatus();
                }),
                testing::IsEmpty());  // nothing of the three
  };
  refused("o: expected f32 or bf16 [any, any, any]", [](auto& p) { p.o = TensorView(); });
  refused("positions: expected i64 [2]", [](auto& p) { p.positions = p.positions.FirstRows(1); });
  refused("cos_sin: expected f32 [any, any]", [](auto& p) { p.cos_sin = WeightView(); });
  refused("cos_sin: expected an even number of at most 8 rotary channels, got 5",
          [&](auto& p) { p.cos_sin = odd.weight(); });
  refused("groups: expected at least 1, got -1", [](auto& p) { p.groups = -1; });
  refused("o: expected heads in 3 equal groups, got 4", [](auto& p) { p.groups = 3; });
  refused("wo_a: expected", [&](auto& p) { p.wo_a = other.view(); });
  refused("wo_a: expected rows in 2 equal groups, got 7", [&](auto& p) { p.wo_a = uneven.view(); });
  refused("wo_b: expected", [&](auto& p) { p.wo_b = uneven.view(); });
  refused("rotated: expected f32 or bf16 [2, 4, 8]", [](auto& p) { p.rotated = p.rotated.FirstRows(1); });
  refused("rotated: expected a contiguous tensor", [&](auto& p) {
    p.rotated = wide.view();
    p.rotated.extents[2] = 8;
  });
  refused("low_rank: expected f32 or bf16 [2, 6]", [](auto& p) { p.low_rank = TensorView(); });
  refused("out: expected f32 or bf16 [2, 5]", [](auto& p) { p.out.dtype = DType::kI32; });
  refused("rotated and o: ", [](auto& p) { p.rotated = p.o; });
  refused("low_rank and out: ", [](auto& p) { p.out = p.low_rank.Columns(0, 5); });
  refused("out and o: ", [](auto& p) { p.out = p.o.Index(0).FirstRows(2).Columns(0, 5); });
  EXPECT_THAT(projection.out.Bytes(), Each(0xFF));
  EXPECT_THAT(projection.rotated.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
