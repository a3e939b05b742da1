#include "runtime/dtype.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace dsv4 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float FloatOfBits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }

// A finite value of a small format and its code without the sign, by the format's definition.
struct Value {
  double value;
  int code;
};

// The finite magnitudes of a format with `exponent_bits` and `mantissa_bits`, in order of code, which is ascending order.
std::vector<Value> Magnitudes(int exponent_bits, int mantissa_bits, int bias, int num_codes) {
  std::vector<Value> values;
  for (int code = 0; code < num_codes; ++code) {
    const int exponent = code >> mantissa_bits;
    const double fraction = (code & ((1 << mantissa_bits) - 1)) / static_cast<double>(1 << mantissa_bits);
    EXPECT_LT(exponent, 1 << exponent_bits);
    const double value =
        exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
    values.push_back({value, code});
  }
  return values;
}

const std::vector<Value>& E4m3Magnitudes() {
  static const std::vector<Value> values = Magnitudes(4, 3, 7, 0x7F);
  return values;
}
const std::vector<Value>& E2m1Magnitudes() {
  static const std::vector<Value> values = Magnitudes(2, 1, 1, 8);
  return values;
}

// The nearest magnitude of the list, ties to the even code, past the last one the last one.
int NearestCode(const std::vector<Value>& values, double magnitude) {
  if (magnitude >= values.back().value) return values.back().code;
  int best = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    const double distance = std::fabs(values[i].value - magnitude);
    const double best_distance = std::fabs(values[static_cast<size_t>(best)].value - magnitude);
    if (distance < best_distance || (distance == best_distance && values[i].code % 2 == 0)) best = static_cast<int>(i);
  }
  return values[static_cast<size_t>(best)].code;
}

// Every value of the list, every midpoint between neighbours, and the floats next to each of these; and what lies
// outside.
std::vector<float> InterestingMagnitudes(const std::vector<Value>& values) {
  std::vector<float> result;
  auto add_with_neighbours = [&](double value) {
    const float x = static_cast<float>(value);
    EXPECT_EQ(static_cast<double>(x), value);
    result.push_back(x);
    result.push_back(std::nextafter(x, kInfinity));
    if (x > 0) result.push_back(std::nextafter(x, 0.0f));
  };
  for (size_t i = 0; i < values.size(); ++i) {
    add_with_neighbours(values[i].value);
    if (i > 0) add_with_neighbours((values[i - 1].value + values[i].value) / 2);
  }
  const double last = values.back().value;
  for (double factor : {1.01, 1.03125, 1.0625, 1.125, 2.0, 100.0}) result.push_back(static_cast<float>(last * factor));
  result.push_back(std::numeric_limits<float>::min());
  result.push_back(std::numeric_limits<float>::denorm_min());
  result.push_back(std::nextafter(std::numeric_limits<float>::min(), 0.0f));
  result.push_back(std::numeric_limits<float>::max());
  return result;
}

// bf16 by definition: of the two bf16 values around x the nearer, ties to the one with an even code; the value after
// the largest counts as 2^128 and is infinity.
uint16_t NearestBf16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (std::isinf(x)) return static_cast<uint16_t>(sign | 0x7F80);
  auto value = [](int code) {
    return code == 0x7F80 ? 0x1p128 : static_cast<double>(FloatOfBits(static_cast<uint32_t>(code) << 16));
  };
  int lo = 0;
  int hi = 0x7F80;
  while (hi - lo > 1) {
    const int middle = (lo + hi) / 2;
    (value(middle) <= magnitude ? lo : hi) = middle;
  }
  const double below = magnitude - value(lo);
  const double above = value(hi) - magnitude;
  const int code = below < above ? lo : above < below ? hi : lo % 2 == 0 ? lo : hi;
  return static_cast<uint16_t>(sign | code);
}

TEST(DType, KnowsNamesAndBytesOfElements) {
  EXPECT_EQ(DTypeName(DType::kF32), "f32");
  EXPECT_EQ(DTypeName(DType::kBf16), "bf16");
  EXPECT_EQ(DTypeName(DType::kE4m3), "e4m3");
  EXPECT_EQ(DTypeName(DType::kE8m0), "e8m0");
  EXPECT_EQ(DTypeName(DType::kE2m1x2), "e2m1x2");
  EXPECT_EQ(DTypeName(DType::kI64), "i64");
  EXPECT_EQ(DTypeName(DType::kI32), "i32");
  EXPECT_EQ(DTypeName(DType::kU8), "u8");
  EXPECT_EQ(DTypeBytes(DType::kF32), 4);
  EXPECT_EQ(DTypeBytes(DType::kBf16), 2);
  EXPECT_EQ(DTypeBytes(DType::kE4m3), 1);
  EXPECT_EQ(DTypeBytes(DType::kE8m0), 1);
  EXPECT_EQ(DTypeBytes(DType::kE2m1x2), 1);
  EXPECT_EQ(DTypeBytes(DType::kI64), 8);
  EXPECT_EQ(DTypeBytes(DType::kI32), 4);
  EXPECT_EQ(DTypeBytes(DType::kU8), 1);
}

TEST(Bf16, EveryPatternRoundTrips) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const Bf16 stored{static_cast<uint16_t>(code)};
    const float x = ToFloat(stored);
    ASSERT_EQ(BitsOf(x), code << 16);
    if (std::isnan(x)) {
      // A signalling NaN becomes a quiet one.
      ASSERT_EQ(Bf16FromFloat(x).bits, code | 0x40) << code;
    } else {
      ASSERT_EQ(Bf16FromFloat(x).bits, code) << code;
    }
  }
}

TEST(Bf16, RoundsMidpointsAndTheirNeighboursToNearestEven) {
  for (uint32_t code = 0; code < 0x7F80; ++code) {
    const uint32_t midpoint = (code << 16) | 0x8000;
    for (uint32_t bits : {midpoint - 1, midpoint, midpoint + 1}) {
      for (uint32_t sign : {0u, 0x80000000u}) {
        const float x = FloatOfBits(bits | sign);
        ASSERT_EQ(Bf16FromFloat(x).bits, NearestBf16(x)) << std::hexfloat << x;
      }
    }
  }
}

TEST(Bf16, RoundsRandomFloatsToNearestEven) {
  std::mt19937 engine(1);
  for (int i = 0; i < 1000000; ++i) {
    const float x = FloatOfBits(static_cast<uint32_t>(engine()));
    if (std::isnan(x)) continue;
    ASSERT_EQ(Bf16FromFloat(x).bits, NearestBf16(x)) << std::hexfloat << x;
  }
}

TEST(Bf16, OverflowsToInfinity) {
  EXPECT_EQ(Bf16FromFloat(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(Bf16FromFloat(-std::numeric_limits<float>::max()).bits, 0xFF80);
  EXPECT_EQ(Bf16FromFloat(kInfinity).bits, 0x7F80);
}

TEST(Bf16, KeepsEveryNaN) {
  for (uint32_t mantissa = 1; mantissa < 0x800000; mantissa += 7) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      ASSERT_TRUE(std::isnan(ToFloat(Bf16FromFloat(FloatOfBits(0x7F800000u | sign | mantissa))))) << mantissa;
    }
  }
  EXPECT_TRUE(std::isnan(RoundToBf16(FloatOfBits(0x7FFFFFFF))));
}

TEST(E4m3, DecodesEveryCodeByDefinition) {
  for (const Value& expected : E4m3Magnitudes()) {
    const float positive = ToFloat(E4m3{static_cast<uint8_t>(expected.code)});
    const float negative = ToFloat(E4m3{static_cast<uint8_t>(expected.code | 0x80)});
    EXPECT_EQ(static_cast<double>(positive), expected.value) << expected.code;
    EXPECT_EQ(static_cast<double>(negative), -expected.value) << expected.code;
    EXPECT_FALSE(std::signbit(positive));
    EXPECT_TRUE(std::signbit(negative));
  }
  EXPECT_EQ(ToFloat(E4m3{0x7E}), 448.0f);
  EXPECT_TRUE(std::isnan(ToFloat(E4m3{0x7F})));
  EXPECT_TRUE(std::isnan(ToFloat(E4m3{0xFF})));
}

TEST(E4m3, EncodesToNearestEvenAndSaturates) {
  for (float magnitude : InterestingMagnitudes(E4m3Magnitudes())) {
    const int expected = NearestCode(E4m3Magnitudes(), magnitude);
    EXPECT_EQ(E4m3FromFloat(magnitude).bits, expected) << std::hexfloat << magnitude;
    EXPECT_EQ(E4m3FromFloat(-magnitude).bits, expected | 0x80) << std::hexfloat << -magnitude;
  }
}

TEST(E4m3, EncodesRandomFloatsToNearestEven) {
  std::mt19937 engine(2);
  for (int i = 0; i < 200000; ++i) {
    // Exponents of 2^-13 to 2^10 around the format's range.
    const uint32_t exponent = 114 + static_cast<uint32_t>(engine()) % 24;
    const float x = FloatOfBits((exponent << 23) | (static_cast<uint32_t>(engine()) & 0x7FFFFFu));
    ASSERT_EQ(E4m3FromFloat(x).bits, NearestCode(E4m3Magnitudes(), x)) << std::hexfloat << x;
  }
}

TEST(E4m3, InfinitySaturatesAndNaNStaysNaN) {
  EXPECT_EQ(E4m3FromFloat(kInfinity).bits, 0x7E);
  EXPECT_EQ(E4m3FromFloat(-kInfinity).bits, 0xFE);
  EXPECT_EQ(E4m3FromFloat(kNaN).bits & 0x7F, 0x7F);
  EXPECT_EQ(E4m3FromFloat(FloatOfBits(0x7F800001)).bits & 0x7F, 0x7F);
  EXPECT_EQ(E4m3FromFloat(FloatOfBits(0xFFFFFFFF)).bits & 0x7F, 0x7F);
  EXPECT_EQ(E4m3FromFloat(0.0f).bits, 0x00);
  EXPECT_EQ(E4m3FromFloat(-0.0f).bits, 0x80);
}

TEST(E2m1, DecodesEveryCodeByDefinition) {
  const double table[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (const Value& expected : E2m1Magnitudes()) {
    EXPECT_EQ(expected.value, table[expected.code]);
    const float positive = ToFloat(E2m1{static_cast<uint8_t>(expected.code)});
    const float negative = ToFloat(E2m1{static_cast<uint8_t>(expected.code | 8)});
    EXPECT_EQ(static_cast<double>(positive), expected.value) << expected.code;
    EXPECT_EQ(static_cast<double>(negative), -expected.value) << expected.code;
    EXPECT_FALSE(std::signbit(positive));
    EXPECT_TRUE(std::signbit(negative));
  }
}

TEST(E2m1, EncodesToNearestEvenAndSaturates) {
  for (float magnitude : InterestingMagnitudes(E2m1Magnitudes())) {
    const int expected = NearestCode(E2m1Magnitudes(), magnitude);
    EXPECT_EQ(E2m1FromFloat(magnitude).bits, expected) << std::hexfloat << magnitude;
    EXPECT_EQ(E2m1FromFloat(-magnitude).bits, expected | 8) << std::hexfloat << -magnitude;
  }
  // The ties on which sources differ (specification, section 11, item 18).
  EXPECT_EQ(ToFloat(E2m1FromFloat(0.25f)), 0.0f);
  EXPECT_EQ(ToFloat(E2m1FromFloat(0.75f)), 1.0f);
  EXPECT_EQ(ToFloat(E2m1FromFloat(1.75f)), 2.0f);
  EXPECT_EQ(ToFloat(E2m1FromFloat(3.5f)), 4.0f);
}

TEST(E2m1, InfinitySaturatesAndNaNIsSix) {
  EXPECT_EQ(E2m1FromFloat(kInfinity).bits, 7);
  EXPECT_EQ(E2m1FromFloat(-kInfinity).bits, 15);
  EXPECT_EQ(E2m1FromFloat(kNaN).bits, 7);
  EXPECT_EQ(E2m1FromFloat(-kNaN).bits, 7);
}

TEST(E8m0, DecodesEveryByteByDefinition) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(static_cast<double>(ToFloat(E8m0{static_cast<uint8_t>(byte)})), std::ldexp(1.0, byte - 127)) << byte;
  }
  EXPECT_TRUE(std::isnan(ToFloat(E8m0{255})));
}

}  // namespace
}  // namespace dsv4
