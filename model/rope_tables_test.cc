#include "model/rope_tables.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace dsv4 {
namespace {

// What the tables of both published models are made from.
ModelConfig Published() {
  ModelConfig config;
  config.qk_rope_head_dim = 64;
  config.rope_theta = 10000.0;
  config.compress_rope_theta = 160000.0;
  config.yarn = {.factor = 16.0, .beta_fast = 32.0, .beta_slow = 1.0, .original_max_position_embeddings = 65536};
  return config;
}

std::vector<float> Row(const ModelConfig& config, bool compressed, int64_t position) {
  std::vector<float> row(static_cast<size_t>(config.qk_rope_head_dim));
  FillRopeRow(RopeFrequencies(config, compressed), position, row.data());
  return row;
}

// Rounding once to fp32 moves a value by at most 2^-24 of it; the golden list has ten digits.
constexpr double kOneRounding = 0x1p-24 + 1e-9;

TEST(RopeFrequencies, CompressedLayersHaveThoseOfTheSpecification) {
  // Specification, section 4.2.
  const double expected[32] = {
      1.000000000e+00, 6.876560219e-01, 4.728708045e-01, 3.251724563e-01, 2.236067977e-01, 1.537645610e-01,
      1.057371263e-01, 7.271077167e-02, 5.000000000e-02, 3.438280110e-02, 2.364354023e-02, 1.625862282e-02,
      1.118033989e-02, 7.688228051e-03, 5.286856317e-03, 3.635538584e-03, 2.265625000e-03, 1.396801295e-03,
      8.496897268e-04, 5.080819630e-04, 2.969777783e-04, 1.681799886e-04, 9.086784295e-05, 4.544423230e-05,
      1.953125000e-05, 5.372312671e-06, 3.694303160e-06, 2.540409815e-06, 1.746928107e-06, 1.201285633e-06,
      8.260712996e-07, 5.680529037e-07,
  };
  const std::vector<float> frequencies = RopeFrequencies(Published(), /*compressed=*/true);
  ASSERT_EQ(frequencies.size(), 32u);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(frequencies[i], expected[i], expected[i] * kOneRounding) << "pair " << i;
  }
}

TEST(RopeFrequencies, OtherLayersHavePlainPowersOfTheirBase) {
  const std::vector<float> frequencies = RopeFrequencies(Published(), /*compressed=*/false);
  ASSERT_EQ(frequencies.size(), 32u);
  for (size_t i = 0; i < 32; ++i) {
    const double expected = std::pow(10000.0, -static_cast<double>(i) / 32.0);
    EXPECT_NEAR(frequencies[i], expected, expected * kOneRounding) << "pair " << i;
  }
}

// The blend's ends by hand: corr(n) = 64 ln(L / (2 pi n)) / (2 ln 160000). L = 128: corr(32) = -1.2 and corr(1) = 8.04,
// so pairs 0 to 9. L = 2^38: corr(32) = 56.2, past all pairs, so that none is stretched.
TEST(RopeFrequencies, ClampsTheEndsOfTheBlend) {
  ModelConfig config = Published();
  config.yarn.original_max_position_embeddings = 128;
  const std::vector<float> tiny = RopeFrequencies(config, true);
  for (size_t i = 0; i < 32; ++i) {
    const double plain = std::pow(160000.0, -static_cast<double>(i) / 32.0);
    const double ramp = i >= 9 ? 1.0 : static_cast<double>(i) / 9.0;
    const double expected = plain * (1.0 - ramp) + plain / 16.0 * ramp;
    EXPECT_NEAR(tiny[i], expected, expected * kOneRounding) << "pair " << i;
  }
  config.yarn.original_max_position_embeddings = int64_t{1} << 38;
  const std::vector<float> unstretched = RopeFrequencies(config, true);
  for (size_t i = 0; i < 32; ++i) {
    const double expected = std::pow(160000.0, -static_cast<double>(i) / 32.0);
    EXPECT_NEAR(unstretched[i], expected, expected * kOneRounding) << "pair " << i;
  }
}

// L = 6: corr(1) = -0.12 rounds up to 0, which is also where the lower end is clamped: the ends are equal, and all
// pairs but the first are slow.
TEST(RopeFrequencies, EqualEndsAreAStep) {
  ModelConfig config = Published();
  config.yarn.original_max_position_embeddings = 6;
  const std::vector<float> frequencies = RopeFrequencies(config, true);
  EXPECT_EQ(frequencies[0], 1.0f);
  for (size_t i = 1; i < 32; ++i) {
    const double expected = std::pow(160000.0, -static_cast<double>(i) / 32.0) / 16.0;
    EXPECT_NEAR(frequencies[i], expected, expected * kOneRounding) << "pair " << i;
  }
}

TEST(RopeTable, HasTheGoldenSamplesOfTheSpecification) {
  // Specification, section 4.3; nine digits of values that were rounded to fp32.
  const struct {
    bool compressed;
    int64_t position;
    size_t pair;
    float angle;
    double cosine;
    double sine;
  } samples[] = {
      {true, 127, 1, 87.3323212f, 0.806686223, -0.590979993},
      {true, 4096, 16, 9.27999973f, -0.989537954, 0.144272983},
      {true, 65536, 24, 1.27999997f, 0.286715239, 0.958015859},
      {true, 1000000, 31, 0.568052888f, 0.842950106, 0.537991762},
      {false, 127, 1, 95.2365646f, 0.549705207, 0.835358739},
      {false, 4096, 31, 0.546210408f, 0.854499161, 0.519452751},
  };
  for (const auto& sample : samples) {
    const std::vector<float> frequencies = RopeFrequencies(Published(), sample.compressed);
    EXPECT_EQ(static_cast<float>(sample.position) * frequencies[sample.pair], sample.angle);
    const std::vector<float> row = Row(Published(), sample.compressed, sample.position);
    EXPECT_NEAR(row[sample.pair], sample.cosine, 0x1p-25 + 1e-9);
    EXPECT_NEAR(row[32 + sample.pair], sample.sine, 0x1p-25 + 1e-9);
  }
}

TEST(RopeTable, RowsAreCosinesThenSines) {
  for (const bool compressed : {false, true}) {
    const std::vector<float> table = RopeTable(Published(), compressed, 33);
    ASSERT_EQ(table.size(), 33u * 64u);
    for (int64_t position = 0; position < 33; ++position) {
      const std::vector<float> row(table.begin() + position * 64, table.begin() + (position + 1) * 64);
      EXPECT_EQ(row, Row(Published(), compressed, position));
    }
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(table[i], 1.0f);
      EXPECT_EQ(table[32 + i], 0.0f);
    }
    EXPECT_NEAR(table[64], std::cos(1.0), 0x1p-25);
    EXPECT_NEAR(table[64 + 32], std::sin(1.0), 0x1p-25);
  }
  EXPECT_TRUE(RopeTable(Published(), true, 0).empty());
}

// The last bit of a rounded value below 1 is worth at most 2^-24: half of that, from any angle whatever its size.
TEST(RopeTable, IsAccurateAtTheLargestPositions) {
  for (const bool compressed : {false, true}) {
    const std::vector<float> frequencies = RopeFrequencies(Published(), compressed);
    for (const int64_t position : {1, 65535, 65536, 999999, 1000000, 1048575}) {
      const std::vector<float> row = Row(Published(), compressed, position);
      for (size_t i = 0; i < 32; ++i) {
        const long double angle = static_cast<float>(position) * frequencies[i];
        EXPECT_NEAR(row[i], static_cast<double>(std::cos(angle)), 0x1p-25) << position << " pair " << i;
        EXPECT_NEAR(row[32 + i], static_cast<double>(std::sin(angle)), 0x1p-25) << position << " pair " << i;
      }
    }
  }
}

// The published model's angle is a product in fp32: at position 1000000 pair 1 is 0.041 rad from the exact one
// (specification, section 4.3), and a table that "improved" on it would not agree with the model.
TEST(RopeTable, KeepsTheErrorOfTheFp32Angle) {
  const double exact = 1e6 * std::pow(160000.0, -1.0 / 32.0);
  const std::vector<float> row = Row(Published(), true, 1000000);
  const double difference = std::remainder(std::atan2(row[32 + 1], row[1]) - exact, 2.0 * 3.14159265358979323846);
  EXPECT_NEAR(std::abs(difference), 0.041, 0.0005);
}

}  // namespace
}  // namespace dsv4
