#include "model/numeric_options.h"

#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

TEST(Precision, NamesAreParsed) {
  for (Precision precision : {Precision::kFp32, Precision::kBf16, Precision::kPublished}) {
    DSV4_ASSERT_OK_AND_ASSIGN(const Precision parsed, ParsePrecision(PrecisionName(precision)));
    EXPECT_EQ(parsed, precision);
  }
  EXPECT_EQ(PrecisionName(Precision::kFp32), "fp32");
  EXPECT_EQ(PrecisionName(Precision::kBf16), "bf16");
  EXPECT_EQ(PrecisionName(Precision::kPublished), "published");
}

TEST(Precision, OtherNamesAreRefused) {
  for (const char* name : {"", "FP32", "fp16", "bf16 ", "published precision"}) {
    EXPECT_THAT(ParsePrecision(name), StatusIs(absl::StatusCode::kInvalidArgument,
                                               std::string("expected fp32, bf16 or published, got \"") + name + "\""));
  }
}

TEST(NumericOptions, NamesTheIndexerFormats) {
  EXPECT_EQ(ParseIndexerFormat("fp8").value(), RowFormat::kFp8Key);
  EXPECT_EQ(ParseIndexerFormat("mxfp4").value(), RowFormat::kMxfp4Key);
  EXPECT_THAT(ParseIndexerFormat("fp4"),
              StatusIs(absl::StatusCode::kInvalidArgument, "indexer: expected fp8 or mxfp4, got \"fp4\""));
}

TEST(NumericOptions, Fp32QuantisesNothing) {
  for (RowFormat format : {RowFormat::kFp8Key, RowFormat::kMxfp4Key}) {
    const NumericOptions numeric = {.precision = Precision::kFp32, .indexer_format = format};
    EXPECT_EQ(numeric.activation_dtype(), DType::kF32);
    EXPECT_EQ(numeric.row_format(), RowFormat::kF32);
    EXPECT_EQ(numeric.key_format(), RowFormat::kF32);
    EXPECT_FALSE(numeric.quantize_activations());
  }
}

TEST(NumericOptions, QuantisedPrecisionsDifferInTheirActivations) {
  for (RowFormat format : {RowFormat::kFp8Key, RowFormat::kMxfp4Key}) {
    for (Precision precision : {Precision::kBf16, Precision::kPublished}) {
      const NumericOptions numeric = {.precision = precision, .indexer_format = format};
      EXPECT_EQ(numeric.activation_dtype(), DType::kBf16);
      EXPECT_EQ(numeric.row_format(), RowFormat::kFp8);
      EXPECT_EQ(numeric.key_format(), format);
      EXPECT_EQ(numeric.quantize_activations(), precision == Precision::kPublished);
    }
  }
}

}  // namespace
}  // namespace dsv4
