#include "runtime/block_scale.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"
#include "runtime/dtype.h"

namespace dsv4 {
namespace {

int CeilLog2InDouble(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent);  // in [0.5, 1)
  return fraction == 0.5 ? exponent - 1 : exponent;
}

TEST(BlockScale, Fp8AgreesWithTheGoldenVectors) {
  struct Golden {
    float largest;
    int exponent;
    int byte;
    int code;
  };
  const Golden table[] = {
      {0.0f, -22, 105, 0x00}, {1.0f, -8, 119, 0x78},  {1.75f, -8, 119, 0x7E},
      {1.7578125f, -7, 120, 0x76}, {448.0f, 0, 127, 0x7E}, {450.0f, 1, 128, 0x76},
  };
  for (const Golden& golden : table) {
    const int exponent = Fp8ScaleExponent(golden.largest);
    EXPECT_EQ(exponent, golden.exponent) << golden.largest;
    EXPECT_EQ(E8m0FromExponent(exponent).bits, golden.byte) << golden.largest;
    EXPECT_EQ(E4m3FromFloat(golden.largest * PowerOfTwo(-exponent)).bits, golden.code) << golden.largest;
  }
}

TEST(BlockScale, Mxfp4AgreesWithTheGoldenVectors) {
  EXPECT_EQ(Mxfp4ScaleExponent(6.0f), 0);
  EXPECT_EQ(E8m0FromExponent(0).bits, 127);
  EXPECT_EQ(Mxfp4ScaleExponent(1.0f), -2);
  EXPECT_EQ(E8m0FromExponent(-2).bits, 125);
  EXPECT_EQ(E2m1FromFloat(1.0f * PowerOfTwo(2)).bits, 6);
  EXPECT_EQ(Mxfp4ScaleExponent(6.03125f), 1);
  EXPECT_EQ(E8m0FromExponent(1).bits, 128);
  EXPECT_EQ(Mxfp4ScaleExponent(0.0f), -126);
  EXPECT_EQ(E8m0FromExponent(-126).bits, 1);
}

TEST(BlockScale, ExponentsOfEveryBf16MagnitudeAreThoseOfExactArithmetic) {
  for (uint32_t code = 0; code < 0x7F80; ++code) {
    const float x = ToFloat(Bf16{static_cast<uint16_t>(code)});
    const double floored8 = std::fmax(static_cast<double>(x), static_cast<double>(kFp8ScaleFloor));
    const double floored4 = std::fmax(static_cast<double>(x), 6 * 0x1p-126);
    ASSERT_EQ(Fp8ScaleExponent(x), CeilLog2InDouble(floored8 / 448)) << std::hexfloat << x;
    ASSERT_EQ(Mxfp4ScaleExponent(x), CeilLog2InDouble(floored4 / 6)) << std::hexfloat << x;
  }
}

TEST(BlockScale, EveryBf16MagnitudeFitsItsScale) {
  for (uint32_t code = 0; code < 0x7F80; ++code) {
    const float x = ToFloat(Bf16{static_cast<uint16_t>(code)});
    const int exponent8 = Fp8ScaleExponent(x);
    const int exponent4 = Mxfp4ScaleExponent(x);
    ASSERT_LE(x * PowerOfTwo(-exponent8), 448.0f) << std::hexfloat << x;
    ASSERT_LE(x * PowerOfTwo(-exponent4), 6.0f) << std::hexfloat << x;
    // And half the scale would not do.
    if (x > kFp8ScaleFloor) {
      ASSERT_GT(static_cast<double>(x) * std::ldexp(1.0, 1 - exponent8), 448.0);
    }
    if (x > kMxfp4ScaleFloor) {
      ASSERT_GT(static_cast<double>(x) * std::ldexp(1.0, 1 - exponent4), 6.0);
    }
  }
}

TEST(BlockScale, CeilLog2IsExactAroundPowersOfTwo) {
  for (int exponent = -126; exponent <= 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    EXPECT_EQ(CeilLog2(power), exponent);
    EXPECT_EQ(CeilLog2(std::nextafter(power, std::numeric_limits<float>::infinity())), exponent + 1);
    if (exponent > -126) {
      EXPECT_EQ(CeilLog2(std::nextafter(power, 0.0f)), exponent);
    }
    EXPECT_EQ(PowerOfTwo(exponent), power);
  }
}

TEST(BlockScale, ByteIsClampedToWhatIsANumber) {
  EXPECT_EQ(E8m0FromExponent(-128).bits, 0);
  EXPECT_EQ(E8m0FromExponent(-127).bits, 0);
  EXPECT_EQ(E8m0FromExponent(127).bits, 254);
  EXPECT_EQ(E8m0FromExponent(128).bits, 254);
}

}  // namespace
}  // namespace dsv4
