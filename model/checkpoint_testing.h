// Checkpoints for tests: the tiny one with something changed, and random ones of other types and sizes.
//
//   TinyVariant variant;
//   variant.Remove("norm.weight");
//   EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(absl::StatusCode::kNotFound, "norm.weight"));
//
// Test only.
#ifndef DSV4_MODEL_CHECKPOINT_TESTING_H_
#define DSV4_MODEL_CHECKPOINT_TESTING_H_

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/weights.h"
#include "nlohmann/json.hpp"
#include "runtime/device.h"
#include "runtime/safetensors.h"

namespace dsv4 {

struct StoredTensor {
  FileDType dtype = FileDType::kU8;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};
using StoredTensors = std::map<std::string, StoredTensor>;

StoredTensor Zeros(FileDType dtype, const std::vector<int64_t>& shape);

// The tiny checkpoint of tests/data: its folder, a file in it, its tensors, its config.
std::string TinyFolder();
std::string TinyPath(const std::string& name);
const SafetensorsFile& TinyFile();
StoredTensor TinyTensor(const std::string& name);
nlohmann::json TinyConfig();

// An empty folder that goes with the object.
class TestFolder {
 public:
  TestFolder();
  ~TestFolder();
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Both fail the test if they cannot.
void WriteText(const std::string& path, const std::string& text);
void WriteTensors(const std::string& path, const StoredTensors& tensors);

// The tiny checkpoint with some tensors removed or replaced: an index over its own file and a second one.
class TinyVariant {
 public:
  nlohmann::json config = TinyConfig();

  TinyVariant();
  void Remove(const std::string& name);
  // Or adds.
  void Replace(const std::string& name, StoredTensor tensor);
  // Once. Returns the folder, which goes with this object.
  const std::string& Write();

 private:
  TestFolder folder_;
  std::map<std::string, std::string> file_of_;
  StoredTensors changed_;
};

// Every tensor of a model of odd sizes (nothing is a multiple of 128, and FP4 rows, of 80 columns, none of 32), made
// from the table of the specification, section 3.3, with random bytes. Hidden size 192, 6 heads of 96, ratios 128, 4, 0
// and an MTP block, 2 hash layers, 3 experts, 5 indexer heads of 32, 3 residual streams, vocabulary 50.
class RandomCheckpoint {
 public:
  FileDType matrix_dtype = FileDType::kF8E4m3;
  FileDType scale_dtype = FileDType::kF8E8m0;  // of e4m3 matrices
  FileDType expert_dtype = FileDType::kI8;
  FileDType compressor_wkv_dtype = FileDType::kBf16;
  FileDType compressor_wgate_dtype = FileDType::kBf16;
  FileDType norm_dtype = FileDType::kBf16;
  int64_t block_rows = 128;
  int64_t block_cols = 128;

  StoredTensors Tensors();
  // Writes a config and `tensors` as one file.
  void Write(const TestFolder& folder, const StoredTensors& tensors) const;

 private:
  void AddRandom(const std::string& name, FileDType dtype, const std::vector<int64_t>& shape);
  void AddMatrix(const std::string& name, FileDType dtype, int64_t rows, int64_t cols);
  void AddMhcHead(const std::string& prefix);
  void AddCompressor(const std::string& prefix, int64_t ratio, int64_t channels);
  void AddLayer(const std::string& prefix, int64_t ratio, bool is_hash);

  std::mt19937 random_{1};
  StoredTensors tensors_;
};

// One CPU device for all tests, since weights may not outlive theirs.
Device& TestCpu();
absl::StatusOr<ModelWeights> LoadOnCpu(const std::string& directory);

}  // namespace dsv4

#endif  // DSV4_MODEL_CHECKPOINT_TESTING_H_
