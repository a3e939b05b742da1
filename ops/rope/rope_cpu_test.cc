#include "ops/rope/rope_cpu.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;

// A row of the table: cosines, then sines, of these angles.
std::vector<float> Rotation(const std::vector<double>& angles) {
  std::vector<float> row;
  for (const double angle : angles) row.push_back(static_cast<float>(std::cos(angle)));
  for (const double angle : angles) row.push_back(static_cast<float>(std::sin(angle)));
  return row;
}

TEST(Rotate, TurnsNeighbouringChannelsTogether) {
  std::vector<float> values = {1, 2, 3, 4};
  const std::vector<float> quarter_and_none = {0, 1, 1, 0};  // cosines 0 and 1, sines 1 and 0
  RotateCpu(values.data(), 4, quarter_and_none.data());
  EXPECT_THAT(values, ElementsAre(-2, 1, 3, 4));
  RotateInverseCpu(values.data(), 4, quarter_and_none.data());
  EXPECT_THAT(values, ElementsAre(1, 2, 3, 4));
}

TEST(Rotate, MultipliesByTheComplexUnit) {
  for (const int64_t channels : {2, 6, 64}) {
    std::vector<double> angles;
    for (int64_t i = 0; i < channels / 2; ++i) angles.push_back(0.37 * static_cast<double>(i + 1));
    const std::vector<float> rotation = Rotation(angles), input = RandomFloats(channels, 3);
    std::vector<float> values = input, expected;
    for (int64_t i = 0; i < channels / 2; ++i) {
      const double radius = std::hypot(input[2 * i], input[2 * i + 1]);
      const double angle = std::atan2(input[2 * i + 1], input[2 * i]) + angles[i];
      expected.push_back(static_cast<float>(radius * std::cos(angle)));
      expected.push_back(static_cast<float>(radius * std::sin(angle)));
    }
    RotateCpu(values.data(), channels, rotation.data());
    // Three roundings of 2^-24 and those of the table.
    EXPECT_TRUE(IsClose(values, expected, channels, 2e-7));
  }
}

TEST(Rotate, InverseUndoesItToRoundingAtAMillion) {
  std::vector<double> angles;
  for (int64_t i = 0; i < 32; ++i) {
    const float frequency = std::pow(160000.0f, -2.0f * static_cast<float>(i) / 64.0f);
    angles.push_back(1e6f * frequency);
  }
  const std::vector<float> rotation = Rotation(angles), input = RandomFloats(64, 5);
  std::vector<float> values = input;
  RotateCpu(values.data(), 64, rotation.data());
  EXPECT_FALSE(IsClose(values, input, 64, 0.1));
  RotateInverseCpu(values.data(), 64, rotation.data());
  EXPECT_TRUE(IsClose(values, input, 64, 3e-7));
}

TEST(Rotate, TouchesItsChannelsOnly) {
  const TestTensor values(DType::kF32, {6}, RandomFloats(6, 7));
  const std::vector<float> rotation = Rotation({1, 2});
  const float first = values.data<float>()[0], last = values.data<float>()[5];
  RotateCpu(values.data<float>() + 1, 4, rotation.data());
  RotateInverseCpu(values.data<float>() + 1, 4, rotation.data());
  EXPECT_EQ(values.data<float>()[0], first);
  EXPECT_EQ(values.data<float>()[5], last);
  values.CheckGuards();
}

TEST(Hadamard, HasTheSignsOfSylvestersMatrix) {
  for (const int64_t channels : {1, 2, 4, 64, 128}) {
    const std::vector<float> input = RandomFloats(channels, 9);
    std::vector<float> values = input, expected;
    for (int64_t a = 0; a < channels; ++a) {
      double sum = 0;
      for (int64_t b = 0; b < channels; ++b) {
        sum += std::popcount(static_cast<uint64_t>(a & b)) % 2 == 0 ? input[b] : -input[b];
      }
      expected.push_back(static_cast<float>(sum / std::sqrt(static_cast<double>(channels))));
    }
    HadamardCpu(values.data(), channels);
    // Up to seven levels of sums, each rounded to 2^-24, and the scale's two roundings.
    EXPECT_TRUE(IsClose(values, expected, channels, 3e-7)) << channels;
  }
}

TEST(Hadamard, KeepsLengthsAndUndoesItself) {
  const std::vector<float> input = RandomFloats(128, 11);
  std::vector<float> values = input;
  HadamardCpu(values.data(), 128);
  double before = 0, after = 0;
  for (int64_t i = 0; i < 128; ++i) {
    before += static_cast<double>(input[i]) * input[i];
    after += static_cast<double>(values[i]) * values[i];
  }
  EXPECT_NEAR(after, before, before * 1e-6);
  HadamardCpu(values.data(), 128);
  EXPECT_TRUE(IsClose(values, input, 128, 1e-6));
}

}  // namespace
}  // namespace dsv4
