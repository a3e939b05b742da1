#include "model/numeric_options.h"

#include "runtime/str_cat.h"

namespace dsv4 {

std::string_view PrecisionName(Precision precision) {
  switch (precision) {
    case Precision::kFp32:
      return "fp32";
    case Precision::kBf16:
      return "bf16";
    case Precision::kPublished:
      return "published";
  }
  return "?";
}

absl::StatusOr<Precision> ParsePrecision(std::string_view name) {
  for (Precision precision : {Precision::kFp32, Precision::kBf16, Precision::kPublished}) {
    if (name == PrecisionName(precision)) return precision;
  }
  return absl::InvalidArgumentError(
      StrCat("precision: expected fp32, bf16 or published, got \"", name, "\""));
}

absl::StatusOr<RowFormat> ParseIndexerFormat(std::string_view name) {
  if (name == "fp8") return RowFormat::kFp8Key;
  if (name == "mxfp4") return RowFormat::kMxfp4Key;
  return absl::InvalidArgumentError(StrCat("indexer: expected fp8 or mxfp4, got \"", name, "\""));
}

}  // namespace dsv4
