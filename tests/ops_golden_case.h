// One case of a golden file of the compressor's ops: inputs of a step, and what another implementation made of them.
// A file holds cases under names such as "c4_h512_fp8": ratio 4, head size 512, format fp8 (with head size 128: indexer
// keys). tests/data/README.md describes the tensors.
//
//   DSV4_ASSIGN_OR_RETURN(std::vector<std::string> names, FindOpsGoldenCases(file));
//   DSV4_ASSIGN_OR_RETURN(OpsGoldenCase golden, LoadOpsGoldenCase(file, names[0]));
//   DSV4_ASSIGN_OR_RETURN(OpsGoldenCounts counts, RunOpsGoldenCase(*device, golden));
//   if (!counts.Holds()) std::cout << counts.ToString();
#ifndef DSV4_TESTS_OPS_GOLDEN_CASE_H_
#define DSV4_TESTS_OPS_GOLDEN_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/safetensors.h"

namespace dsv4 {

struct OpsGoldenCase {
  std::string name;
  int64_t ratio = 0;
  bool overlap = false;
  RowFormat format = RowFormat::kFp8;
  int64_t head_size = 0;
  int64_t rope_size = 0;

  int64_t tokens = 0;                     // T
  int64_t state_width = 0;                // W
  std::vector<float> kv_score;            // [T, 2W]
  std::vector<float> ape;                 // [ratio, W]
  std::vector<int64_t> positions;         // [T]
  std::vector<int32_t> token_to_request;  // [T]
  std::vector<int64_t> slot_mapping;      // [T]

  int64_t num_blocks = 0, block_size = 0;
  std::vector<float> state_cache_before;  // [num_blocks, block_size, 2W]
  int64_t num_requests = 0, table_blocks = 0;
  std::vector<int32_t> block_table;  // [num_requests, table_blocks]

  std::vector<Bf16> rms_weight;  // [head_size]
  float eps = 1e-6f;
  int64_t num_positions = 0;
  std::vector<float> cos_sin;            // [num_positions, rope_size]
  std::vector<int64_t> kv_slot_mapping;  // [T]
  int64_t rows_per_page = 0;

  std::vector<float> state_rows_after;  // [live tokens, 2W], in the order of the tokens
  int64_t num_pages = 0, page_bytes = 0;
  std::vector<uint8_t> kv_cache_bytes;  // [num_pages, page_bytes]

  bool IsLive(int64_t token) const { return slot_mapping[token] >= 0; }
  bool WritesEntry(int64_t token) const {
    return IsLive(token) && (positions[token] + 1) % ratio == 0 && kv_slot_mapping[token] >= 0;
  }
};

// How far what the ops wrote is from what the file holds.
struct OpsGoldenCounts {
  struct Count {
    int64_t compared = 0;
    int64_t differing = 0;
    int64_t differing_by_more_than_one = 0;  // codes, or units in the last place
  };
  int64_t tokens = 0, live_tokens = 0, entries = 0;
  Count saved_values;     // of the live tokens' state rows: bit for bit
  Count other_values;     // of all other state rows: unchanged, bit for bit
  Count scale_bytes;      // none may differ
  Count e4m3_codes;       // at most max(2, 0.2 %), by one code
  Count bf16_values;      // at most max(2, 1 %), by one unit in the last place
  Count untouched_bytes;  // 0 in the file and in what was written

  int64_t allowed_codes() const;
  int64_t allowed_bf16() const;
  bool SaveHolds() const { return saved_values.differing == 0 && other_values.differing == 0; }
  bool StoreHolds() const;
  bool Holds() const { return SaveHolds() && StoreHolds(); }
  // Three lines.
  std::string ToString() const;
};

// The names of the file's cases. InvalidArgument if there is none or a tensor belongs to no case.
absl::StatusOr<std::vector<std::string>> FindOpsGoldenCases(const SafetensorsFile& file);

// NotFound or InvalidArgument, naming file, case and tensor, if a tensor is missing, has another dtype or shape than
// the others imply, or holds an index that points outside of another.
absl::StatusOr<OpsGoldenCase> LoadOpsGoldenCase(const SafetensorsFile& file, const std::string& name);
absl::Status CheckOpsGoldenCase(const OpsGoldenCase& golden);

// Saves, compresses and stores on the device, and compares.
absl::StatusOr<OpsGoldenCounts> RunOpsGoldenCase(Device& device, const OpsGoldenCase& golden);

// The state cache and the pages that the ops make of a case's inputs; pages of another format than the case's are those
// that PageStrideBytes gives. Nothing is compared.
struct OpsGoldenOutput {
  std::vector<float> state_cache;
  std::vector<uint8_t> pages;
};
absl::StatusOr<OpsGoldenOutput> ComputeOpsGoldenCase(Device& device, const OpsGoldenCase& golden, RowFormat format);
OpsGoldenCounts CompareOpsGolden(const OpsGoldenCase& golden, const OpsGoldenOutput& output);

}  // namespace dsv4

#endif  // DSV4_TESTS_OPS_GOLDEN_CASE_H_
