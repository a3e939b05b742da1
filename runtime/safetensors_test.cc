#include "runtime/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) /
              (std::string(info->name()) + "." + std::to_string(getpid()));
    std::filesystem::remove_all(folder_);
    ASSERT_TRUE(std::filesystem::create_directory(folder_));
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name = "file.safetensors") const { return (folder_ / name).string(); }

  void WriteFile(const std::string& bytes) const {
    std::ofstream out(Path(), std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(out.good());
  }

  std::string ReadFile() const {
    std::ifstream in(Path(), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }

  // The status of opening a file with this header, true length and data of `data_bytes` bytes.
  absl::Status OpenHeader(const std::string& header, size_t data_bytes) const {
    return OpenBytes(Length(header.size()) + header + std::string(data_bytes, 'd'));
  }
  absl::Status OpenBytes(const std::string& bytes) const {
    WriteFile(bytes);
    const absl::Status status = SafetensorsFile::Open(Path()).status();
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), testing::StartsWith(Path() + ": "));
    }
    return status;
  }
  static std::string Length(uint64_t length) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
    return bytes;
  }

  std::filesystem::path folder_;
};

std::vector<uint8_t> Iota(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i);
  return bytes;
}

template <typename T>
absl::Span<const uint8_t> BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

TEST_F(SafetensorsTest, EveryTypeRoundTrips) {
  const FileDType dtypes[] = {FileDType::kF64,    FileDType::kF32,    FileDType::kF16, FileDType::kBf16,
                              FileDType::kF8E4m3, FileDType::kF8E8m0, FileDType::kI64, FileDType::kI32,
                              FileDType::kI16,    FileDType::kI8,     FileDType::kU8,  FileDType::kBool};
  SafetensorsWriter writer;
  for (FileDType dtype : dtypes) {
    DSV4_ASSERT_OK(writer.Add("x." + std::string(FileDTypeName(dtype)), dtype, {3, 5},
                              Iota(static_cast<size_t>(15 * FileDTypeBytes(dtype)))));
  }
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(Path()));
  EXPECT_EQ(file.path(), Path());
  EXPECT_EQ(file.tensors().size(), std::size(dtypes));
  for (FileDType dtype : dtypes) {
    DSV4_ASSERT_OK_AND_ASSIGN(FileTensor x, file.Get("x." + std::string(FileDTypeName(dtype)), dtype, {3, 5}));
    EXPECT_EQ(x.name, "x." + std::string(FileDTypeName(dtype)));
    EXPECT_EQ(x.num_elements(), 15);
    EXPECT_EQ(x.Copy<uint8_t>(), Iota(static_cast<size_t>(15 * FileDTypeBytes(dtype))));
  }
}

TEST_F(SafetensorsTest, ValuesNamesAndMetadataRoundTrip) {
  const std::vector<float> values = RandomFloats(6, 1);
  SafetensorsWriter writer;
  writer.SetMetadata("precision", "fp32");
  writer.SetMetadata("note", "quotes \" and \\, lines\n, \xC3\xA9");
  DSV4_ASSERT_OK(writer.Add("a \"b\"\n\xC3\xA9", FileDType::kF32, {2, 3}, BytesOf(values)));
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(Path()));
  EXPECT_THAT(file.metadata(),
              ElementsAre(Pair("note", "quotes \" and \\, lines\n, \xC3\xA9"), Pair("precision", "fp32")));
  EXPECT_TRUE(file.Has("a \"b\"\n\xC3\xA9"));
  EXPECT_FALSE(file.Has("a"));
  DSV4_ASSERT_OK_AND_ASSIGN(FileTensor x, file.Get("a \"b\"\n\xC3\xA9"));
  EXPECT_THAT(x.shape, ElementsAre(2, 3));
  EXPECT_EQ(x.Copy<float>(), values);
}

TEST_F(SafetensorsTest, EmptyTensorsScalarsAndEmptyFilesRoundTrip) {
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile none, SafetensorsFile::Open(Path()));
  EXPECT_TRUE(none.tensors().empty());

  DSV4_ASSERT_OK(writer.Add("empty", FileDType::kF32, {0, 5}, {}));
  DSV4_ASSERT_OK(writer.Add("scalar", FileDType::kI16, {}, Iota(2)));
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(FileTensor empty, file.Get("empty", FileDType::kF32, {0, 5}));
  EXPECT_EQ(empty.num_elements(), 0);
  EXPECT_TRUE(empty.Copy<float>().empty());
  DSV4_ASSERT_OK_AND_ASSIGN(FileTensor scalar, file.Get("scalar", FileDType::kI16, {}));
  EXPECT_EQ(scalar.num_elements(), 1);
}

TEST_F(SafetensorsTest, WriterAlignsAndLeavesNoHoles) {
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Add("a", FileDType::kU8, {3}, Iota(3)));
  DSV4_ASSERT_OK(writer.Add("b", FileDType::kI64, {2}, Iota(16)));
  DSV4_ASSERT_OK(writer.Add("c", FileDType::kBf16, {1}, Iota(2)));
  DSV4_ASSERT_OK(writer.Write(Path()));
  const std::string header =
      R"({"a":{"data_offsets":[18,21],"dtype":"U8","shape":[3]},"b":{"data_offsets":[0,16],"dtype":"I64","shape":[2]},)"
      R"("c":{"data_offsets":[16,18],"dtype":"BF16","shape":[1]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  const std::string bytes = ReadFile();
  EXPECT_EQ(bytes.substr(0, 8 + padded.size()), Length(padded.size()) + padded);
  EXPECT_EQ(bytes.size(), 8 + padded.size() + 21);
}

TEST_F(SafetensorsTest, WriteReplacesAtOnceAndLeavesNothingBeside) {
  WriteFile("an older file");
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_EXPECT_OK(SafetensorsFile::Open(Path()));
  EXPECT_THAT(writer.Write(Path("no/such/folder")), StatusIs(absl::StatusCode::kNotFound, "no/such/folder"));
  ASSERT_TRUE(std::filesystem::create_directory(Path("folder")));
  ASSERT_TRUE(std::filesystem::create_directory(Path("folder/inside")));
  EXPECT_FALSE(writer.Write(Path("folder")).ok());
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) left.push_back(entry.path().filename());
  EXPECT_THAT(left, testing::UnorderedElementsAre("file.safetensors", "folder"));
}

TEST_F(SafetensorsTest, TensorsOutliveTheReplacedFile) {
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Add("x", FileDType::kU8, {4}, Iota(4)));
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(FileTensor x, file.Get("x"));
  const SafetensorsFile copy = file;
  file = SafetensorsFile();
  DSV4_ASSERT_OK(SafetensorsWriter().Write(Path()));
  EXPECT_EQ(x.Copy<uint8_t>(), Iota(4));
}

TEST_F(SafetensorsTest, WriterRefusesBadTensorsByName) {
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Add("x", FileDType::kF32, {2}, Iota(8)));
  EXPECT_THAT(writer.Add("x", FileDType::kF32, {2}, Iota(8)), StatusIs(kInvalid, "tensor \"x\": added twice"));
  EXPECT_THAT(writer.Add("y", FileDType::kF32, {2}, Iota(7)),
              StatusIs(kInvalid, "tensor \"y\": expected 8 bytes for F32 [2], got 7 bytes"));
  EXPECT_THAT(writer.Add("y", FileDType::kF32, {-2}, Iota(8)), StatusIs(kInvalid, "tensor \"y\""));
  EXPECT_THAT(writer.Add("y", FileDType::kF32, {int64_t{1} << 62, 4}, {}), StatusIs(kInvalid, "tensor \"y\""));
  EXPECT_THAT(writer.Add("__metadata__", FileDType::kF32, {2}, Iota(8)), StatusIs(kInvalid, "reserved"));
  EXPECT_THAT(writer.Add("\xFF", FileDType::kF32, {2}, Iota(8)), StatusIs(kInvalid, "tensor \"\\xff\": expected a name in utf-8"));
  writer.SetMetadata("k", "\xC3");
  EXPECT_THAT(writer.Write(Path()), StatusIs(kInvalid, "metadata \"k\": expected utf-8"));
  EXPECT_FALSE(std::filesystem::exists(Path()));
}

TEST_F(SafetensorsTest, GetNamesFileTensorAndWhatCame) {
  SafetensorsWriter writer;
  DSV4_ASSERT_OK(writer.Add("x", FileDType::kF32, {2, 3}, Iota(24)));
  DSV4_ASSERT_OK(writer.Write(Path()));
  DSV4_ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(Path()));
  DSV4_EXPECT_OK(file.Get("x", FileDType::kF32, {2, 3}));
  DSV4_EXPECT_OK(file.Get("x", FileDType::kF32, {-1, 3}));
  EXPECT_THAT(file.Get("y"), StatusIs(absl::StatusCode::kNotFound, Path() + ": no tensor \"y\""));
  EXPECT_THAT(file.Get("y", FileDType::kF32, {1}), StatusIs(absl::StatusCode::kNotFound, "\"y\""));
  EXPECT_THAT(file.Get("x", FileDType::kF32, {-1, 4}),
              StatusIs(kInvalid, Path() + ": tensor \"x\": expected F32 [any, 4], got F32 [2, 3]"));
  EXPECT_THAT(file.Get("x", FileDType::kBf16, {2, 3}), StatusIs(kInvalid, "expected BF16 [2, 3], got F32 [2, 3]"));
  EXPECT_THAT(file.Get("x", FileDType::kF32, {6}), StatusIs(kInvalid, "expected F32 [6], got F32 [2, 3]"));
}

TEST_F(SafetensorsTest, MissingFileIsNotFoundAndAFolderIsRefused) {
  EXPECT_THAT(SafetensorsFile::Open(Path("none")), StatusIs(absl::StatusCode::kNotFound, Path("none")));
  EXPECT_THAT(SafetensorsFile::Open(folder_.string()), StatusIs(kInvalid, "regular file"));
}

TEST_F(SafetensorsTest, RefusesShortFiles) {
  EXPECT_THAT(OpenBytes(""), StatusIs(kDataLoss, "expected at least 8 bytes, got 0"));
  EXPECT_THAT(OpenBytes("1234567"), StatusIs(kDataLoss, "expected at least 8 bytes, got 7"));
  EXPECT_THAT(OpenBytes(Length(0)), StatusIs(kInvalid, "header: expected a json object"));
  EXPECT_THAT(OpenBytes(Length(3) + "{}"), StatusIs(kDataLoss, "header: expected 3 bytes, the file has 2"));
}

TEST_F(SafetensorsTest, LyingHeaderLengthAllocatesNothing) {
  EXPECT_THAT(OpenBytes(Length(uint64_t{1} << 60) + "{}"),
              StatusIs(kDataLoss, "header: expected 1152921504606846976 bytes, the file has 2"));
  EXPECT_THAT(OpenBytes(Length(UINT64_MAX) + "{}"), StatusIs(kDataLoss, "header: expected 18446744073709551615"));
  EXPECT_THAT(OpenBytes(Length(UINT64_MAX - 7) + "{}"), StatusIs(kDataLoss, "header"));
}

TEST_F(SafetensorsTest, RefusesHeadersPastTheFormatsLimit) {
  const std::string header(8, '{');
  WriteFile(Length(100'000'001) + header);
  ASSERT_EQ(truncate(Path().c_str(), 100'000'100), 0);  // sparse
  EXPECT_THAT(SafetensorsFile::Open(Path()), StatusIs(kInvalid, "header: expected at most 100000000 bytes"));
}

TEST_F(SafetensorsTest, RefusesWhatIsNotAnObjectOfTensors) {
  const char* headers[] = {
      "",
      " {}",
      "[]",
      "1",
      "{",
      "{}}",
      "{} x",
      "{\"x\"}",
      "{\"x\":1}",
      "{\"x\":null}",
      "{\"x\":true}",
      "{\"x\":\"y\"}",
      "{\"x\":[]}",
      "{\"x\":-1}",
      "{\"x\":1.5}",
      "{\"\xFF\":1}",
      R"({"x":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":"1","data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":{},"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[null],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}})",
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":{}}})",
  };
  for (const char* header : headers) {
    EXPECT_THAT(OpenHeader(header, 1), StatusIs(kInvalid, "")) << header;
  }
  EXPECT_THAT(OpenHeader("{\"x\":1}", 1), StatusIs(kInvalid, "tensor \"x\": expected an object, got a number"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"shape\": expected whole numbers of 63 bits, got a string"));
  EXPECT_THAT(OpenHeader("{\"x\":{\"dtype\" 1}}", 1), StatusIs(kInvalid, "header: not valid json at byte"));
}

TEST_F(SafetensorsTest, DeepHeaderIsRefusedAtItsThirdLevel) {
  std::string header = "{\"x\":{\"shape\":";
  header += std::string(1'000'000, '[');
  EXPECT_THAT(OpenHeader(header, 0), StatusIs(kInvalid, "tensor \"x\", \"shape\": expected whole numbers"));
  header = "{";
  for (int i = 0; i < 100000; ++i) header += "\"a\":{";
  EXPECT_THAT(OpenHeader(header, 0), StatusIs(kInvalid, "tensor \"a\", \"a\": unknown field"));
}

TEST_F(SafetensorsTest, RefusesRepeatedNames) {
  const std::string x = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(OpenHeader("{\"x\":" + x + ",\"x\":" + x + "}", 1), StatusIs(kInvalid, "tensor \"x\": named twice"));
  EXPECT_THAT(OpenHeader("{\"x\":" + x + ",\"\\u0078\":" + x + "}", 1),
              StatusIs(kInvalid, "tensor \"x\": named twice"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"dtype\": named twice"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"shape\": named twice"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"data_offsets\": named twice"));
  EXPECT_THAT(OpenHeader(R"({"__metadata__":{},"__metadata__":{}})", 0),
              StatusIs(kInvalid, "\"__metadata__\": named twice"));
  EXPECT_THAT(OpenHeader(R"({"__metadata__":{"k":"1","k":"2"}})", 0), StatusIs(kInvalid, "metadata \"k\": named twice"));
}

TEST_F(SafetensorsTest, RefusesMetadataThatIsNotOfStrings) {
  EXPECT_THAT(OpenHeader(R"({"__metadata__":{"k":1}})", 0),
              StatusIs(kInvalid, "metadata \"k\": expected a string, got a number"));
  for (const char* value : {"{}", "[]", "null", "true", "-1", "1.5"}) {
    EXPECT_THAT(OpenHeader(std::string(R"({"__metadata__":{"k":)") + value + "}}", 0),
                StatusIs(kInvalid, "metadata \"k\": expected a string"));
  }
  EXPECT_THAT(OpenHeader(R"({"__metadata__":[]})", 0), StatusIs(kInvalid, "\"__metadata__\": expected an object"));
  EXPECT_THAT(OpenHeader(R"({"__metadata__":"k"})", 0), StatusIs(kInvalid, "\"__metadata__\": expected an object"));
}

TEST_F(SafetensorsTest, RefusesUnknownAndMissingFields) {
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"more\": unknown field"));
  EXPECT_THAT(OpenHeader(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1), StatusIs(kInvalid, "tensor \"x\": no \"dtype\""));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","data_offsets":[0,1]}})", 1), StatusIs(kInvalid, "tensor \"x\": no \"shape\""));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[1]}})", 1), StatusIs(kInvalid, "tensor \"x\": no \"data_offsets\""));
  EXPECT_THAT(OpenHeader(R"({"x":{}})", 1), StatusIs(kInvalid, "tensor \"x\": no"));
}

TEST_F(SafetensorsTest, RefusesUnknownDTypes) {
  for (const char* dtype : {"F8_E5M2", "f32", "", "F32 "}) {
    EXPECT_THAT(OpenHeader(std::string(R"({"x":{"dtype":")") + dtype + R"(","shape":[1],"data_offsets":[0,1]}})", 1),
                StatusIs(kInvalid, std::string("tensor \"x\": unknown dtype \"") + dtype + "\""));
  }
}

TEST_F(SafetensorsTest, RefusesBadShapes) {
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"shape\": expected no negative number, got -1"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"shape\": expected a number of 63 bits, got 9223372036854775808"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1),
              StatusIs(kInvalid, "tensor \"x\", \"shape\": expected whole numbers of 63 bits, got the number 99999999999999999999"));
  // 2^32 x 2^32 and 2^61 x 8 bytes are 0 in 64 bits.
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 1),
              StatusIs(kInvalid, "tensor \"x\": the bytes of U8 [4294967296, 4294967296] are too many"));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 1),
              StatusIs(kInvalid, "tensor \"x\": the bytes of F64 [2305843009213693952] are too many"));
}

TEST_F(SafetensorsTest, AnExtentOfZeroMakesAnyShapeEmpty) {
  DSV4_EXPECT_OK(OpenHeader(
      R"({"x":{"dtype":"F32","shape":[4294967296,4294967296,4294967296,0],"data_offsets":[0,0]}})", 0));
  EXPECT_THAT(OpenHeader(R"({"x":{"dtype":"F32","shape":[0],"data_offsets":[0,4]}})", 4),
              StatusIs(kInvalid, "tensor \"x\": expected 0 bytes for F32 [0]"));
}

TEST_F(SafetensorsTest, RefusesOffsetsThatDoNotFit) {
  auto open = [&](const std::string& offsets, size_t data_bytes) {
    return OpenHeader(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":)" + offsets + "}}", data_bytes);
  };
  DSV4_EXPECT_OK(open("[0,8]", 8));
  EXPECT_THAT(open("[8,0]", 8), StatusIs(kInvalid, "tensor \"x\": expected data_offsets in order, got [8, 0]"));
  EXPECT_THAT(open("[0,7]", 8), StatusIs(kInvalid, "tensor \"x\": expected 8 bytes for F32 [2], got data_offsets [0, 7]"));
  EXPECT_THAT(open("[0,9]", 9), StatusIs(kInvalid, "tensor \"x\": expected 8 bytes"));
  EXPECT_THAT(open("[0,8]", 7), StatusIs(kDataLoss, "tensor \"x\": ends at byte 8 of the data, the file has 7"));
  EXPECT_THAT(open("[1,9]", 8), StatusIs(kDataLoss, "tensor \"x\": ends at byte 9"));
  EXPECT_THAT(open("[9223372036854775799,9223372036854775807]", 8), StatusIs(kDataLoss, "tensor \"x\""));
  EXPECT_THAT(open("[-8,0]", 8), StatusIs(kInvalid, "tensor \"x\", \"data_offsets\": expected no negative number"));
  EXPECT_THAT(open("[18446744073709551608,18446744073709551616]", 8), StatusIs(kInvalid, "tensor \"x\""));
  EXPECT_THAT(open("[]", 8), StatusIs(kInvalid, "tensor \"x\": expected 2 data_offsets, got 0"));
  EXPECT_THAT(open("[0]", 8), StatusIs(kInvalid, "got 1"));
  EXPECT_THAT(open("[0,8,16]", 16), StatusIs(kInvalid, "got 3"));
}

TEST_F(SafetensorsTest, RefusesOverlapsAndHolesAndNamesTheTensors) {
  auto open = [&](const std::string& a, const std::string& b, const std::string& c, int64_t data_bytes = 8) {
    return OpenHeader("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + a +
                          "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + b +
                          "},\"c\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":" + c + "}}",
                      data_bytes);
  };
  DSV4_EXPECT_OK(open("[0,4]", "[4,8]", "[8,8]"));
  DSV4_EXPECT_OK(open("[4,8]", "[0,4]", "[2,2]"));
  EXPECT_THAT(open("[5,9]", "[0,4]", "[4,4]", 9),
              StatusIs(kInvalid, "tensor \"a\": expected data_offsets from 4, got 5"));
  EXPECT_THAT(open("[1,5]", "[5,9]", "[0,0]", 9), StatusIs(kInvalid, "tensor \"a\": expected data_offsets from 0, got 1"));
  EXPECT_THAT(open("[0,4]", "[4,8]", "[0,0]", 9), StatusIs(kInvalid, "expected 8 bytes of data after the header, got 9"));
  EXPECT_THAT(open("[0,4]", "[3,7]", "[0,0]"), StatusIs(kInvalid, "tensors \"a\" and \"b\": data_offsets overlap"));
  EXPECT_THAT(open("[3,7]", "[0,4]", "[0,0]"), StatusIs(kInvalid, "tensors \"b\" and \"a\": data_offsets overlap"));
  EXPECT_THAT(open("[0,4]", "[0,4]", "[0,0]"), StatusIs(kInvalid, "data_offsets overlap"));
}

TEST_F(SafetensorsTest, HostileNamesStayPrintableAndShort) {
  const std::string x = R"({"dtype":"??","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(OpenHeader("{\"\\u001b[2J\\n\":" + x + "}", 1), StatusIs(kInvalid, "tensor \"\\x1b[2J\\n\": unknown dtype"));
  const absl::Status status = OpenHeader("{\"" + std::string(100000, 'n') + "\":" + x + "}", 1);
  EXPECT_THAT(status, StatusIs(kInvalid, "nnn\"...: unknown dtype"));
  EXPECT_LT(status.message().size(), 1000u);
}

// A small file of everything, cut at every length and with bytes changed at random: opened or refused, never
// anything else, and all that is opened can be read.
class SafetensorsFuzz : public SafetensorsTest {
 protected:
  void SetUp() override {
    SafetensorsTest::SetUp();
    SafetensorsWriter writer;
    writer.SetMetadata("precision", "fp32");
    DSV4_ASSERT_OK(writer.Add("a", FileDType::kF32, {2, 3}, Iota(24)));
    DSV4_ASSERT_OK(writer.Add("layers.0.b", FileDType::kBf16, {5}, Iota(10)));
    DSV4_ASSERT_OK(writer.Add("c", FileDType::kI64, {0, 7}, {}));
    DSV4_ASSERT_OK(writer.Write(Path()));
    bytes_ = ReadFile();
  }

  // Whether it was opened.
  bool OpenAndReadAll(const std::string& bytes) {
    WriteFile(bytes);
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(Path());
    if (!file.ok()) {
      EXPECT_TRUE(file.status().code() == kInvalid || file.status().code() == kDataLoss) << file.status();
      EXPECT_THAT(std::string(file.status().message()), testing::StartsWith(Path() + ": "));
      return false;
    }
    int64_t total = 0;
    for (const auto& [name, tensor] : file->tensors()) {
      EXPECT_EQ(tensor.num_elements() * FileDTypeBytes(tensor.dtype), static_cast<int64_t>(tensor.bytes.size()));
      for (uint8_t byte : tensor.bytes) sum_ += byte;
      total += static_cast<int64_t>(tensor.bytes.size());
    }
    EXPECT_LE(total, static_cast<int64_t>(bytes.size()));
    return true;
  }

  std::string bytes_;
  uint64_t sum_ = 0;
};

TEST_F(SafetensorsFuzz, EveryTruncationIsRefused) {
  ASSERT_TRUE(OpenAndReadAll(bytes_));
  for (size_t size = 0; size < bytes_.size(); ++size) {
    ASSERT_FALSE(OpenAndReadAll(bytes_.substr(0, size))) << size;
  }
}

TEST_F(SafetensorsFuzz, RandomMutationsAreReadOrRefused) {
  std::mt19937 engine(1);
  const std::string alphabet = "{}[]\",:0123456789-.eE\\ux _abFUI";
  int opened = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = bytes_;
    const int changes = 1 + static_cast<int>(engine() % 4);
    for (int i = 0; i < changes && !bytes.empty(); ++i) {
      const size_t at = engine() % bytes.size();
      const char character = engine() % 2 == 0 ? alphabet[engine() % alphabet.size()] : static_cast<char>(engine());
      switch (engine() % 6) {
        case 0:
          bytes.erase(at, 1 + engine() % 3);
          break;
        case 1:
          bytes.insert(at, 1, character);
          break;
        case 2:
          bytes.resize(at);
          break;
        case 3:  // in the header's length
          bytes[std::min<size_t>(at % 8, bytes.size() - 1)] = static_cast<char>(engine());
          break;
        default:
          bytes[at] = character;
      }
    }
    opened += OpenAndReadAll(bytes) ? 1 : 0;
  }
  // Both happen: the mutations of the data are harmless.
  EXPECT_GT(opened, 20);
  EXPECT_LT(opened, 1900);
}

TEST_F(SafetensorsFuzz, RandomBytesAreRefused) {
  std::mt19937 engine(2);
  for (int round = 0; round < 500; ++round) {
    std::string bytes(engine() % 100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(engine());
    if (bytes.size() > 9 && round % 2 == 0) bytes = Length(bytes.size() - 9) + "{" + bytes.substr(9);
    ASSERT_FALSE(OpenAndReadAll(bytes));
  }
}

}  // namespace
}  // namespace dsv4
