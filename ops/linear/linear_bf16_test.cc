// Products with bf16 activations, which tensor cores compute on a GPU: all their shapes there, few rows and many.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "ops/linear/choose_kernel.h"
#include "ops/linear/linear.h"
#include "ops/linear/product_reference.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A tensor core may cut off what does not fit 24 bits instead of rounding it. A block of 128 products is eight such
// sums, each cut by at most 2^-23 of a partial sum and on average by half of that, always towards zero; two thirds of
// the block's sum on average, this is 8 * 2^-24 * 2/3 = 3.2e-7 of it. The blocks' sums of random sign, up to 64 of
// them, and the roundings of their additions, sqrt(64) * 2^-25, stay below 6e-7 together. A wrong or missing product
// costs 1e-2.
constexpr double kTolerance = 2e-6;

class LinearBf16Test : public OpTest {};

struct Case {
  int64_t rows, out, in;
  int64_t groups = 1;
};

// The weight types that have a kernel of their own; e4m3 with scales of the published type and as f32.
std::vector<TestWeightOptions> WeightTypes(int64_t rows, int64_t cols) {
  std::vector<TestWeightOptions> types = {
      {.rows = rows, .cols = cols, .dtype = DType::kBf16},
      {.rows = rows, .cols = cols, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128},
      {.rows = rows,
       .cols = cols,
       .dtype = DType::kE4m3,
       .scale_dtype = DType::kF32,
       .block_rows = 16,
       .block_cols = 256},
      {.rows = rows, .cols = cols, .dtype = DType::kE2m1x2, .block_rows = 1, .block_cols = 32},
  };
  return types;
}

// Values whose size differs from block to block, so that a wrong scale shows.
std::vector<float> Activations(int64_t count, int64_t row_size, uint64_t seed) {
  std::vector<float> values = RandomFloats(count, seed);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = i % row_size / 128 + i / row_size;
    values[static_cast<size_t>(i)] *= std::exp2(static_cast<float>(block * 5 % 7) - 3.0f);
  }
  return values;
}

ProductKernel KernelOf(const linear::Params& params) {
  return ChooseKernel(MakeProductProblem(params.x, params.weight, params.groups, params.quantize_activations));
}

TEST_F(LinearBf16Test, MultipliesByWeightsOfEveryTypeThatTensorCoresTake) {
  for (const Case& c : {
           Case{1, 16, 128}, Case{2, 17, 256}, Case{3, 100, 384}, Case{8, 33, 1024},  // one to eight runs of one block
           Case{7, 16, 1152},                                                         // one of two blocks
           Case{9, 40, 2176}, Case{31, 15, 512}, Case{32, 64, 128}, Case{33, 48, 256}, Case{64, 7, 640},
           Case{2, 16, 8192}, Case{33, 16, 8192},  // rings that turn
       }) {
    for (const TestWeightOptions& options : WeightTypes(c.out, c.in)) {
      for (const bool quantize : {false, true}) {
        if (quantize && options.dtype == DType::kBf16) continue;
        SCOPED_TRACE(testing::Message() << DTypeName(options.dtype) << " " << c.out << " x " << c.in << ", " << c.rows
                                        << " rows" << (quantize ? ", quantized" : ""));
        const TestWeight weight(options);
        const TestTensor x(DType::kBf16, {c.rows, c.in}, Activations(c.rows * c.in, c.in, 7));
        TestTensor out(DType::kF32, {c.rows, c.out});
        const linear::Params params = {
            .x = x.view(), .weight = weight.view(), .quantize_activations = quantize, .out = out.view()};
        ASSERT_EQ(KernelOf(params), ProductKernel::kTensorCore);
        DSV4_ASSERT_OK(linear::Record(stream(), params));
        const std::vector<double> inputs = quantize ? QuantizedInputs(x.ToFloats(), c.in) : Doubles(x.ToFloats());
        EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(inputs, c.rows, weight, 1), c.out, kTolerance));
        out.CheckGuards();
      }
    }
  }
}

TEST_F(LinearBf16Test, TakesInputsThatEndInsideABlock) {
  for (const int64_t in : {8, 136, 200, 1000}) {
    const TestWeight weight({.rows = 20, .cols = in, .dtype = DType::kBf16});
    const TestTensor x(DType::kBf16, {3, in}, Activations(3 * in, in, 3));
    TestTensor out(DType::kF32, {3, 20});
    const linear::Params params = {.x = x.view(), .weight = weight.view(), .out = out.view()};
    ASSERT_EQ(KernelOf(params), ProductKernel::kTensorCore);
    DSV4_ASSERT_OK(linear::Record(stream(), params));
    EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(Doubles(x.ToFloats()), 3, weight, 1), 20, kTolerance)) << in;
  }
  for (const int64_t in : {16, 144, 1008}) {
    const TestWeight weight({.rows = 20, .cols = in, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128});
    const TestTensor x(DType::kBf16, {3, in}, Activations(3 * in, in, 3));
    TestTensor out(DType::kF32, {3, 20});
    const linear::Params params = {
        .x = x.view(), .weight = weight.view(), .quantize_activations = true, .out = out.view()};
    ASSERT_EQ(KernelOf(params), ProductKernel::kTensorCore);
    DSV4_ASSERT_OK(linear::Record(stream(), params));
    EXPECT_TRUE(
        IsClose(out.ToFloats(), ReferenceProduct(QuantizedInputs(x.ToFloats(), in), 3, weight, 1), 20, kTolerance))
        << in;
  }
}

TEST_F(LinearBf16Test, KeepsGroupsApart) {
  for (const TestWeightOptions& options : WeightTypes(96, 256)) {
    for (const bool quantize : {false, true}) {
      if (quantize && options.dtype == DType::kBf16) continue;
      const TestWeight weight(options);
      const TestTensor x(DType::kBf16, {9, 3 * 256}, Activations(9 * 3 * 256, 3 * 256, 11));
      TestTensor out(DType::kF32, {9, 96});
      const linear::Params params = {
          .x = x.view(), .weight = weight.view(), .groups = 3, .quantize_activations = quantize, .out = out.view()};
      ASSERT_EQ(KernelOf(params), ProductKernel::kTensorCore);
      DSV4_ASSERT_OK(linear::Record(stream(), params));
      const std::vector<double> inputs = quantize ? QuantizedInputs(x.ToFloats(), 256) : Doubles(x.ToFloats());
      EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(inputs, 9, weight, 3), 32, kTolerance));
      out.CheckGuards();
    }
  }
}

// So many output channels that a block has two and four tiles of them, the last block not all.
TEST_F(LinearBf16Test, MultipliesByTallWeights) {
  const std::vector<TestWeightOptions> two_tiles = WeightTypes(4112, 128);
  const std::vector<TestWeightOptions> four_tiles = WeightTypes(16400, 128);
  for (const TestWeightOptions& options : {two_tiles[0], two_tiles[3], four_tiles[1], four_tiles[3]}) {
    const TestWeight weight(options);
    for (const int64_t rows : {1, 9}) {
      SCOPED_TRACE(testing::Message() << DTypeName(options.dtype) << " " << options.rows << ", " << rows << " rows");
      const TestTensor x(DType::kBf16, {rows, 128}, RandomFloats(rows * 128, 5));
      TestTensor out(DType::kF32, {rows, options.rows});
      DSV4_ASSERT_OK(linear::Record(stream(), {.x = x.view(), .weight = weight.view(), .out = out.view()}));
      EXPECT_TRUE(
          IsClose(out.ToFloats(), ReferenceProduct(Doubles(x.ToFloats()), rows, weight, 1), options.rows, kTolerance));
      out.CheckGuards();
    }
  }
}

// Any number of rows of one order, pads among them, and rows that no wide access fits.
TEST_F(LinearBf16Test, GivesARowTheSameBitsInAnyCompany) {
  constexpr int64_t kRows = kMaxRowsOfOneOrder;
  constexpr int64_t kIn = 1152;
  for (const TestWeightOptions& options : WeightTypes(40, kIn)) {
    const TestWeight weight(options);
    const bool quantize = options.dtype != DType::kBf16;
    const std::vector<float> values = Activations(kRows * kIn, kIn, 13);
    const TestTensor x(DType::kBf16, {kRows, kIn}, values);
    const auto run = [&](const TensorView& rows, const TestTensor& out) {
      DSV4_ASSERT_OK(linear::Record(
          stream(), {.x = rows, .weight = weight.view(), .quantize_activations = quantize, .out = out.view()}));
    };
    TestTensor all(DType::kF32, {kRows, 40});
    run(x.view(), all);
    for (const int64_t count : {1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63}) {
      TestTensor some(DType::kF32, {count, 40});
      run(x.view().Rows(kRows - count, count), some);
      EXPECT_TRUE(BitwiseEqual(some.view(), all.view().Rows(kRows - count, count))) << count << " rows";
    }

    std::vector<float> with_pads = values;
    for (int64_t i = 0; i < kRows; ++i) {
      if (i % 3 != 0) std::fill_n(with_pads.begin() + i * kIn, kIn, kNan);
    }
    const TestTensor poisoned(DType::kBf16, {kRows, kIn}, with_pads);
    TestTensor out(DType::kF32, {kRows, 40});
    run(poisoned.view(), out);
    for (int64_t i = 0; i < kRows; i += 3) {
      EXPECT_TRUE(BitwiseEqual(out.view().Rows(i, 1), all.view().Rows(i, 1))) << "row " << i;
    }

    const TestTensor wide(DType::kBf16, {kRows, kIn + 3});
    const TensorView unaligned = wide.view().Columns(1, kIn);
    SetFloats(unaligned, values);
    TestTensor of_unaligned(DType::kF32, {kRows, 40});
    run(unaligned, of_unaligned);
    EXPECT_TRUE(BitwiseEqual(of_unaligned.view(), all.view()));
  }
}

TEST_F(LinearBf16Test, RoundsOnceToBf16) {
  const TestWeight weight({.rows = 70, .cols = 256, .dtype = DType::kE4m3, .block_rows = 128, .block_cols = 128});
  for (const bool quantize : {false, true}) {
    const TestTensor x(DType::kBf16, {5, 256}, RandomFloats(5 * 256, 3));
    TestTensor exact(DType::kF32, {5, 70});
    TestTensor wide(DType::kBf16, {5, 90});
    const TensorView out = wide.view().Columns(9, 70);
    linear::Params params = {
        .x = x.view(), .weight = weight.view(), .quantize_activations = quantize, .out = exact.view()};
    DSV4_ASSERT_OK(linear::Record(stream(), params));
    params.out = out;
    DSV4_ASSERT_OK(linear::Record(stream(), params));
    const TestTensor rounded(DType::kBf16, {5, 70}, exact.ToFloats());
    EXPECT_TRUE(BitwiseEqual(out, rounded.view()));
    for (int64_t i = 0; i < 5; ++i) {  // what lies beside the view is as it was
      EXPECT_EQ(*wide.view().At<uint16_t>(i, 8), 0xffff);
      EXPECT_EQ(*wide.view().At<uint16_t>(i, 79), 0xffff);
    }
    wide.CheckGuards();
  }
}

// All codes of both formats, by inputs that pick one channel each: exact, so any order of summation gives these bits.
TEST_F(LinearBf16Test, DequantizesEveryCode) {
  for (const DType dtype : {DType::kE4m3, DType::kE2m1x2}) {
    const bool packed = dtype == DType::kE2m1x2;
    const int64_t in = 256;
    const TestTensor codes(dtype, {16, packed ? in / 2 : in});
    const TestTensor scales(DType::kE8m0, {packed ? 16 : 1, packed ? in / 32 : in / 128});
    const auto code_of = [packed](int64_t o, int64_t k) {
      const int64_t code = packed ? (o + k) % 16 : (o * 16 + k) % 256;
      return static_cast<uint8_t>(!packed && code % 128 == 127 ? 0 : code);  // no NaN
    };
    for (int64_t o = 0; o < 16; ++o) {
      for (int64_t k = 0; k < in; ++k) {
        if (packed) {
          uint8_t& pair = codes.data<uint8_t>()[(o * in + k) / 2];
          pair = static_cast<uint8_t>(k % 2 == 0 ? code_of(o, k) : (pair | code_of(o, k) << 4));
        } else {
          codes.data<uint8_t>()[o * in + k] = code_of(o, k);
        }
      }
    }
    for (int64_t s = 0; s < scales.num_elements(); ++s) {
      scales.data<uint8_t>()[s] = static_cast<uint8_t>(120 + s % 13);
    }
    QuantizedWeight weight = {codes.weight(), scales.weight(), packed ? 1 : 128, packed ? 32 : 128};
    for (const bool quantize : {false, true}) {
      for (int64_t first = 0; first < in; first += 8) {
        TestTensor x(DType::kBf16, {8, in}, std::vector<float>(static_cast<size_t>(8 * in), 0.0f));
        for (int64_t i = 0; i < 8; ++i) *x.view().Columns(first + i, 1).Row<uint16_t>(i) = 0xbf80;  // -1
        TestTensor out(DType::kF32, {8, 16});
        DSV4_ASSERT_OK(linear::Record(
            stream(), {.x = x.view(), .weight = weight, .quantize_activations = quantize, .out = out.view()}));
        for (int64_t i = 0; i < 8; ++i) {
          for (int64_t o = 0; o < 16; ++o) {
            const int64_t k = first + i;
            const uint8_t code = code_of(o, k);
            const int64_t scale = packed ? o * (in / 32) + k / 32 : k / 128;
            const double expected =
                -(packed ? E2m1Value(code) : E4m3Value(code)) * std::ldexp(1.0, scales.data<uint8_t>()[scale] - 127);
            ASSERT_EQ(*out.view().At<float>(i, o), static_cast<float>(expected))
                << DTypeName(dtype) << " code " << int{code} << " at " << o << ", " << k;
          }
        }
      }
    }
  }
}

// More rows than have one order of summation: cublasLt's product on a GPU where both are bf16, chunks elsewhere.
TEST_F(LinearBf16Test, MultipliesManyRows) {
  for (const int64_t rows : {65, 100, 200}) {
    for (const TestWeightOptions& options : WeightTypes(48, 640)) {
      for (const DType out_dtype : {DType::kF32, DType::kBf16}) {
        SCOPED_TRACE(testing::Message() << DTypeName(options.dtype) << ", " << rows << " rows");
        const TestWeight weight(options);
        const TestTensor x(DType::kBf16, {rows, 640}, RandomFloats(rows * 640, 19));
        TestTensor out(out_dtype, {rows, 48});
        TestTensor again(out_dtype, {rows, 48});
        linear::Params params = {.x = x.view(), .weight = weight.view(), .out = out.view()};
        DSV4_ASSERT_OK(linear::Record(stream(), params));
        params.out = again.view();
        DSV4_ASSERT_OK(linear::Record(stream(), params));
        EXPECT_TRUE(BitwiseEqual(out.view(), again.view()));
        // bf16: the result's rounding, of up to 2^-8.
        EXPECT_TRUE(IsClose(out.ToFloats(), ReferenceProduct(Doubles(x.ToFloats()), rows, weight, 1), 48,
                            out_dtype == DType::kF32 ? kTolerance : 0x1p-8));
        out.CheckGuards();
      }
    }
  }
}

}  // namespace
}  // namespace dsv4
