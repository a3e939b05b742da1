#include "ops/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/linear/matrix_product_cpu.h"
#include "ops/linear/product_reference.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Sums of up to 600 products of random signs, in a few fp32 chains: each addition errs by at most 2^-24 of a partial
// sum, which is at most about the size of the result; the errors add up like a random walk: sqrt(600) * 2^-24 = 1.5e-6.
constexpr double kF32Tolerance = 2e-6;

class LinearTest : public OpTest {};

std::vector<TestWeightOptions> AllWeightTypes(int64_t rows, int64_t cols) {
  return {
      {.rows = rows, .cols = cols, .dtype = DType::kF32},
      {.rows = rows, .cols = cols, .dtype = DType::kBf16},
      {.rows = rows, .cols = cols, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128},
      {.rows = rows,
       .cols = cols,
       .dtype = DType::kE4m3,
       .scale_dtype = DType::kF32,
       .block_rows = 64,
       .block_cols = 96},
      {.rows = rows, .cols = cols, .dtype = DType::kE2m1x2, .block_rows = 1, .block_cols = 32},
  };
}

TEST_F(LinearTest, MultipliesByWeightsOfEveryType) {
  struct Size {
    int64_t rows, out, in;
  };
  // Whole blocks; partial blocks at both edges, of fp8 and of fp4; one element; panels of 64 weight rows and one more.
  for (const Size size : {Size{2, 128, 256}, Size{3, 130, 200}, Size{33, 65, 40}, Size{1, 1, 2}, Size{2, 257, 600}}) {
    for (const TestWeightOptions& options : AllWeightTypes(size.out, size.in)) {
      for (const DType x_dtype : {DType::kF32, DType::kBf16}) {
        SCOPED_TRACE(testing::Message() << DTypeName(options.dtype) << " " << size.out << " x " << size.in);
        const TestWeight weight(options);
        const TestTensor x(x_dtype, {size.rows, size.in}, RandomFloats(size.rows * size.in, 7));
        TestTensor out(DType::kF32, {size.rows, size.out});
        DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}));
        EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(Doubles(x.ToFloats()), size.rows, weight, 1), size.out,
                            kF32Tolerance));
        out.CheckGuards();
      }
    }
  }
}

TEST_F(LinearTest, RoundsOnceToBf16) {
  const TestWeight weight({.rows = 70, .cols = 192, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128});
  const TestTensor x(DType::kBf16, {5, 192}, RandomFloats(5 * 192, 3));
  TestTensor exact(DType::kF32, {5, 70});
  TestTensor out(DType::kBf16, {5, 70});
  DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = exact.view()}));
  DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}));
  const TestTensor rounded(DType::kBf16, {5, 70}, exact.ToFloats());
  EXPECT_TRUE(BitwiseEqual(out.view(), rounded.view()));
  out.CheckGuards();
}

TEST_F(LinearTest, KeepsGroupsApart) {
  // 50 rows a group: the second group starts inside a block of scales.
  for (const TestWeightOptions& options : AllWeightTypes(150, 72)) {
    const TestWeight weight(options);
    const TestTensor x(DType::kF32, {3, 3 * 72}, RandomFloats(3 * 3 * 72, 11));
    TestTensor out(DType::kF32, {3, 150});
    DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .groups = 3, .out = out.view()}));
    EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(Doubles(x.ToFloats()), 3, weight, 3), 50, kF32Tolerance));
    out.CheckGuards();
  }
}

TEST_F(LinearTest, QuantizesActivationsPerBlockOfAGroupsInput) {
  // 200 channels a group: blocks of 128 and 72, and the second group's blocks start anew.
  const TestWeight weight({.rows = 60, .cols = 200, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128});
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    std::vector<float> values = RandomFloats(3 * 400, 5);
    for (size_t k = 0; k < values.size(); ++k) values[k] *= std::exp2(static_cast<float>(k % 7 * 3) - 9.0f);
    std::fill_n(values.begin() + 400, 128, 1e-6f);  // below the floor of the magnitude
    const TestTensor x(dtype, {3, 400}, values);
    TestTensor out(DType::kF32, {3, 60});
    DSV4_ASSERT_OK(linear::Record(
        stream(),
        {.x = x.view(), .weight = weight.view(), .groups = 2, .quantize_activations = true, .out = out.view()}));
    EXPECT_TRUE(
        IsClose(out.ToFloats(), ReferenceProduct(QuantizedInputs(x.ToFloats(), 200), 3, weight, 2), 30, kF32Tolerance));
  }
}

TEST_F(LinearTest, GivesARowTheSameBitsInAnyCompany) {
  constexpr int64_t kRows = 70;
  for (const TestWeightOptions& options : AllWeightTypes(97, 104)) {
    const TestWeight weight(options);
    const TestTensor x(DType::kF32, {kRows, 104}, RandomFloats(kRows * 104, 13));
    const auto run = [&](const TensorView& rows, const TestTensor& out) {
      DSV4_ASSERT_OK(linear::Record(
          stream(), {.x = rows, .weight = weight.view(), .quantize_activations = true, .out = out.view()}));
    };
    TestTensor all(DType::kF32, {kRows, 97});
    run(x.view(), all);
    for (const int64_t count : {1, 2, 3, 31, 32, 33, 64, 65}) {
      TestTensor some(DType::kF32, {count, 97});
      run(x.view().Rows(kRows - count, count), some);
      EXPECT_TRUE(BitwiseEqual(some.view(), all.view().Rows(kRows - count, count))) << count << " rows";
    }
    // Neighbours that hold NaN, as pads may.
    std::vector<float> values = x.ToFloats();
    for (int64_t i = 0; i < kRows; ++i) {
      if (i % 3 != 0) std::fill_n(values.begin() + i * 104, 104, kNan);
    }
    const TestTensor poisoned(DType::kF32, {kRows, 104}, values);
    TestTensor out(DType::kF32, {kRows, 97});
    run(poisoned.view(), out);
    for (int64_t i = 0; i < kRows; i += 3) {
      EXPECT_TRUE(BitwiseEqual(out.view().Rows(i, 1), all.view().Rows(i, 1))) << "row " << i;
    }
  }
}

TEST_F(LinearTest, TakesViewsOfWiderTensors) {
  const TestWeight weight({.rows = 6, .cols = 10});
  const TestTensor x(DType::kF32, {4, 30}, RandomFloats(120, 17));
  TestTensor wide(DType::kF32, {4, 20});
  const std::vector<uint8_t> before = wide.Bytes();
  const TensorView x_view = x.view().Columns(10, 10);
  DSV4_ASSERT_OK(linear::Record(stream(), {.x = x_view, .weight = weight.view(), .out = wide.view().Columns(3, 6)}));
  EXPECT_TRUE(IsClose(ToFloats(wide.view().Columns(3, 6)), ReferenceProduct(Doubles(ToFloats(x_view)), 4, weight, 1), 6,
                      kF32Tolerance));
  const std::vector<uint8_t> after = wide.Bytes();
  for (size_t byte = 0; byte < after.size(); ++byte) {
    const size_t column = byte / sizeof(float) % 20;
    if (column >= 3 && column < 9) continue;
    ASSERT_EQ(after[byte], before[byte]) << "byte " << byte;
  }
  wide.CheckGuards();
}

TEST_F(LinearTest, TakesNoRows) {
  const TestWeight weight({.rows = 6, .cols = 10});
  const TestTensor x(DType::kF32, {0, 10});
  const TestTensor out(DType::kF32, {0, 6});
  DSV4_EXPECT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}));
  out.CheckGuards();
}

TEST_F(LinearTest, DeclaresWhatItTouchesAndReadsItWhenRun) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  const TestWeight weight({.rows = 6, .cols = 10, .dtype = DType::kE4m3, .block_rows = 4, .block_cols = 4});
  TestTensor x(DType::kF32, {2, 10}, std::vector<float>(20, kNan));
  TestTensor out(DType::kBf16, {2, 6});
  const std::vector<OpRecord> records =
      Capture([&] { return linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "linear");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]), ElementsAre("read x f32 [2, 10]", "before wait weight e4m3 [6, 10]",
                                                "before wait weight e8m0 [2, 3]", "write out bf16 [2, 6]"));
  EXPECT_THAT(out.Bytes(), testing::Each(0xFF));  // not run yet
  x.Set(std::vector<float>(20, 0.0f));
  records[0].run();
  EXPECT_THAT(out.ToFloats(), testing::Each(0.0f));
}

TEST_F(LinearTest, RefusesBadInputByName) {
  const TestWeight weight({.rows = 6, .cols = 10, .dtype = DType::kE4m3, .block_rows = 4, .block_cols = 4});
  const TestWeight stack({.stack = 2, .rows = 6, .cols = 10});
  const TestTensor x(DType::kF32, {2, 10}, RandomFloats(20, 1));
  const TestTensor ints(DType::kI32, {2, 10});
  const TestTensor narrow(DType::kF32, {2, 9});
  const TestTensor out(DType::kF32, {2, 6});
  const linear::Params good = {.x = x.view(), .weight = weight.view(), .out = out.view()};
  const auto refused = [&](const char* message, const auto& change) {
    linear::Params params = good;
    change(params);
    EXPECT_THAT(linear::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("x: expected f32 or bf16 [any, 10], got no tensor", [](auto& p) { p.x = TensorView(); });
  refused("x: expected f32 or bf16 [any, 10], got i32 [2, 10]", [&](auto& p) { p.x = ints.view(); });
  refused("x: expected f32 or bf16 [any, 10], got f32 [2, 9]", [&](auto& p) { p.x = narrow.view(); });
  refused("x: expected data", [](auto& p) { p.x.data = nullptr; });
  refused("x: expected a stride", [](auto& p) { p.x.strides[1] = 2; });
  refused("x: expected f32 [2, 10] on a multiple of 4", [](auto& p) { p.x.data = static_cast<char*>(p.x.data) + 1; });
  refused("weight: expected", [](auto& p) { p.weight = QuantizedWeight(); });
  refused("weight: expected one matrix", [&](auto& p) { p.weight = stack.view(); });
  refused("weight.scales: expected", [](auto& p) { p.weight.scales = WeightView(); });
  refused("weight.scales: expected", [](auto& p) { p.weight.block_cols = 5; });
  refused("groups: expected at least 1, got 0", [](auto& p) { p.groups = 0; });
  refused("weight: expected rows in 4 equal groups, got 6", [](auto& p) { p.groups = 4; });
  refused("x: expected f32 or bf16 [any, 20]", [](auto& p) { p.groups = 2; });
  refused("out: expected f32 or bf16 [2, 6]", [](auto& p) { p.out = p.out.Columns(0, 5); });
  refused("out: expected f32 or bf16 [2, 6]", [](auto& p) { p.out = p.out.FirstRows(1); });
  refused("out: expected every element of the output at its own address", [](auto& p) { p.out.strides[0] = 0; });
  refused("out and x: expected tensors without a common byte", [&](auto& p) { p.out = x.view().Columns(0, 6); });
  EXPECT_THAT(out.Bytes(), testing::Each(0xFF));
}

TEST(MatrixProductCpu, TakesARangeOfWeightRows) {
  const TestWeight weight({.rows = 200, .cols = 24, .dtype = DType::kE4m3, .block_rows = 16, .block_cols = 16});
  const std::vector<float> x = RandomFloats(3 * 24, 2);
  std::vector<float> out(3 * 100, kNan);
  MatrixProductCpu(x.data(), 3, weight.view(), 90, 100, out.data());
  std::vector<float> expected;
  const std::vector<float> all = ReferenceProduct(Doubles(x), 3, weight, 1);
  for (int64_t i = 0; i < 3; ++i)
    expected.insert(expected.end(), all.begin() + i * 200 + 90, all.begin() + i * 200 + 190);
  EXPECT_TRUE(IsClose(out, expected, 100, kF32Tolerance));
}

TEST(MatrixProductCpu, DoesNotDependOnWhereItsOperandsLie) {
  const TestWeight weight({.rows = 67, .cols = 37, .dtype = DType::kBf16});
  const std::vector<float> x = RandomFloats(37, 4);
  std::vector<float> expected(67);
  MatrixProductCpu(x.data(), 1, weight.view(), expected.data());
  const float dot = DotCpu(x.data(), x.data(), 37);
  for (size_t shift = 0; shift < 8; ++shift) {
    std::vector<float> moved(8 + 37);
    std::vector<float> out(8 + 67);
    std::copy(x.begin(), x.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
    MatrixProductCpu(moved.data() + shift, 1, weight.view(), out.data() + shift);
    EXPECT_EQ(std::memcmp(out.data() + shift, expected.data(), 67 * sizeof(float)), 0) << shift;
    EXPECT_EQ(DotCpu(moved.data() + shift, x.data(), 37), dot) << shift;
  }
}

TEST(DotCpu, SumsAllProducts) {
  for (const int64_t size : {0, 1, 2, 3, 7, 31, 32, 33, 513}) {
    const std::vector<float> a = RandomFloats(size, 8);
    const std::vector<float> b = RandomFloats(size, 9);
    double sum = 0;
    double magnitude = 0;
    for (size_t k = 0; k < a.size(); ++k) {
      sum += static_cast<double>(a[k]) * b[k];
      magnitude += std::abs(static_cast<double>(a[k]) * b[k]);
    }
    // Rounding of each product, and of the additions of a few chains, each at most 2^-24 of the sum of magnitudes.
    EXPECT_NEAR(DotCpu(a.data(), b.data(), size), sum, 32 * 0x1p-24 * magnitude) << size;
  }
}

// The golden vectors of the specification, section 12.1: of a block whose largest magnitude is `largest`, what that
// value becomes.
TEST(QuantizeActivationRowCpu, GivesTheGoldenVectors) {
  struct Golden {
    float largest, expected;
  };
  for (const Golden golden : {Golden{0.0f, 0.0f}, Golden{1.0f, 1.0f}, Golden{1.75f, 1.75f}, Golden{1.7578125f, 1.75f},
                              Golden{448.0f, 448.0f}, Golden{450.0f, 448.0f}}) {
    for (const float sign : {1.0f, -1.0f}) {
      std::vector<float> row = {0.0f, sign * golden.largest, 0.0f};
      QuantizeActivationRowCpu(row.data(), 3, 128);
      EXPECT_THAT(row, ElementsAre(0.0f, sign * golden.expected, 0.0f)) << golden.largest;
    }
  }
}

TEST(QuantizeActivationRowCpu, ScalesEachBlockByItself) {
  for (const int64_t channels : {1, 2, 127, 128, 129, 300}) {
    std::vector<float> row = RandomFloats(channels, static_cast<uint64_t>(channels));
    for (int64_t k = 0; k < channels; ++k) row[static_cast<size_t>(k)] *= k < 128 ? 1.0f : 1000.0f;
    const std::vector<double> expected = QuantizedActivations(Doubles(row), 128);
    QuantizeActivationRowCpu(row.data(), channels, 128);
    EXPECT_EQ(Doubles(row), expected) << channels;
  }
}

}  // namespace
}  // namespace dsv4
