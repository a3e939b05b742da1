// What LoadModelWeights loads; load_weights_fault_test.cc has what it refuses.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/checkpoint_testing.h"
#include "nlohmann/json.hpp"
#include "runtime/dtype.h"
#include "runtime/safetensors.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A folder's tensor names and where the loaded weights have their bytes. Tables of experts, which change their type,
// are left out, as is anything that was not loaded.
using NamedViews = std::map<std::string, WeightView>;

void AddMatrix(const std::string& name, const QuantizedWeight& weight, NamedViews* views) {
  (*views)[name + ".weight"] = weight.values;
  if (!weight.scales.empty()) (*views)[name + ".scale"] = weight.scales;
}

void AddMhc(const std::string& name, const MhcWeights& weights, NamedViews* views) {
  (*views)[name + "_fn"] = weights.fn;
  (*views)[name + "_base"] = weights.base;
  (*views)[name + "_scale"] = weights.scale;
}

void AddCompressor(const std::string& prefix, const CompressorWeights& weights, NamedViews* views) {
  const int64_t width = weights.wkv_gate.rows() / 2;
  (*views)[prefix + "wkv.weight"] = weights.wkv_gate.values.Rows(0, width);
  (*views)[prefix + "wgate.weight"] = weights.wkv_gate.values.Rows(width, width);
  (*views)[prefix + "ape"] = weights.ape;
  (*views)[prefix + "norm.weight"] = weights.norm;
}

void AddBlock(const std::string& prefix, const BlockWeights& weights, NamedViews* views) {
  (*views)[prefix + "attn_norm.weight"] = weights.attn_norm;
  (*views)[prefix + "ffn_norm.weight"] = weights.ffn_norm;
  AddMhc(prefix + "hc_attn", weights.hc_attn, views);
  AddMhc(prefix + "hc_ffn", weights.hc_ffn, views);

  const AttentionWeights& attention = weights.attention;
  AddMatrix(prefix + "attn.wq_a", attention.wq_a, views);
  (*views)[prefix + "attn.q_norm.weight"] = attention.q_norm;
  AddMatrix(prefix + "attn.wq_b", attention.wq_b, views);
  AddMatrix(prefix + "attn.wkv", attention.wkv, views);
  (*views)[prefix + "attn.kv_norm.weight"] = attention.kv_norm;
  (*views)[prefix + "attn.attn_sink"] = attention.sink;
  AddMatrix(prefix + "attn.wo_a", attention.wo_a, views);
  AddMatrix(prefix + "attn.wo_b", attention.wo_b, views);
  if (attention.compressor) AddCompressor(prefix + "attn.compressor.", *attention.compressor, views);
  if (attention.indexer) {
    AddMatrix(prefix + "attn.indexer.wq_b", attention.indexer->wq_b, views);
    AddMatrix(prefix + "attn.indexer.weights_proj", attention.indexer->weights_proj, views);
    AddCompressor(prefix + "attn.indexer.compressor.", attention.indexer->compressor, views);
  }

  const MoeWeights& moe = weights.moe;
  AddMatrix(prefix + "ffn.gate", moe.gate, views);
  if (!moe.bias.empty()) (*views)[prefix + "ffn.gate.bias"] = moe.bias;
  for (int64_t e = 0; e < moe.experts.w1.values.extent(0); ++e) {
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w1"), moe.experts.w1.Index(e), views);
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w3"), moe.experts.w3.Index(e), views);
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w2"), moe.experts.w2.Index(e), views);
  }
  AddMatrix(prefix + "ffn.shared_experts.w1", moe.shared.w1, views);
  AddMatrix(prefix + "ffn.shared_experts.w3", moe.shared.w3, views);
  AddMatrix(prefix + "ffn.shared_experts.w2", moe.shared.w2, views);
}

NamedViews ViewsOf(const ModelWeights& weights) {
  NamedViews views;
  views["embed.weight"] = weights.embed;
  AddMatrix("head", weights.head, &views);
  views["norm.weight"] = weights.norm;
  AddMhc("hc_head", weights.hc_head, &views);
  for (size_t i = 0; i < weights.layers.size(); ++i) AddBlock(StrCat("layers.", i, "."), weights.layers[i], &views);
  for (size_t i = 0; i < weights.mtp.size(); ++i) {
    const std::string prefix = StrCat("mtp.", i, ".");
    const MtpWeights& mtp = weights.mtp[i];
    AddBlock(prefix, mtp.block, &views);
    AddMatrix(prefix + "e_proj", mtp.e_proj, &views);
    AddMatrix(prefix + "h_proj", mtp.h_proj, &views);
    views[prefix + "enorm.weight"] = mtp.enorm;
    views[prefix + "hnorm.weight"] = mtp.hnorm;
    views[prefix + "norm.weight"] = mtp.norm;
    AddMhc(prefix + "hc_head", mtp.hc_head, &views);
  }
  return views;
}

DType LoadedDType(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF32:
      return DType::kF32;
    case FileDType::kBf16:
      return DType::kBf16;
    case FileDType::kF8E4m3:
      return DType::kE4m3;
    case FileDType::kF8E8m0:
      return DType::kE8m0;
    default:
      return DType::kE2m1x2;  // I8 or U8
  }
}

testing::AssertionResult HasBytes(const WeightView& view, const StoredTensor& tensor) {
  if (view.empty()) return testing::AssertionFailure() << "not loaded";
  if (view.dtype() != LoadedDType(tensor.dtype)) return testing::AssertionFailure() << "is " << view.ToString();
  if (view.rank() != static_cast<int>(tensor.shape.size()))
    return testing::AssertionFailure() << "is " << view.ToString();
  for (int i = 0; i < view.rank(); ++i) {
    if (view.extent(i) != tensor.shape[static_cast<size_t>(i)]) {
      return testing::AssertionFailure() << "is " << view.ToString();
    }
  }
  if (!view.view().is_contiguous()) return testing::AssertionFailure() << "is not contiguous";
  if (std::memcmp(view.data(), tensor.bytes.data(), tensor.bytes.size()) != 0) {
    return testing::AssertionFailure() << "has other bytes";
  }
  return testing::AssertionSuccess();
}

std::vector<int32_t> Table(const WeightView& view) {
  EXPECT_EQ(view.dtype(), DType::kI32);
  const auto* begin = view.As<int32_t>();
  return {begin, begin + view.num_bytes() / 4};
}

TEST(LoadModelWeights, LoadsEveryTensorOfTheTinyModel) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(TinyFolder()));
  const NamedViews views = ViewsOf(weights);
  size_t tables = 0;
  for (const auto& [name, tensor] : TinyFile().tensors()) {
    if (tensor.dtype == FileDType::kI64) {
      ++tables;
      continue;
    }
    const auto it = views.find(name);
    ASSERT_NE(it, views.end()) << name;
    EXPECT_TRUE(HasBytes(it->second, TinyTensor(name))) << name;
  }
  EXPECT_EQ(tables, 1u);
  EXPECT_EQ(views.size() + tables, TinyFile().tensors().size());
}

TEST(LoadModelWeights, ViewsLieInTheArenaApartFromEachOther) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(TinyFolder()));
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const auto& [name, view] : ViewsOf(weights)) {
    const char* begin = static_cast<const char*>(view.data());
    ranges.emplace_back(begin, begin + view.num_bytes());
  }
  std::sort(ranges.begin(), ranges.end());
  const char* arena = static_cast<const char*>(weights.arena.data());
  EXPECT_GE(ranges.front().first, arena);
  EXPECT_LE(ranges.back().second, arena + weights.arena.size_bytes());
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_GE(ranges[i].first, ranges[i - 1].second);
}

TEST(LoadModelWeights, ScalesKnowTheirBlocks) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(TinyFolder()));
  const QuantizedWeight& wq_b = weights.layers[1].attention.wq_b;
  EXPECT_EQ(wq_b.block_rows, 128);
  EXPECT_EQ(wq_b.block_cols, 128);
  EXPECT_EQ(wq_b.scales.ToString(), "e8m0 [4, 1]");
  const QuantizedWeight& w2 = weights.layers[1].moe.experts.w2;
  EXPECT_EQ(w2.values.ToString(), "e2m1x2 [4, 256, 64]");
  EXPECT_EQ(w2.scales.ToString(), "e8m0 [4, 256, 4]");
  EXPECT_EQ(w2.block_rows, 1);
  EXPECT_EQ(w2.block_cols, 32);
  EXPECT_EQ(w2.rows(), 256);
  EXPECT_EQ(w2.cols(), 128);
  const QuantizedWeight& head = weights.head;
  EXPECT_TRUE(head.scales.empty());
  EXPECT_EQ(head.block_rows, 1);
  EXPECT_EQ(head.block_cols, 1);
}

TEST(LoadModelWeights, LayersHaveWhatTheirKindNeeds) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(TinyFolder()));
  ASSERT_EQ(weights.layers.size(), 5u);
  const bool compressed[] = {false, true, true, true, true};
  const bool indexed[] = {false, true, false, true, false};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(weights.layers[i].attention.compressor.has_value(), compressed[i]) << i;
    EXPECT_EQ(weights.layers[i].attention.indexer.has_value(), indexed[i]) << i;
    EXPECT_EQ(weights.layers[i].moe.expert_table.empty(), i != 0) << i;
    EXPECT_EQ(weights.layers[i].moe.bias.empty(), i == 0) << i;
  }
  ASSERT_EQ(weights.mtp.size(), 1u);
  EXPECT_FALSE(weights.mtp[0].block.attention.compressor.has_value());
  EXPECT_TRUE(weights.mtp[0].block.moe.expert_table.empty());
  EXPECT_FALSE(weights.mtp[0].block.moe.bias.empty());
}

TEST(LoadModelWeights, ExpertTablesBecomeI32) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(TinyFolder()));
  const std::vector<int64_t> stored = TinyFile().Get("layers.0.ffn.gate.tid2eid").value().Copy<int64_t>();
  const WeightView& view = weights.layers[0].moe.expert_table;
  EXPECT_EQ(view.ToString(), "i32 [256, 2]");
  EXPECT_EQ(Table(view), std::vector<int32_t>(stored.begin(), stored.end()));
}

TEST(LoadModelWeights, ShardsLoadAsOneFileDoes) {
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights one, LoadOnCpu(TinyFolder()));
  TestFolder folder;
  fs::copy_file(TinyPath("config.json"), folder.File("config.json"));
  StoredTensors shards[3];
  std::map<std::string, std::string> file_of;
  size_t next = 0;
  for (const auto& [name, tensor] : TinyFile().tensors()) {
    file_of[name] = StrCat("model-0000", next + 1, "-of-00003.safetensors");
    shards[next][name] = TinyTensor(name);
    next = (next + 1) % 3;
  }
  for (size_t i = 0; i < 3; ++i) {
    WriteTensors(folder.File(StrCat("model-0000", i + 1, "-of-00003.safetensors")), shards[i]);
  }
  WriteText(folder.File("model.safetensors.index.json"), Json{{"weight_map", file_of}}.dump());
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights many, LoadOnCpu(folder.path()));
  const NamedViews expected = ViewsOf(one);
  const NamedViews actual = ViewsOf(many);
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, view] : expected) EXPECT_TRUE(BitwiseEqual(actual.at(name).view(), view.view())) << name;
  EXPECT_EQ(Table(many.layers[0].moe.expert_table), Table(one.layers[0].moe.expert_table));
}

TEST(LoadModelWeights, IgnoresWhatTheModelDoesNotUse) {
  TinyVariant variant;
  variant.Replace("mtp.0.embed.weight", Zeros(FileDType::kF16, {3}));
  variant.Replace("mtp.0.head.weight", Zeros(FileDType::kBool, {1}));
  variant.Replace("layers.5.attn.wq_a.weight", Zeros(FileDType::kF64, {1}));
  DSV4_EXPECT_OK(LoadOnCpu(variant.Write()));
}

TEST(LoadModelWeights, WithoutMtpItsTensorsAreNotNeeded) {
  TinyVariant variant;
  variant.config["num_nextn_predict_layers"] = 0;
  variant.config["compress_ratios"] = {0, 4, 128, 4, 128};
  for (const auto& [name, tensor] : TinyFile().tensors()) {
    if (name.rfind("mtp.", 0) == 0) variant.Remove(name);
  }
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(variant.Write()));
  EXPECT_TRUE(weights.mtp.empty());
}

// Loads what `random` makes and compares every tensor but expert tables and those named in `except`.
ModelWeights ExpectLoads(RandomCheckpoint& random, const std::set<std::string>& except = {}) {
  TestFolder folder;
  const StoredTensors tensors = random.Tensors();
  random.Write(folder, tensors);
  absl::StatusOr<ModelWeights> weights = LoadOnCpu(folder.path());
  EXPECT_TRUE(weights.ok()) << weights.status();
  if (!weights.ok()) return {};
  const NamedViews views = ViewsOf(*weights);
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dtype == FileDType::kI64 || except.count(name) != 0) continue;
    const auto it = views.find(name);
    if (it == views.end()) {
      ADD_FAILURE() << name << " is not loaded";
      continue;
    }
    EXPECT_TRUE(HasBytes(it->second, tensor)) << name;
  }
  return *std::move(weights);
}

TEST(LoadModelWeights, BlocksNeedNotDivideTheSizes) {
  RandomCheckpoint random;
  const ModelWeights weights = ExpectLoads(random);
  EXPECT_EQ(weights.layers[0].attention.wq_b.scales.ToString(), "e8m0 [5, 2]");
  EXPECT_EQ(weights.layers[0].attention.wo_a.scales.ToString(), "e8m0 [1, 2]");
  EXPECT_EQ(weights.layers[0].moe.experts.w2.values.ToString(), "e2m1x2 [3, 192, 40]");
  EXPECT_EQ(weights.layers[0].moe.experts.w2.scales.ToString(), "e8m0 [3, 192, 3]");
}

TEST(LoadModelWeights, BlocksAreThoseOfTheConfig) {
  RandomCheckpoint random;
  random.block_rows = 32;
  random.block_cols = 64;
  const ModelWeights weights = ExpectLoads(random);
  const QuantizedWeight& wq_b = weights.layers[0].attention.wq_b;
  EXPECT_EQ(wq_b.block_rows, 32);
  EXPECT_EQ(wq_b.block_cols, 64);
  EXPECT_EQ(wq_b.scales.ToString(), "e8m0 [18, 3]");
}

TEST(LoadModelWeights, TakesFp32Scales) {
  RandomCheckpoint random;
  random.scale_dtype = FileDType::kF32;
  const ModelWeights weights = ExpectLoads(random);
  EXPECT_EQ(weights.layers[0].attention.wq_b.scales.ToString(), "f32 [5, 2]");
  EXPECT_EQ(weights.layers[0].moe.experts.w2.scales.ToString(), "e8m0 [3, 192, 3]");
}

TEST(LoadModelWeights, TakesFp8Experts) {
  for (const FileDType scale_dtype : {FileDType::kF8E8m0, FileDType::kF32}) {
    RandomCheckpoint random;
    random.expert_dtype = FileDType::kF8E4m3;
    random.scale_dtype = scale_dtype;
    const ModelWeights weights = ExpectLoads(random);
    const QuantizedWeight& w2 = weights.layers[0].moe.experts.w2;
    EXPECT_EQ(w2.values.ToString(), "e4m3 [3, 192, 80]");
    EXPECT_EQ(w2.scales.dtype(), LoadedDType(scale_dtype));
    EXPECT_EQ(w2.scales.extent(0), 3);
    EXPECT_EQ(w2.scales.extent(1), 2);
    EXPECT_EQ(w2.scales.extent(2), 1);
    EXPECT_EQ(w2.block_rows, 128);
    EXPECT_EQ(w2.block_cols, 128);
  }
}

TEST(LoadModelWeights, TakesFp4AsU8) {
  RandomCheckpoint random;
  random.expert_dtype = FileDType::kU8;
  EXPECT_EQ(ExpectLoads(random).layers[0].moe.experts.w1.values.dtype(), DType::kE2m1x2);
}

TEST(LoadModelWeights, TakesUnquantisedMatrices) {
  for (const FileDType dtype : {FileDType::kBf16, FileDType::kF32}) {
    RandomCheckpoint random;
    random.matrix_dtype = dtype;
    random.expert_dtype = dtype;
    random.norm_dtype = dtype;
    const ModelWeights weights = ExpectLoads(random);
    EXPECT_TRUE(weights.layers[0].attention.wq_a.scales.empty());
    EXPECT_EQ(weights.layers[0].moe.experts.w1.values.dtype(), LoadedDType(dtype));
    EXPECT_EQ(weights.layers[0].attention.q_norm.dtype(), LoadedDType(dtype));
  }
}

float ReadScale(const StoredTensor& scales, int64_t index) {
  if (scales.dtype == FileDType::kF8E8m0)
    return std::exp2(static_cast<float>(scales.bytes[static_cast<size_t>(index)]) - 127);
  float value;
  std::memcpy(&value, scales.bytes.data() + index * 4, 4);
  return value;
}

// Base releases quantise a compressor's wkv and leave its wgate in bf16. As one matrix both are fp32; a product of
// e4m3 and a power of two is exact there, one of e4m3 and an fp32 scale is rounded once.
TEST(LoadModelWeights, CompressorPartsOfOtherTypesBecomeFp32) {
  for (const FileDType scale_dtype : {FileDType::kF8E8m0, FileDType::kF32}) {
    for (const FileDType wkv_dtype : {FileDType::kF8E4m3, FileDType::kU8, FileDType::kF32, FileDType::kBf16}) {
      RandomCheckpoint random;
      random.scale_dtype = scale_dtype;
      random.compressor_wkv_dtype = wkv_dtype;
      random.compressor_wgate_dtype = wkv_dtype == FileDType::kBf16 ? FileDType::kF32 : FileDType::kBf16;
      const StoredTensors tensors = random.Tensors();
      TestFolder folder;
      random.Write(folder, tensors);
      DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights weights, LoadOnCpu(folder.path()));

      const std::string prefix = "layers.1.attn.compressor.";  // 192 rows and columns
      const QuantizedWeight& loaded = weights.layers[1].attention.compressor->wkv_gate;
      ASSERT_EQ(loaded.values.ToString(), "f32 [384, 192]");
      EXPECT_TRUE(loaded.scales.empty());
      EXPECT_EQ(loaded.block_rows, 1);
      const float* values = loaded.values.As<float>();
      for (int64_t row = 0; row < 384; ++row) {
        const std::string name = prefix + (row < 192 ? "wkv" : "wgate");
        const StoredTensor& stored = tensors.at(name + ".weight");
        for (int64_t col = 0; col < 192; ++col) {
          const size_t index = static_cast<size_t>(row % 192 * 192 + col);
          float expected = 0;
          switch (stored.dtype) {
            case FileDType::kF32:
              std::memcpy(&expected, stored.bytes.data() + 4 * index, 4);
              break;
            case FileDType::kBf16: {
              uint32_t bits = static_cast<uint32_t>(stored.bytes[2 * index + 1]) << 24 |
                              static_cast<uint32_t>(stored.bytes[2 * index]) << 16;
              std::memcpy(&expected, &bits, 4);
              break;
            }
            case FileDType::kF8E4m3:
              expected = ToFloat(E4m3{stored.bytes[index]}) *
                         ReadScale(tensors.at(name + ".scale"), row % 192 / 128 * 2 + col / 128);
              break;
            default: {
              constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
              const int code = stored.bytes[index / 2] >> (col % 2 == 0 ? 0 : 4) & 15;
              expected = (code & 8 ? -1.0f : 1.0f) * kE2m1[code & 7] *
                         ReadScale(tensors.at(name + ".scale"), row % 192 * 6 + col / 32);
            }
          }
          ASSERT_EQ(values[row * 192 + col], expected) << name << " row " << row << " column " << col;
        }
      }
    }
  }
}

// Copies only when synchronised, as a device may.
class LateStream final : public Stream {
 public:
  using Stream::Stream;

  absl::Status CopyToDevice(void* destination, const void* source, int64_t bytes) override {
    if (fail_at_copy == num_copies++) return absl::DataLossError("copy failed");
    copies_.push_back({destination, source, bytes});
    return absl::OkStatus();
  }
  absl::Status CopyToHost(void*, const void*, int64_t) override { return absl::UnimplementedError("not here"); }
  absl::Status Fill(void*, uint8_t, int64_t) override { return absl::UnimplementedError("not here"); }
  absl::Status Synchronize() override {
    for (const auto& copy : copies_) std::memcpy(copy.destination, copy.source, static_cast<size_t>(copy.bytes));
    copies_.clear();
    return absl::OkStatus();
  }
  size_t num_pending() const { return copies_.size(); }

  int num_copies = 0;
  int fail_at_copy = -1;

 private:
  struct PendingCopy {
    void* destination;
    const void* source;
    int64_t bytes;
  };
  std::vector<PendingCopy> copies_;
};

TEST(LoadModelWeights, HostMemoryStaysUntilItIsCopied) {
  RandomCheckpoint random;
  random.compressor_wkv_dtype = FileDType::kF8E4m3;  // converted on the host, as expert tables are
  TestFolder folder;
  random.Write(folder, random.Tensors());
  DSV4_ASSERT_OK_AND_ASSIGN(const ModelWeights expected, LoadOnCpu(folder.path()));
  LateStream stream(TestCpu());
  absl::StatusOr<ModelWeights> weights = absl::UnknownError("not loaded");
  {
    DSV4_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(folder.path()));
    weights = LoadModelWeights(checkpoint, TestCpu(), stream);
  }
  DSV4_ASSERT_OK(weights);
  EXPECT_EQ(stream.num_pending(), 0u);
  const NamedViews expected_views = ViewsOf(expected);
  for (const auto& [name, view] : ViewsOf(*weights)) {
    EXPECT_TRUE(BitwiseEqual(view.view(), expected_views.at(name).view())) << name;
  }
  EXPECT_EQ(Table(weights->layers[0].moe.expert_table), Table(expected.layers[0].moe.expert_table));
}

TEST(LoadModelWeights, AFailedCopyLeavesNoneUnderWay) {
  DSV4_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(TinyFolder()));
  LateStream stream(TestCpu());
  stream.fail_at_copy = 100;
  EXPECT_THAT(LoadModelWeights(checkpoint, TestCpu(), stream), StatusIs(absl::StatusCode::kDataLoss, "copy failed"));
  EXPECT_EQ(stream.num_copies, 101);
  EXPECT_EQ(stream.num_pending(), 0u);
}

}  // namespace
}  // namespace dsv4
