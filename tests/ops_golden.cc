// Holds the compressor's ops against a golden file: the states saved bit for bit, the entries to within the bounds of
// tests/data/README.md.
//
//   bazel test //tests:ops_golden                             the file in tests/data
//   bazel run //tests:ops_golden -- --file=FILE               another file with cases of the same naming
//   bazel run //tests:ops_golden -- --file=FILE --device=cuda
//
// With --file it prints each case's counts and a verdict; the exit code is 0 only if every case holds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/block_scale.h"
#include "runtime/data_files.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"
#include "tests/ops_golden_case.h"

ABSL_FLAG(std::string, file, "", "check this golden file, and run no other test");
ABSL_FLAG(std::string, device, "cpu", "where the ops run: cpu or cuda");

namespace dsv4 {
namespace {

constexpr char kDataFile[] = "tests/data/ops_golden.safetensors";

absl::StatusOr<std::unique_ptr<Device>> CreateChosenDevice() {
  const std::string name = absl::GetFlag(FLAGS_device);
  if (name == "cpu") return CreateDevice(DeviceKind::kCpu);
  if (name == "cuda") return CreateDevice(DeviceKind::kCuda);
  return absl::InvalidArgumentError(StrCat("--device: expected cpu or cuda, got \"", name, "\""));
}

// Under `bazel run` a relative path means one relative to where the user is.
std::string UserPath(const std::string& path) {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder == nullptr || std::filesystem::path(path).is_absolute()) return path;
  return (std::filesystem::path(folder) / path).string();
}

// Prints the counts of each case. True if all hold.
absl::StatusOr<bool> CheckFile(const std::string& path) {
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, CreateChosenDevice());
  DSV4_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  DSV4_ASSIGN_OR_RETURN(std::vector<std::string> names, FindOpsGoldenCases(file));
  std::vector<OpsGoldenCase> cases;
  for (const std::string& name : names) {  // all of them before anything runs
    DSV4_ASSIGN_OR_RETURN(OpsGoldenCase golden, LoadOpsGoldenCase(file, name));
    cases.push_back(std::move(golden));
  }
  size_t holding = 0;
  for (const OpsGoldenCase& golden : cases) {
    DSV4_ASSIGN_OR_RETURN(OpsGoldenCounts counts, RunOpsGoldenCase(*device, golden));
    std::cout << golden.name << "\n" << counts.ToString();
    if (counts.Holds()) holding += 1;
  }
  std::cout << (holding == cases.size() ? "PASS" : "FAIL") << ": " << holding << " of " << cases.size()
            << " cases hold on " << device->name() << std::endl;
  return holding == cases.size();
}

class OpsGolden : public testing::Test {
 protected:
  void SetUp() override {
    DSV4_ASSERT_OK_AND_ASSIGN(device_, CreateChosenDevice());
    DSV4_ASSERT_OK_AND_ASSIGN(const std::string path, FindDataFile(kDataFile));
    DSV4_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
    DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, FindOpsGoldenCases(file));
    for (const std::string& name : names) {
      DSV4_ASSERT_OK_AND_ASSIGN(OpsGoldenCase golden, LoadOpsGoldenCase(file, name));
      cases_.push_back(std::move(golden));
    }
  }

  OpsGoldenCounts Run(const OpsGoldenCase& golden) {
    const absl::StatusOr<OpsGoldenCounts> counts = RunOpsGoldenCase(*device_, golden);
    if (!counts.ok()) ADD_FAILURE() << golden.name << ": " << counts.status();
    return counts.value_or(OpsGoldenCounts{});
  }

  std::unique_ptr<Device> device_;
  std::vector<OpsGoldenCase> cases_;
};

// The first byte of the values of the first entry that a case's step writes.
int64_t FirstEntryByte(const OpsGoldenCase& golden) {
  for (int64_t i = 0; i < golden.tokens; ++i) {
    if (!golden.WritesEntry(i)) continue;
    const int64_t slot = golden.kv_slot_mapping[i];
    const int64_t value_bytes =
        golden.format == RowFormat::kFp8Key ? golden.head_size : golden.head_size + golden.rope_size;
    return slot / golden.rows_per_page * golden.page_bytes + slot % golden.rows_per_page * value_bytes;
  }
  ADD_FAILURE() << golden.name << " writes no entry";
  return 0;
}

TEST_F(OpsGolden, EveryCaseHolds) {
  std::vector<std::string> names;
  for (const OpsGoldenCase& golden : cases_) {
    names.push_back(golden.name);
    const OpsGoldenCounts counts = Run(golden);
    std::cout << golden.name << "\n" << counts.ToString();
    EXPECT_TRUE(counts.Holds()) << golden.name << "\n" << counts.ToString();
    EXPECT_GT(counts.live_tokens, 0);
    EXPECT_EQ(counts.tokens - counts.live_tokens, 2);
    EXPECT_GT(counts.entries, 1);
  }
  EXPECT_THAT(names, testing::ElementsAre("c128_h512_fp8", "c4_h128_fp8", "c4_h512_fp8"));
}

TEST_F(OpsGolden, OneWrongBitOfASavedStateFails) {
  for (OpsGoldenCase golden : cases_) {
    uint32_t bits;
    std::memcpy(&bits, &golden.state_rows_after.back(), sizeof(bits));
    bits ^= 1;
    std::memcpy(&golden.state_rows_after.back(), &bits, sizeof(bits));
    const OpsGoldenCounts counts = Run(golden);
    EXPECT_EQ(counts.saved_values.differing, 1) << golden.name;
    EXPECT_FALSE(counts.SaveHolds()) << golden.name;
    EXPECT_TRUE(counts.StoreHolds()) << golden.name;
  }
}

TEST_F(OpsGolden, OneCodeTwoStepsOffFails) {
  for (OpsGoldenCase golden : cases_) {
    uint8_t& code = golden.kv_cache_bytes[FirstEntryByte(golden)];
    code = (code & 0x7f) >= 0x40 ? code - 2 : code + 2;
    const OpsGoldenCounts counts = Run(golden);
    EXPECT_EQ(counts.e4m3_codes.differing_by_more_than_one, 1) << golden.name;
    EXPECT_FALSE(counts.Holds()) << golden.name << "\n" << counts.ToString();
  }
}

TEST_F(OpsGolden, MoreNeighbouringCodesThanTheBoundFail) {
  for (OpsGoldenCase golden : cases_) {
    const int64_t first = FirstEntryByte(golden);
    const int64_t allowed = Run(golden).allowed_codes();
    const int64_t already = Run(golden).e4m3_codes.differing;
    // Codes away from zero, where the next code is a neighbour whatever the sign; none that differ already.
    const absl::StatusOr<OpsGoldenOutput> output = ComputeOpsGoldenCase(*device_, golden, golden.format);
    DSV4_ASSERT_OK(output);
    int64_t flipped = 0;
    for (int64_t b = first; already + flipped <= allowed; ++b) {
      ASSERT_LT(b, first + golden.head_size - golden.rope_size) << golden.name;
      uint8_t& code = golden.kv_cache_bytes[b];
      if (code != output->pages[b] || (code & 0x7f) < 8 || (code & 0x7f) > 0x70) continue;
      if (already + flipped == allowed) {
        EXPECT_TRUE(Run(golden).Holds()) << golden.name << ": the bound itself is allowed";
      }
      code += 1;
      flipped += 1;
    }
    const OpsGoldenCounts counts = Run(golden);
    EXPECT_EQ(counts.e4m3_codes.differing, allowed + 1) << golden.name;
    EXPECT_FALSE(counts.Holds()) << golden.name;
  }
}

TEST_F(OpsGolden, OneWrongScaleByteFails) {
  for (OpsGoldenCase golden : cases_) {
    int64_t changed = 0;
    // The scales lie behind all values of a page; the first that is not 0 belongs to an entry.
    const int64_t value_bytes =
        golden.format == RowFormat::kFp8Key ? golden.head_size : golden.head_size + golden.rope_size;
    const int64_t page = FirstEntryByte(golden) / golden.page_bytes * golden.page_bytes;
    for (int64_t b = page + golden.rows_per_page * value_bytes; b < page + golden.page_bytes && changed == 0; ++b) {
      if (golden.kv_cache_bytes[b] == 0) continue;
      golden.kv_cache_bytes[b] ^= 1;
      changed += 1;
    }
    const OpsGoldenCounts counts = Run(golden);
    EXPECT_EQ(changed, 1);
    EXPECT_EQ(counts.scale_bytes.differing, 1) << golden.name;
    EXPECT_FALSE(counts.Holds()) << golden.name;
  }
}

TEST_F(OpsGolden, OneByteOutsideTheEntriesFails) {
  for (OpsGoldenCase golden : cases_) {
    golden.kv_cache_bytes.back() = 1;  // page strides are larger than what a page holds
    const OpsGoldenCounts counts = Run(golden);
    EXPECT_EQ(counts.untouched_bytes.differing, 1) << golden.name;
    EXPECT_FALSE(counts.Holds()) << golden.name;
  }
}

// The op's own entries in fp32, quantised here with and without the rounding to bf16 that comes first.
TEST_F(OpsGolden, LeavingOutTheBf16StepBeforeE4m3Fails) {
  for (const OpsGoldenCase& golden : cases_) {
    DSV4_ASSERT_OK_AND_ASSIGN(const OpsGoldenOutput exact, ComputeOpsGoldenCase(*device_, golden, RowFormat::kF32));
    DSV4_ASSERT_OK_AND_ASSIGN(const OpsGoldenOutput stored, ComputeOpsGoldenCase(*device_, golden, golden.format));
    const int64_t group = golden.format == RowFormat::kFp8Key ? golden.head_size : 64;
    const int64_t codes = golden.format == RowFormat::kFp8Key ? golden.head_size : golden.head_size - golden.rope_size;
    const int64_t value_bytes =
        golden.format == RowFormat::kFp8Key ? golden.head_size : golden.head_size + golden.rope_size;
    for (const bool rounds_first : {true, false}) {
      OpsGoldenOutput output = stored;
      for (int64_t i = 0; i < golden.tokens; ++i) {
        if (!golden.WritesEntry(i)) continue;
        const int64_t slot = golden.kv_slot_mapping[i];
        std::vector<float> row(golden.head_size);
        std::memcpy(row.data(), exact.pages.data() + slot * golden.head_size * sizeof(float),
                    golden.head_size * sizeof(float));
        if (rounds_first) std::transform(row.begin(), row.end(), row.begin(), RoundToBf16);
        uint8_t* bytes = output.pages.data() + slot / golden.rows_per_page * golden.page_bytes +
                         slot % golden.rows_per_page * value_bytes;
        for (int64_t g = 0; g < codes; g += group) {
          float largest = 0;
          for (int64_t c = g; c < g + group; ++c) largest = std::max(largest, std::abs(row[c]));
          const float inverse_scale = PowerOfTwo(-Fp8ScaleExponent(largest));
          for (int64_t c = g; c < g + group; ++c) bytes[c] = E4m3FromFloat(row[c] * inverse_scale).bits;
        }
      }
      const OpsGoldenCounts counts = CompareOpsGolden(golden, output);
      EXPECT_EQ(counts.Holds(), rounds_first) << golden.name << "\n" << counts.ToString();
      if (!rounds_first) {
        EXPECT_GE(counts.e4m3_codes.differing, 20) << golden.name;
      }
    }
  }
}

// The first slot that is not among `slots` and for which `suits` is true.
template <typename Suits>
int64_t FreeSlot(const std::vector<int64_t>& slots, const Suits& suits) {
  int64_t free = 0;
  while (std::find(slots.begin(), slots.end(), free) != slots.end() || !suits(free)) ++free;
  return free;
}

// The pads' inputs are NaN; here the last one is taken for a token whose row holds a state of an earlier step.
TEST_F(OpsGolden, APadThatIsSavedFails) {
  for (const OpsGoldenCase& golden : cases_) {
    OpsGoldenCase wrong = golden;
    ASSERT_FALSE(wrong.IsLive(wrong.tokens - 1)) << golden.name;
    wrong.positions.back() = 0;
    wrong.slot_mapping.back() = FreeSlot(wrong.slot_mapping, [&](int64_t slot) {
      return !std::isnan(golden.state_cache_before[slot * 2 * golden.state_width]);
    });
    wrong.state_rows_after.resize(wrong.state_rows_after.size() + 2 * wrong.state_width);
    DSV4_ASSERT_OK_AND_ASSIGN(const OpsGoldenOutput output, ComputeOpsGoldenCase(*device_, wrong, wrong.format));
    const OpsGoldenCounts counts = CompareOpsGolden(golden, output);
    EXPECT_EQ(counts.other_values.differing, 2 * golden.state_width) << golden.name;
    EXPECT_FALSE(counts.SaveHolds()) << golden.name;
  }
}

TEST_F(OpsGolden, AnEventWithoutADestinationThatIsStoredFails) {
  int64_t tested = 0;
  for (const OpsGoldenCase& golden : cases_) {
    OpsGoldenCase wrong = golden;
    int64_t events_without_slot = 0;
    for (int64_t i = 0; i < wrong.tokens; ++i) {
      if (!wrong.IsLive(i) || wrong.WritesEntry(i) || (wrong.positions[i] + 1) % wrong.ratio != 0) continue;
      wrong.kv_slot_mapping[i] = FreeSlot(wrong.kv_slot_mapping, [](int64_t) { return true; });
      events_without_slot += 1;
    }
    if (events_without_slot == 0) continue;
    tested += 1;
    DSV4_ASSERT_OK_AND_ASSIGN(const OpsGoldenOutput output, ComputeOpsGoldenCase(*device_, wrong, wrong.format));
    EXPECT_GT(CompareOpsGolden(golden, output).untouched_bytes.differing, 0) << golden.name;
  }
  EXPECT_GT(tested, 0);
}

class OpsGoldenFile : public testing::Test {
 protected:
  void SetUp() override {
    DSV4_ASSERT_OK_AND_ASSIGN(const std::string path, FindDataFile(kDataFile));
    DSV4_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
    for (const auto& [name, tensor] : file.tensors()) {
      if (name.rfind("c4_h128_fp8.", 0) == 0) tensors_.push_back(tensor);
    }
    file_.push_back(file);  // keeps the mapping
  }

  // The c4_h128_fp8 case, after `change` has seen each of its tensors (a name of "" leaves it out).
  std::string Write(const std::function<void(FileTensor&, std::vector<uint8_t>&)>& change) {
    SafetensorsWriter writer;
    for (FileTensor tensor : tensors_) {
      std::vector<uint8_t> bytes(tensor.bytes.begin(), tensor.bytes.end());
      change(tensor, bytes);
      if (tensor.name.empty()) continue;
      DSV4_EXPECT_OK(writer.Add(tensor.name, tensor.dtype, tensor.shape, bytes));
    }
    const std::string path = testing::TempDir() + "/lying.safetensors";
    DSV4_EXPECT_OK(writer.Write(path));
    return path;
  }

  std::vector<SafetensorsFile> file_;
  std::vector<FileTensor> tensors_;
};

template <typename T>
void SetElement(std::vector<uint8_t>& bytes, int64_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

TEST_F(OpsGoldenFile, CaseAloneHolds) {
  const std::string path = Write([](FileTensor&, std::vector<uint8_t>&) {});
  DSV4_ASSERT_OK_AND_ASSIGN(const bool holds, CheckFile(path));
  EXPECT_TRUE(holds);
}

TEST_F(OpsGoldenFile, WrongOutputIsAVerdictNotAnError) {
  const std::string path = Write([](FileTensor& tensor, std::vector<uint8_t>& bytes) {
    if (tensor.name == "c4_h128_fp8.state_rows_after") bytes[0] ^= 1;
  });
  DSV4_ASSERT_OK_AND_ASSIGN(const bool holds, CheckFile(path));
  EXPECT_FALSE(holds);
}

TEST_F(OpsGoldenFile, MissingFileAndTruncatedFileAreErrors) {
  EXPECT_THAT(CheckFile("/nonexistent/golden.safetensors"),
              StatusIs(absl::StatusCode::kNotFound, "/nonexistent/golden.safetensors"));
  const std::string path = Write([](FileTensor&, std::vector<uint8_t>&) {});
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kDataLoss, path));
}

TEST_F(OpsGoldenFile, AFileWithoutCasesIsAnError) {
  const std::string path = Write([](FileTensor& tensor, std::vector<uint8_t>&) { tensor.name.clear(); });
  EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kInvalidArgument, "no cases"));
}

TEST_F(OpsGoldenFile, NamesThatAreNoCaseAreErrors) {
  for (const char* prefix : {"c4_h128", "c4_h128_fp9", "c0_h128_fp8", "x4_h128_fp8", "c4_h_fp8", "c4_h-128_fp8"}) {
    const std::string path = Write([&](FileTensor& tensor, std::vector<uint8_t>&) {
      tensor.name = prefix + tensor.name.substr(tensor.name.find('.'));
    });
    EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kInvalidArgument, StrCat("case \"", prefix, "\"")));
  }
}

TEST_F(OpsGoldenFile, AMissingTensorIsAnErrorThatNamesIt) {
  for (const FileTensor& missing : tensors_) {
    const std::string path = Write([&](FileTensor& tensor, std::vector<uint8_t>&) {
      if (tensor.name == missing.name) tensor.name.clear();
    });
    EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kNotFound, missing.name));
  }
}

TEST_F(OpsGoldenFile, AShapeThatDoesNotFitIsAnErrorThatNamesIt) {
  for (const FileTensor& wrong : tensors_) {
    const std::string path = Write([&](FileTensor& tensor, std::vector<uint8_t>& bytes) {
      if (tensor.name != wrong.name) return;
      tensor.shape.push_back(2);  // a rank that no tensor of a case has
      bytes.resize(2 * bytes.size());
    });
    EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kInvalidArgument, wrong.name));
  }
}

TEST_F(OpsGoldenFile, IndicesThatPointOutsideAreErrors) {
  const struct {
    const char* tensor;
    std::function<void(std::vector<uint8_t>&)> lie;
    const char* message;
  } lies[] = {
      {"slot_mapping", [](auto& bytes) { SetElement<int64_t>(bytes, 0, 1 << 30); }, "past the state cache"},
      {"slot_mapping", [](auto& bytes) { SetElement<int64_t>(bytes, 0, -1); }, "state_rows_after"},
      {"slot_mapping",
       [](auto& bytes) { std::copy_n(bytes.begin(), sizeof(int64_t), bytes.begin() + sizeof(int64_t)); },
       "two tokens have slot"},
      {"positions", [](auto& bytes) { SetElement<int64_t>(bytes, 0, -5); }, "position -5"},
      {"positions", [](auto& bytes) { SetElement<int64_t>(bytes, 0, INT64_MAX); }, "position 9223372036854775807"},
      {"kv_cache_block_size", [](auto& bytes) { SetElement<int32_t>(bytes, 0, 0); }, "kv_cache_block_size"},
      {"kv_cache_block_size", [](auto& bytes) { SetElement<int32_t>(bytes, 0, 1 << 30); }, "kv_cache_bytes"},
      {"kv_slot_mapping",
       [](auto& bytes) {
         for (size_t i = 0; i < bytes.size() / sizeof(int64_t); ++i) SetElement<int64_t>(bytes, i, 1 << 20);
       },
       "past the pages"},
      {"token_to_request",
       [](auto& bytes) {
         for (size_t i = 0; i < bytes.size() / sizeof(int32_t); ++i) SetElement<int32_t>(bytes, i, 11);
       },
       "has request 11 of 11"},
      {"block_table",
       [](auto& bytes) {
         for (size_t i = 0; i < bytes.size() / sizeof(int32_t); ++i) SetElement<int32_t>(bytes, i, -1);
       },
       "has block -1"},
  };
  for (const auto& lie : lies) {
    const std::string path = Write([&](FileTensor& tensor, std::vector<uint8_t>& bytes) {
      if (tensor.name == StrCat("c4_h128_fp8.", lie.tensor)) lie.lie(bytes);
    });
    EXPECT_THAT(CheckFile(path), StatusIs(absl::StatusCode::kInvalidArgument, lie.message)) << lie.tensor;
  }
}

}  // namespace
}  // namespace dsv4

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  absl::SetProgramUsageMessage("checks the compressor's ops against golden data; --file=FILE checks another file");
  absl::ParseCommandLine(argc, argv);
  const std::string file = absl::GetFlag(FLAGS_file);
  if (file.empty()) return RUN_ALL_TESTS();

  const absl::StatusOr<bool> holds = dsv4::CheckFile(dsv4::UserPath(file));
  if (!holds.ok()) {
    std::cerr << "ops_golden: " << holds.status().message() << std::endl;
    return 1;
  }
  return *holds ? 0 : 1;
}
