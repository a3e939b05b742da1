#include "model/checkpoint_testing.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>

#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "runtime/data_files.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

int64_t NumBlocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

Json RandomConfig() {
  Json config = TinyConfig();
  config.update({{"hidden_size", 192},
                 {"num_hidden_layers", 3},
                 {"num_attention_heads", 6},
                 {"head_dim", 96},
                 {"qk_rope_head_dim", 32},
                 {"q_lora_rank", 160},
                 {"o_groups", 3},
                 {"o_lora_rank", 40},
                 {"index_n_heads", 5},
                 {"index_head_dim", 32},
                 {"compress_ratios", {128, 4, 0, 0}},
                 {"hc_mult", 3},
                 {"n_routed_experts", 3},
                 {"moe_intermediate_size", 80},
                 {"num_hash_layers", 2},
                 {"vocab_size", 50}});
  return config;
}

}  // namespace

StoredTensor Zeros(FileDType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = FileDTypeBytes(dtype);
  for (const int64_t extent : shape) bytes *= extent;
  return {dtype, shape, std::vector<uint8_t>(static_cast<size_t>(bytes))};
}

std::string TinyPath(const std::string& name) {
  const absl::StatusOr<std::string> path = FindDataFile("tests/data/tiny/" + name);
  EXPECT_TRUE(path.ok()) << path.status();
  return fs::absolute(path.value_or("")).string();
}

std::string TinyFolder() { return fs::path(TinyPath("config.json")).parent_path().string(); }

const SafetensorsFile& TinyFile() {
  static const SafetensorsFile file = SafetensorsFile::Open(TinyPath("model.safetensors")).value();
  return file;
}

StoredTensor TinyTensor(const std::string& name) {
  const FileTensor tensor = TinyFile().Get(name).value();
  return {tensor.dtype, tensor.shape, tensor.Copy<uint8_t>()};
}

Json TinyConfig() {
  std::ifstream file(TinyPath("config.json"));
  return Json::parse(file);
}

TestFolder::TestFolder() {
  static int count = 0;
  path_ = (fs::path(testing::TempDir()) / StrCat("checkpoint_test.", getpid(), ".", count++)).string();
  fs::create_directories(path_);
}

TestFolder::~TestFolder() {
  std::error_code error;
  fs::remove_all(path_, error);
}

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

void WriteTensors(const std::string& path, const StoredTensors& tensors) {
  SafetensorsWriter writer;
  for (const auto& [name, tensor] : tensors) DSV4_EXPECT_OK(writer.Add(name, tensor.dtype, tensor.shape, tensor.bytes));
  DSV4_EXPECT_OK(writer.Write(path));
}

TinyVariant::TinyVariant() {
  for (const auto& [name, tensor] : TinyFile().tensors()) file_of_[name] = "tiny.safetensors";
}

void TinyVariant::Remove(const std::string& name) { EXPECT_EQ(file_of_.erase(name), 1u) << name; }

void TinyVariant::Replace(const std::string& name, StoredTensor tensor) {
  file_of_[name] = "changed.safetensors";
  changed_[name] = std::move(tensor);
}

const std::string& TinyVariant::Write() {
  WriteText(folder_.File("config.json"), config.dump());
  fs::create_symlink(TinyPath("model.safetensors"), folder_.File("tiny.safetensors"));
  WriteTensors(folder_.File("changed.safetensors"), changed_);
  WriteText(folder_.File("model.safetensors.index.json"), Json{{"metadata", {}}, {"weight_map", file_of_}}.dump());
  return folder_.path();
}

StoredTensors RandomCheckpoint::Tensors() {
  tensors_.clear();
  AddRandom("embed.weight", FileDType::kBf16, {50, 192});
  AddRandom("head.weight", FileDType::kBf16, {50, 192});
  AddRandom("norm.weight", norm_dtype, {192});
  AddMhcHead("");
  AddLayer("layers.0.", 128, true);
  AddLayer("layers.1.", 4, true);
  AddLayer("layers.2.", 0, false);
  AddLayer("mtp.0.", 0, false);
  AddMatrix("mtp.0.e_proj", matrix_dtype, 192, 192);
  AddMatrix("mtp.0.h_proj", matrix_dtype, 192, 192);
  for (const char* name : {"enorm", "hnorm", "norm"}) AddRandom(StrCat("mtp.0.", name, ".weight"), norm_dtype, {192});
  AddMhcHead("mtp.0.");
  return tensors_;
}

void RandomCheckpoint::Write(const TestFolder& folder, const StoredTensors& tensors) const {
  Json config = RandomConfig();
  config["quantization_config"]["weight_block_size"] = {block_rows, block_cols};
  WriteText(folder.File("config.json"), config.dump());
  WriteTensors(folder.File("model.safetensors"), tensors);
}

void RandomCheckpoint::AddRandom(const std::string& name, FileDType dtype, const std::vector<int64_t>& shape) {
  StoredTensor tensor = Zeros(dtype, shape);
  for (size_t i = 0; i < tensor.bytes.size(); ++i) {
    uint8_t byte = static_cast<uint8_t>(random_());
    if (dtype == FileDType::kF8E8m0) byte = static_cast<uint8_t>(117 + byte % 20);
    if (dtype == FileDType::kF8E4m3 && (byte & 0x7f) == 0x7f) byte ^= 1;  // no NaN
    tensor.bytes[i] = byte;
  }
  if (dtype == FileDType::kF32 || dtype == FileDType::kBf16) {  // values near 1
    const size_t size = static_cast<size_t>(FileDTypeBytes(dtype));
    for (size_t i = size - 1; i < tensor.bytes.size(); i += size) tensor.bytes[i] = 0x3f;
  }
  tensors_[name] = std::move(tensor);
}

void RandomCheckpoint::AddMatrix(const std::string& name, FileDType dtype, int64_t rows, int64_t cols) {
  const bool is_fp4 = dtype == FileDType::kI8 || dtype == FileDType::kU8;
  AddRandom(name + ".weight", dtype, {rows, is_fp4 ? cols / 2 : cols});
  if (is_fp4) AddRandom(name + ".scale", FileDType::kF8E8m0, {rows, NumBlocks(cols, 32)});
  if (dtype == FileDType::kF8E4m3) {
    AddRandom(name + ".scale", scale_dtype, {NumBlocks(rows, block_rows), NumBlocks(cols, block_cols)});
  }
}

void RandomCheckpoint::AddMhcHead(const std::string& prefix) {
  AddRandom(prefix + "hc_head_fn", FileDType::kF32, {3, 3 * 192});
  AddRandom(prefix + "hc_head_base", FileDType::kF32, {3});
  AddRandom(prefix + "hc_head_scale", FileDType::kF32, {1});
}

void RandomCheckpoint::AddCompressor(const std::string& prefix, int64_t ratio, int64_t channels) {
  const int64_t width = ratio == 4 ? 2 * channels : channels;
  AddRandom(prefix + "ape", FileDType::kF32, {ratio, width});
  AddMatrix(prefix + "wkv", compressor_wkv_dtype, width, 192);
  AddMatrix(prefix + "wgate", compressor_wgate_dtype, width, 192);
  AddRandom(prefix + "norm.weight", norm_dtype, {channels});
}

void RandomCheckpoint::AddLayer(const std::string& prefix, int64_t ratio, bool is_hash) {
  AddRandom(prefix + "attn_norm.weight", norm_dtype, {192});
  AddRandom(prefix + "ffn_norm.weight", norm_dtype, {192});
  for (const char* name : {"hc_attn", "hc_ffn"}) {
    AddRandom(StrCat(prefix, name, "_fn"), FileDType::kF32, {15, 3 * 192});
    AddRandom(StrCat(prefix, name, "_base"), FileDType::kF32, {15});
    AddRandom(StrCat(prefix, name, "_scale"), FileDType::kF32, {3});
  }
  AddMatrix(prefix + "attn.wq_a", matrix_dtype, 160, 192);
  AddRandom(prefix + "attn.q_norm.weight", norm_dtype, {160});
  AddMatrix(prefix + "attn.wq_b", matrix_dtype, 6 * 96, 160);
  AddMatrix(prefix + "attn.wkv", matrix_dtype, 96, 192);
  AddRandom(prefix + "attn.kv_norm.weight", norm_dtype, {96});
  AddRandom(prefix + "attn.attn_sink", FileDType::kF32, {6});
  AddMatrix(prefix + "attn.wo_a", matrix_dtype, 3 * 40, 2 * 96);
  AddMatrix(prefix + "attn.wo_b", matrix_dtype, 192, 3 * 40);
  if (ratio > 0) AddCompressor(prefix + "attn.compressor.", ratio, 96);
  if (ratio == 4) {
    AddMatrix(prefix + "attn.indexer.wq_b", matrix_dtype, 5 * 32, 160);
    AddRandom(prefix + "attn.indexer.weights_proj.weight", FileDType::kBf16, {5, 192});
    AddCompressor(prefix + "attn.indexer.compressor.", ratio, 32);
  }
  AddRandom(prefix + "ffn.gate.weight", FileDType::kBf16, {3, 192});
  if (is_hash) {
    StoredTensor table = Zeros(FileDType::kI64, {50, 2});
    for (size_t i = 0; i < table.bytes.size(); i += 8) table.bytes[i] = static_cast<uint8_t>(random_() % 3);
    tensors_[prefix + "ffn.gate.tid2eid"] = std::move(table);
  } else {
    AddRandom(prefix + "ffn.gate.bias", FileDType::kF32, {3});
  }
  for (int64_t e = 0; e < 3; ++e) {
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w1"), expert_dtype, 80, 192);
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w3"), expert_dtype, 80, 192);
    AddMatrix(StrCat(prefix, "ffn.experts.", e, ".w2"), expert_dtype, 192, 80);
  }
  AddMatrix(prefix + "ffn.shared_experts.w1", matrix_dtype, 80, 192);
  AddMatrix(prefix + "ffn.shared_experts.w3", matrix_dtype, 80, 192);
  AddMatrix(prefix + "ffn.shared_experts.w2", matrix_dtype, 192, 80);
}

Device& TestCpu() {
  static const std::unique_ptr<Device> device = CreateDevice(DeviceKind::kCpu).value();
  return *device;
}

absl::StatusOr<ModelWeights> LoadOnCpu(const std::string& directory) {
  DSV4_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, TestCpu().CreateStream());
  return LoadModelWeights(checkpoint, TestCpu(), *stream);
}

}  // namespace dsv4
