#include "tests/ops_golden_case.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "ops/compress_store/compress_store.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {
namespace {

// Far past any context, and far from what could overflow.
constexpr int64_t kMaxPosition = int64_t{1} << 40;

// Memory of the device that frees itself.
class DeviceTensor {
 public:
  static absl::StatusOr<DeviceTensor> Create(Device& device, DType dtype, std::initializer_list<int64_t> extents) {
    DeviceTensor tensor;
    tensor.view_ = TensorView::Contiguous(nullptr, dtype, extents);
    DSV4_ASSIGN_OR_RETURN(tensor.view_.data, device.Allocate(tensor.view_.num_bytes()));
    tensor.device_ = &device;
    return tensor;
  }
  DeviceTensor(DeviceTensor&& other) noexcept : device_(std::exchange(other.device_, nullptr)), view_(other.view_) {}
  DeviceTensor& operator=(DeviceTensor&&) = delete;
  ~DeviceTensor() {
    if (device_ != nullptr) device_->Free(view_.data);
  }
  const TensorView& view() const { return view_; }

 private:
  DeviceTensor() = default;
  Device* device_ = nullptr;
  TensorView view_;
};

template <typename T>
absl::StatusOr<DeviceTensor> Upload(Device& device, Stream& stream, const std::vector<T>& values,
                                    std::initializer_list<int64_t> extents) {
  DSV4_ASSIGN_OR_RETURN(DeviceTensor tensor, DeviceTensor::Create(device, DTypeOf<T>::value, extents));
  DSV4_RETURN_IF_ERROR(stream.CopyToDevice(tensor.view().data, values.data(), tensor.view().num_bytes()));
  return tensor;
}

// Ratio, head size and format of a name such as "c4_h512_fp8"; whatever follows a further underscore is a label.
struct CaseName {
  int64_t ratio = 0;
  int64_t head_size = 0;
  RowFormat format = RowFormat::kFp8;
};

absl::StatusOr<CaseName> ParseCaseName(const std::string& name) {
  constexpr int64_t kIndexerHeadSize = 128;
  CaseName parsed;
  const std::vector<std::string> parts = absl::StrSplit(name, '_');
  const auto number = [](const std::string& part, char prefix, int64_t* value) {
    return part.size() > 1 && part[0] == prefix && absl::SimpleAtoi(part.substr(1), value) && *value >= 1 &&
           *value <= (int64_t{1} << 20);
  };
  if (parts.size() < 3 || !number(parts[0], 'c', &parsed.ratio) || !number(parts[1], 'h', &parsed.head_size) ||
      parts[2] != "fp8") {
    return absl::InvalidArgumentError(
        StrCat("case \"", name, "\": expected a name such as c4_h512_fp8: ratio, head size, format fp8"));
  }
  parsed.format = parsed.head_size == kIndexerHeadSize ? RowFormat::kFp8Key : RowFormat::kFp8;
  return parsed;
}

// What a byte of an entry page is.
enum class ByteKind : uint8_t { kUntouched, kScale, kCode, kBf16Low, kBf16High };

// The layout of specification sections 5.6 and 5.7, written down once more, independently of the codec under test.
void MarkEntry(const OpsGoldenCase& golden, int64_t slot, std::vector<ByteKind>& kinds) {
  const int64_t row = slot % golden.rows_per_page;
  ByteKind* const page = kinds.data() + slot / golden.rows_per_page * golden.page_bytes;
  if (golden.format == RowFormat::kFp8Key) {
    std::fill_n(page + row * golden.head_size, golden.head_size, ByteKind::kCode);
    std::fill_n(page + golden.rows_per_page * golden.head_size + 4 * row, 4, ByteKind::kScale);
    return;
  }
  const int64_t codes = golden.head_size - golden.rope_size;
  const int64_t value_bytes = codes + 2 * golden.rope_size;
  const int64_t scale_bytes = (codes / 64 + 7) / 8 * 8;
  ByteKind* const values = page + row * value_bytes;
  std::fill_n(values, codes, ByteKind::kCode);
  for (int64_t i = 0; i < golden.rope_size; ++i) {
    values[codes + 2 * i] = ByteKind::kBf16Low;
    values[codes + 2 * i + 1] = ByteKind::kBf16High;
  }
  // Behind the scales are pad bytes, 0 like untouched ones.
  std::fill_n(page + golden.rows_per_page * value_bytes + row * scale_bytes, codes / 64, ByteKind::kScale);
}

// Steps from 0 on a sign-and-magnitude number line, so that neighbouring codes differ by one.
int64_t Steps(uint32_t bits, uint32_t sign_bit) {
  const int64_t magnitude = bits & (sign_bit - 1);
  return (bits & sign_bit) != 0 ? -magnitude : magnitude;
}

void Compare(uint32_t actual, uint32_t expected, uint32_t sign_bit, uint32_t largest_number,
             OpsGoldenCounts::Count* count) {
  count->compared += 1;
  if (actual == expected) return;
  count->differing += 1;
  const bool is_nan = (actual & (sign_bit - 1)) > largest_number || (expected & (sign_bit - 1)) > largest_number;
  if (is_nan || std::abs(Steps(actual, sign_bit) - Steps(expected, sign_bit)) > 1) {
    count->differing_by_more_than_one += 1;
  }
}

bool SameBits(const float* a, const float* b) { return std::memcmp(a, b, sizeof(float)) == 0; }

}  // namespace

int64_t OpsGoldenCounts::allowed_codes() const { return std::max<int64_t>(2, e4m3_codes.compared / 500); }
int64_t OpsGoldenCounts::allowed_bf16() const { return std::max<int64_t>(2, bf16_values.compared / 100); }

bool OpsGoldenCounts::StoreHolds() const {
  return scale_bytes.differing == 0 && e4m3_codes.differing <= allowed_codes() &&
         e4m3_codes.differing_by_more_than_one == 0 && bf16_values.differing <= allowed_bf16() &&
         bf16_values.differing_by_more_than_one == 0 && untouched_bytes.differing == 0;
}

std::string OpsGoldenCounts::ToString() const {
  return StrCat("  ", tokens, " tokens, ", live_tokens, " live, ", entries, " entries\n",                       //
                "  save ", SaveHolds() ? "holds" : "FAILS", ": ", saved_values.differing, " of ",               //
                saved_values.compared, " saved values differ; ", other_values.differing, " of ",                //
                other_values.compared, " others changed\n",                                                     //
                "  store ", StoreHolds() ? "holds" : "FAILS", ": ", scale_bytes.differing, " of ",              //
                scale_bytes.compared, " scale bytes differ; ", e4m3_codes.differing, " of ",                    //
                e4m3_codes.compared, " e4m3 codes (at most ", allowed_codes(), "), ",                           //
                e4m3_codes.differing_by_more_than_one, " by more than one code; ", bf16_values.differing,       //
                " of ", bf16_values.compared, " bf16 values (at most ", allowed_bf16(), "), ",                  //
                bf16_values.differing_by_more_than_one, " by more than one unit; ", untouched_bytes.differing,  //
                " of ", untouched_bytes.compared, " other bytes are not 0\n");
}

absl::StatusOr<std::vector<std::string>> FindOpsGoldenCases(const SafetensorsFile& file) {
  std::set<std::string> names;
  for (const auto& [tensor_name, tensor] : file.tensors()) {
    const size_t dot = tensor_name.find('.');
    if (dot == std::string::npos) {
      return absl::InvalidArgumentError(
          StrCat(file.path(), ": tensor \"", tensor_name, "\": expected a name such as c4_h512_fp8.positions"));
    }
    names.insert(tensor_name.substr(0, dot));
  }
  if (names.empty()) return absl::InvalidArgumentError(StrCat(file.path(), ": no cases"));
  return std::vector<std::string>(names.begin(), names.end());
}

absl::StatusOr<OpsGoldenCase> LoadOpsGoldenCase(const SafetensorsFile& file, const std::string& name) {
  const absl::StatusOr<CaseName> parsed = ParseCaseName(name);
  if (!parsed.ok())
    return absl::InvalidArgumentError(StrCat(file.path(), ": ", std::string(parsed.status().message())));
  OpsGoldenCase golden;
  golden.name = name;
  golden.ratio = parsed->ratio;
  golden.head_size = parsed->head_size;
  golden.format = parsed->format;
  const auto get = [&](const char* field, FileDType dtype, const std::vector<int64_t>& shape) {
    return file.Get(StrCat(name, ".", field), dtype, shape);
  };

  DSV4_ASSIGN_OR_RETURN(FileTensor kv_score, get("kv_score", FileDType::kF32, {-1, -1}));
  golden.tokens = kv_score.shape[0];
  golden.state_width = kv_score.shape[1] / 2;
  golden.kv_score = kv_score.Copy<float>();
  const int64_t tokens = golden.tokens, width = golden.state_width;
  if (kv_score.shape[1] != 2 * golden.head_size && kv_score.shape[1] != 4 * golden.head_size) {
    return absl::InvalidArgumentError(StrCat(file.path(), ": tensor \"", kv_score.name, "\": expected ",
                                             2 * golden.head_size, " or ", 4 * golden.head_size, " columns, got ",
                                             kv_score.shape[1]));
  }
  golden.overlap = width == 2 * golden.head_size;

  DSV4_ASSIGN_OR_RETURN(FileTensor ape, get("ape", FileDType::kF32, {golden.ratio, width}));
  golden.ape = ape.Copy<float>();
  DSV4_ASSIGN_OR_RETURN(FileTensor positions, get("positions", FileDType::kI64, {tokens}));
  golden.positions = positions.Copy<int64_t>();
  DSV4_ASSIGN_OR_RETURN(FileTensor token_to_request, get("token_to_request", FileDType::kI32, {tokens}));
  golden.token_to_request = token_to_request.Copy<int32_t>();
  DSV4_ASSIGN_OR_RETURN(FileTensor slot_mapping, get("slot_mapping", FileDType::kI64, {tokens}));
  golden.slot_mapping = slot_mapping.Copy<int64_t>();

  DSV4_ASSIGN_OR_RETURN(FileTensor before, get("state_cache_before", FileDType::kF32, {-1, -1, 2 * width}));
  golden.num_blocks = before.shape[0];
  golden.block_size = before.shape[1];
  golden.state_cache_before = before.Copy<float>();
  DSV4_ASSIGN_OR_RETURN(FileTensor block_table, get("block_table", FileDType::kI32, {-1, -1}));
  golden.num_requests = block_table.shape[0];
  golden.table_blocks = block_table.shape[1];
  golden.block_table = block_table.Copy<int32_t>();

  DSV4_ASSIGN_OR_RETURN(FileTensor rms_weight, get("rms_weight", FileDType::kBf16, {golden.head_size}));
  golden.rms_weight = rms_weight.Copy<Bf16>();
  DSV4_ASSIGN_OR_RETURN(FileTensor cos_sin, get("cos_sin", FileDType::kF32, {-1, -1}));
  golden.num_positions = cos_sin.shape[0];
  golden.rope_size = cos_sin.shape[1];
  golden.cos_sin = cos_sin.Copy<float>();
  DSV4_ASSIGN_OR_RETURN(FileTensor kv_slot_mapping, get("kv_slot_mapping", FileDType::kI64, {tokens}));
  golden.kv_slot_mapping = kv_slot_mapping.Copy<int64_t>();
  DSV4_ASSIGN_OR_RETURN(FileTensor rows_per_page, get("kv_cache_block_size", FileDType::kI32, {1}));
  golden.rows_per_page = rows_per_page.Copy<int32_t>()[0];

  DSV4_ASSIGN_OR_RETURN(FileTensor after, get("state_rows_after", FileDType::kF32, {-1, 2 * width}));
  golden.state_rows_after = after.Copy<float>();
  DSV4_ASSIGN_OR_RETURN(FileTensor pages, get("kv_cache_bytes", FileDType::kU8, {-1, -1}));
  golden.num_pages = pages.shape[0];
  golden.page_bytes = pages.shape[1];
  golden.kv_cache_bytes = pages.Copy<uint8_t>();

  if (absl::Status status = CheckOpsGoldenCase(golden); !status.ok()) {
    return absl::InvalidArgumentError(StrCat(file.path(), ": ", std::string(status.message())));
  }
  return golden;
}

absl::Status CheckOpsGoldenCase(const OpsGoldenCase& golden) {
  const auto error = [&](const auto&... parts) {
    return absl::InvalidArgumentError(StrCat("case \"", golden.name, "\": ", parts...));
  };
  if (golden.block_size < 1 || golden.num_requests < 1 || golden.table_blocks < 1) {
    return error("state_cache_before and block_table: expected no extent of 0");
  }
  if (golden.rope_size < 2 || golden.rope_size % 2 != 0 || golden.rope_size > golden.head_size) {
    return error("cos_sin: expected rows of an even number of values up to ", golden.head_size, ", got ",
                 golden.rope_size);
  }
  if (golden.rows_per_page < 1) return error("kv_cache_block_size: expected at least 1, got ", golden.rows_per_page);
  const int64_t payload = PagePayloadBytes(golden.format, golden.rows_per_page, golden.head_size, golden.rope_size);
  if (golden.page_bytes < payload) {
    return error("kv_cache_bytes: expected pages of at least ", payload, " bytes, got ", golden.page_bytes);
  }

  int64_t live_tokens = 0;
  std::set<int64_t> state_slots, entry_slots;
  for (int64_t i = 0; i < golden.tokens; ++i) {
    if (!golden.IsLive(i)) continue;
    live_tokens += 1;
    const int64_t slot = golden.slot_mapping[i], position = golden.positions[i];
    if (slot / golden.block_size >= golden.num_blocks) {
      return error("slot_mapping: token ", i, " has slot ", slot, " past the state cache");
    }
    if (!state_slots.insert(slot).second) return error("slot_mapping: two tokens have slot ", slot);
    if (position < 0 || position >= kMaxPosition) {
      return error("positions: live token ", i, " has position ", position);
    }
    if (!golden.WritesEntry(i)) continue;

    const int64_t entry_slot = golden.kv_slot_mapping[i];
    if (entry_slot / golden.rows_per_page >= golden.num_pages) {
      return error("kv_slot_mapping: token ", i, " has slot ", entry_slot, " past the pages");
    }
    if (!entry_slots.insert(entry_slot).second) return error("kv_slot_mapping: two tokens have slot ", entry_slot);
    if (golden.ratio * (position / golden.ratio) >= golden.num_positions) {
      return error("positions: token ", i, " has position ", position, " past the rows of cos_sin");
    }
    const int64_t request = golden.token_to_request[i];
    if (request < 0 || request >= golden.num_requests) {
      return error("token_to_request: token ", i, " has request ", request, " of ", golden.num_requests);
    }
    const int64_t pooled = golden.overlap ? 2 * golden.ratio : golden.ratio;
    for (int64_t t = std::max<int64_t>(position - pooled + 1, 0); t <= position; ++t) {
      const int64_t index = t / golden.block_size % golden.table_blocks;
      const int64_t block = golden.block_table[request * golden.table_blocks + index];
      if (block < 0 || block >= golden.num_blocks) {
        return error("block_table: request ", request, " has block ", block, " of ", golden.num_blocks,
                     " for position ", t);
      }
    }
  }
  const int64_t rows = static_cast<int64_t>(golden.state_rows_after.size()) / (2 * golden.state_width);
  if (rows != live_tokens) {
    return error("state_rows_after: expected a row for each of ", live_tokens, " live tokens, got ", rows);
  }
  return absl::OkStatus();
}

absl::StatusOr<OpsGoldenOutput> ComputeOpsGoldenCase(Device& device, const OpsGoldenCase& golden, RowFormat format) {
  DSV4_RETURN_IF_ERROR(CheckOpsGoldenCase(golden));
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateStream());
  const int64_t tokens = golden.tokens, width = golden.state_width;
  DSV4_ASSIGN_OR_RETURN(DeviceTensor kv_score, Upload(device, *stream, golden.kv_score, {tokens, 2 * width}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor ape, Upload(device, *stream, golden.ape, {golden.ratio, width}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor positions, Upload(device, *stream, golden.positions, {tokens}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor requests, Upload(device, *stream, golden.token_to_request, {tokens}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor state_slots, Upload(device, *stream, golden.slot_mapping, {tokens}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor state_cache, Upload(device, *stream, golden.state_cache_before,
                                                         {golden.num_blocks, golden.block_size, 2 * width}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor block_table,
                        Upload(device, *stream, golden.block_table, {golden.num_requests, golden.table_blocks}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor norm_weight, Upload(device, *stream, golden.rms_weight, {golden.head_size}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor cos_sin,
                        Upload(device, *stream, golden.cos_sin, {golden.num_positions, golden.rope_size}));
  DSV4_ASSIGN_OR_RETURN(DeviceTensor entry_slots, Upload(device, *stream, golden.kv_slot_mapping, {tokens}));
  const int64_t page_bytes = format == golden.format
                                 ? golden.page_bytes
                                 : PageStrideBytes(format, golden.rows_per_page, golden.head_size, golden.rope_size);
  DSV4_ASSIGN_OR_RETURN(DeviceTensor pages, DeviceTensor::Create(device, DType::kU8, {golden.num_pages, page_bytes}));
  DSV4_RETURN_IF_ERROR(stream->Fill(pages.view().data, 0, pages.view().num_bytes()));

  DSV4_RETURN_IF_ERROR(save_partial_states::Record(*stream, {.kv = kv_score.view().Columns(0, width),
                                                             .score = kv_score.view().Columns(width, width),
                                                             .ape = WeightView(ape.view()),
                                                             .positions = positions.view(),
                                                             .slots = state_slots.view(),
                                                             .state_cache = state_cache.view()}));
  DSV4_RETURN_IF_ERROR(compress_store::Record(*stream, {.state_cache = state_cache.view(),
                                                        .state_slots = state_slots.view(),
                                                        .state_block_table = block_table.view(),
                                                        .requests = requests.view(),
                                                        .positions = positions.view(),
                                                        .ratio = golden.ratio,
                                                        .overlap = golden.overlap,
                                                        .norm_weight = WeightView(norm_weight.view()),
                                                        .eps = golden.eps,
                                                        .cos_sin = WeightView(cos_sin.view()),
                                                        .entry_slots = entry_slots.view(),
                                                        .entries = {.pages = pages.view(),
                                                                    .format = format,
                                                                    .rows_per_page = golden.rows_per_page,
                                                                    .row_size = golden.head_size,
                                                                    .rope_size = golden.rope_size}}));

  OpsGoldenOutput output;
  output.state_cache.resize(golden.state_cache_before.size());
  output.pages.resize(golden.num_pages * page_bytes);
  DSV4_RETURN_IF_ERROR(
      stream->CopyToHost(output.state_cache.data(), state_cache.view().data, state_cache.view().num_bytes()));
  DSV4_RETURN_IF_ERROR(stream->CopyToHost(output.pages.data(), pages.view().data, pages.view().num_bytes()));
  DSV4_RETURN_IF_ERROR(stream->Synchronize());
  return output;
}

OpsGoldenCounts CompareOpsGolden(const OpsGoldenCase& golden, const OpsGoldenOutput& output) {
  OpsGoldenCounts counts;
  counts.tokens = golden.tokens;

  const int64_t row_size = 2 * golden.state_width;
  std::map<int64_t, const float*> saved_rows;  // state slot -> the row the file expects there
  std::vector<ByteKind> kinds(golden.kv_cache_bytes.size(), ByteKind::kUntouched);
  for (int64_t i = 0; i < golden.tokens; ++i) {
    if (!golden.IsLive(i)) continue;
    saved_rows[golden.slot_mapping[i]] = golden.state_rows_after.data() + counts.live_tokens * row_size;
    counts.live_tokens += 1;
    if (!golden.WritesEntry(i)) continue;
    MarkEntry(golden, golden.kv_slot_mapping[i], kinds);
    counts.entries += 1;
  }

  for (int64_t slot = 0; slot < golden.num_blocks * golden.block_size; ++slot) {
    const auto saved = saved_rows.find(slot);
    const bool is_saved = saved != saved_rows.end();
    const float* expected = is_saved ? saved->second : golden.state_cache_before.data() + slot * row_size;
    const float* actual = output.state_cache.data() + slot * row_size;
    OpsGoldenCounts::Count& count = is_saved ? counts.saved_values : counts.other_values;
    for (int64_t c = 0; c < row_size; ++c) {
      count.compared += 1;
      if (!SameBits(actual + c, expected + c)) count.differing += 1;
    }
  }

  for (size_t b = 0; b < kinds.size(); ++b) {
    const uint32_t actual = output.pages[b], expected = golden.kv_cache_bytes[b];
    switch (kinds[b]) {
      case ByteKind::kUntouched:
        counts.untouched_bytes.compared += 1;
        if (actual != 0 || expected != 0) counts.untouched_bytes.differing += 1;
        break;
      case ByteKind::kScale:
        counts.scale_bytes.compared += 1;
        if (actual != expected) counts.scale_bytes.differing += 1;
        break;
      case ByteKind::kCode:
        Compare(actual, expected, 0x80, 0x7e, &counts.e4m3_codes);
        break;
      case ByteKind::kBf16Low:  // the high byte follows
        Compare(actual | uint32_t{output.pages[b + 1]} << 8, expected | uint32_t{golden.kv_cache_bytes[b + 1]} << 8,
                0x8000, 0x7f80, &counts.bf16_values);
        break;
      case ByteKind::kBf16High:
        break;
    }
  }
  return counts;
}

absl::StatusOr<OpsGoldenCounts> RunOpsGoldenCase(Device& device, const OpsGoldenCase& golden) {
  DSV4_ASSIGN_OR_RETURN(OpsGoldenOutput output, ComputeOpsGoldenCase(device, golden, golden.format));
  return CompareOpsGolden(golden, output);
}

}  // namespace dsv4
