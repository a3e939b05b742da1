// Compares a checkpoint's decoding with an expected file (tests/data/README.md says what one holds): end to end, all
// sequences in one continuously batched engine with pads and forced tokens, and layer by layer.
#ifndef DSV4_TESTS_GOLDEN_CHECK_H_
#define DSV4_TESTS_GOLDEN_CHECK_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/numeric_options.h"
#include "runtime/device.h"

namespace dsv4 {

struct GoldenOptions {
  std::string checkpoint;  // a folder
  std::string expected;    // a file
  // What the file asks for in __metadata__.precision is the precision of the bounds; `precision` is what runs, by default the
  // same. Without metadata it is required and gives both.
  std::optional<Precision> precision;
  RowFormat indexer_format = RowFormat::kMxfp4Key;
  bool hadamard = true;
  int64_t prefill_chunk = 24;
  int64_t extra_pads = 3;
};

struct GoldenVerdict {
  std::vector<std::string> failures;  // a line for each bound that does not hold
  int64_t bounds_checked = 0;

  bool passed() const { return bounds_checked > 0 && failures.empty(); }
};

// Prints a table to `out` as it goes. An error if a file cannot be read or does not fit the checkpoint.
absl::StatusOr<GoldenVerdict> CheckGolden(Device& device, const GoldenOptions& options, std::ostream& out);

}  // namespace dsv4

#endif  // DSV4_TESTS_GOLDEN_CHECK_H_
