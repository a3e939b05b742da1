// A test over the golden data, and a tool: with --expected it checks any checkpoint of the published format against an
// expected file, prints what it finds, and exits with 0 only if every bound holds.
//
//   decode_golden --checkpoint=DIR --expected=FILE [--precision=fp32|bf16|published]
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "gtest/gtest.h"
#include "runtime/data_files.h"
#include "runtime/device.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"
#include "tests/golden_check.h"

ABSL_FLAG(std::string, checkpoint, "", "folder of the checkpoint; by default the tiny one that comes with the repository");
ABSL_FLAG(std::string, expected, "", "expected file to check against; without it the tests over the golden data run");
ABSL_FLAG(std::string, precision, "",
          "fp32, bf16 or published: what to run, by default what the expected file's metadata says");
ABSL_FLAG(std::string, indexer, "mxfp4", "format of the indexer's keys in bf16 and published precision: mxfp4 or fp8");
ABSL_FLAG(bool, hadamard, true, "rotate the indexer's queries and keys by the Hadamard matrix");
ABSL_FLAG(int64_t, prefill_chunk, 24, "prompt tokens of one request in one step");

namespace dsv4 {
namespace {

std::string DataFile(const std::string& name) {
  absl::StatusOr<std::string> path = FindDataFile("tests/data/" + name);
  EXPECT_TRUE(path.ok()) << path.status();
  return path.ok() ? *path : "";
}

absl::StatusOr<GoldenVerdict> Check(const GoldenOptions& options, std::ostream& out) {
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCpu));
  return CheckGolden(*device, options, out);
}

void ExpectGoldenHolds(const std::string& expected) {
  std::ostringstream out;
  absl::StatusOr<GoldenVerdict> verdict = Check({.checkpoint = DataFile("tiny"), .expected = DataFile(expected)}, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_TRUE(verdict->passed()) << out.str();
  std::cout << out.str();
}

TEST(DecodeGolden, Fp32EqualsThePublishedReference) { ExpectGoldenHolds("tiny_expected_fp32.safetensors"); }
TEST(DecodeGolden, Bf16IsAsCloseAsTheSpecificationAllows) { ExpectGoldenHolds("tiny_expected_bf16_quant.safetensors"); }
TEST(DecodeGolden, PublishedIsAsCloseAsTheSpecificationAllows) {
  ExpectGoldenHolds("tiny_expected_published.safetensors");
}

TEST(DecodeGolden, AnFp32RunFailsTheQuantisedBounds) {
  for (const char* expected : {"tiny_expected_bf16_quant.safetensors", "tiny_expected_published.safetensors"}) {
    std::ostringstream out;
    absl::StatusOr<GoldenVerdict> verdict = Check(
        {.checkpoint = DataFile("tiny"), .expected = DataFile(expected), .precision = Precision::kFp32}, out);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    bool end_to_end_failed = false;
    for (const std::string& failure : verdict->failures) {
      end_to_end_failed |= failure.find("over that of an fp32 run") != std::string::npos;
    }
    EXPECT_TRUE(end_to_end_failed) << out.str();
  }
}

// Changes one element of one tensor of an expected file.
std::string WithOneElementChanged(const std::string& expected, const std::string& tensor_name, size_t element,
                                  float change) {
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(DataFile(expected));
  EXPECT_TRUE(file.ok()) << file.status();
  if (!file.ok()) return "";
  SafetensorsWriter writer;
  for (const auto& [key, value] : file->metadata()) writer.SetMetadata(key, value);
  for (const auto& [name, tensor] : file->tensors()) {
    std::vector<uint8_t> bytes(tensor.bytes.begin(), tensor.bytes.end());
    if (name == tensor_name) {
      float value;
      std::memcpy(&value, bytes.data() + 4 * element, 4);
      value += change;
      std::memcpy(bytes.data() + 4 * element, &value, 4);
    }
    EXPECT_TRUE(writer.Add(name, tensor.dtype, tensor.shape, bytes).ok());
  }
  const std::string path = testing::TempDir() + "/changed.safetensors";
  EXPECT_TRUE(writer.Write(path).ok());
  return path;
}

TEST(DecodeGolden, OneChangedElementIsFound) {
  for (const char* tensor : {"seq1.logits", "seq2.mtp_logits", "seq0.layer2.attn_out", "seq0.layer1.entries",
                             "seq0.layer3.indexer_keys"}) {
    std::ostringstream out;
    absl::StatusOr<GoldenVerdict> verdict =
        Check({.checkpoint = DataFile("tiny"),
               .expected = WithOneElementChanged("tiny_expected_fp32.safetensors", tensor, 1000, 0.5f)},
              out);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    ASSERT_EQ(verdict->failures.size(), 1u) << tensor << "\n" << out.str();
    EXPECT_NE(verdict->failures[0].find(tensor), std::string::npos) << verdict->failures[0];
  }
}

TEST(DecodeGolden, NamesWhatIsMissing) {
  std::ostringstream out;
  EXPECT_THAT(Check({.checkpoint = "no/such/folder", .expected = DataFile("tiny_expected_fp32.safetensors")}, out)
                  .status()
                  .ToString(),
              testing::HasSubstr("no/such/folder"));
  EXPECT_THAT(
      Check({.checkpoint = DataFile("tiny"), .expected = "no/such/file.safetensors"}, out).status().ToString(),
      testing::HasSubstr("no/such/file.safetensors"));
  // A checkpoint is a safetensors file too, but no expected file.
  EXPECT_THAT(Check({.checkpoint = DataFile("tiny"),
                     .expected = DataFile("tiny/model.safetensors"),
                     .precision = Precision::kFp32},
                    out)
                  .status()
                  .ToString(),
              testing::HasSubstr("seq0.tokens"));
  EXPECT_THAT(Check({.checkpoint = DataFile("tiny"), .expected = DataFile("tiny/model.safetensors")}, out)
                  .status()
                  .ToString(),
              testing::HasSubstr("--precision"));
}

absl::StatusOr<GoldenOptions> OptionsFromFlags() {
  GoldenOptions options;
  options.checkpoint = absl::GetFlag(FLAGS_checkpoint);
  if (options.checkpoint.empty()) {
    DSV4_ASSIGN_OR_RETURN(options.checkpoint, FindDataFile("tests/data/tiny"));
  }
  options.expected = absl::GetFlag(FLAGS_expected);
  if (const std::string name = absl::GetFlag(FLAGS_precision); !name.empty()) {
    DSV4_ASSIGN_OR_RETURN(options.precision, ParsePrecision(name));
  }
  DSV4_ASSIGN_OR_RETURN(options.indexer_format, ParseIndexerFormat(absl::GetFlag(FLAGS_indexer)));
  options.hadamard = absl::GetFlag(FLAGS_hadamard);
  options.prefill_chunk = absl::GetFlag(FLAGS_prefill_chunk);
  return options;
}

int RunTool() {
  absl::StatusOr<GoldenOptions> options = OptionsFromFlags();
  absl::StatusOr<GoldenVerdict> verdict = options.ok() ? Check(*options, std::cout) : options.status();
  if (!verdict.ok()) {
    std::cerr << "decode_golden: " << verdict.status().message() << "\n";
    return 1;
  }
  return verdict->passed() ? 0 : 1;
}

}  // namespace
}  // namespace dsv4

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::SetProgramUsageMessage(
      "checks a checkpoint's decoding against an expected file, or (without --expected) runs the tests over the golden "
      "data.\n  decode_golden --checkpoint=DIR --expected=FILE");
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() > 1) {
    std::cerr << "decode_golden: " << arguments[1] << ": not a flag; see --help\n";
    return 1;
  }
  if (!absl::GetFlag(FLAGS_expected).empty()) return dsv4::RunTool();
  if (!absl::GetFlag(FLAGS_checkpoint).empty()) {
    std::cerr << "decode_golden: --expected: missing; it says what to check --checkpoint against\n";
    return 1;
  }
  return RUN_ALL_TESTS();
}
