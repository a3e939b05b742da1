// How the model computes: which roundings and quantisations a run has.
#ifndef DSV4_MODEL_NUMERIC_OPTIONS_H_
#define DSV4_MODEL_NUMERIC_OPTIONS_H_

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"

namespace dsv4 {

enum class Precision : uint8_t {
  kFp32,       // no quantisation anywhere, fp32 activations and caches: the oracle
  kBf16,       // bf16 activations, e4m3 rows in the published page layout, quantised indexer keys
  kPublished,  // the same, and activations quantised to e4m3 before FP8 and FP4 weights
};

// "fp32", "bf16", "published".
std::string_view PrecisionName(Precision precision);
absl::StatusOr<Precision> ParsePrecision(std::string_view name);

// "fp8", "mxfp4": the formats of an indexer's keys, as flags name them.
absl::StatusOr<RowFormat> ParseIndexerFormat(std::string_view name);

struct NumericOptions {
  Precision precision = Precision::kPublished;
  RowFormat indexer_format = RowFormat::kFp8Key;  // or kMxfp4Key; fp32 precision keeps keys in fp32
  bool hadamard = true;                           // rotate indexer queries and keys; both or neither

  DType activation_dtype() const { return precision == Precision::kFp32 ? DType::kF32 : DType::kBf16; }
  RowFormat row_format() const { return precision == Precision::kFp32 ? RowFormat::kF32 : RowFormat::kFp8; }
  RowFormat key_format() const { return precision == Precision::kFp32 ? RowFormat::kF32 : indexer_format; }
  bool quantize_activations() const { return precision == Precision::kPublished; }
};

}  // namespace dsv4

#endif  // DSV4_MODEL_NUMERIC_OPTIONS_H_
