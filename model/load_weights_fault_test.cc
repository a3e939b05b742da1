// What LoadModelWeights refuses, by name.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model/checkpoint_testing.h"
#include "runtime/safetensors.h"
#include "runtime/str_cat.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

// The tensors of the tiny checkpoint, but layers 3 and 4, which are of the kinds of 1 and 2, and the experts between
// the first and the last.
std::vector<FileTensor> TensorsOfEachKind() {
  std::vector<FileTensor> tensors;
  for (const auto& [name, tensor] : TinyFile().tensors()) {
    bool is_repeated = false;
    for (const char* part : {"layers.3.", "layers.4.", ".experts.1.", ".experts.2."}) {
      is_repeated |= name.find(part) != std::string::npos;
    }
    if (!is_repeated) tensors.push_back(tensor);
  }
  return tensors;
}

TEST(LoadModelWeights, NamesEachMissingTensor) {
  for (const FileTensor& tensor : TensorsOfEachKind()) {
    TinyVariant variant;
    variant.Remove(tensor.name);
    EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(kNotFound, tensor.name + ": no such tensor"));
  }
}

TEST(LoadModelWeights, NamesEachTensorOfAWrongType) {
  for (const FileTensor& tensor : TensorsOfEachKind()) {
    TinyVariant variant;
    variant.Replace(tensor.name, Zeros(FileDType::kF16, tensor.shape));
    EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(kInvalidArgument, tensor.name + ": expected "));
  }
}

TEST(LoadModelWeights, NamesEachTensorOfAWrongShape) {
  for (const FileTensor& tensor : TensorsOfEachKind()) {
    for (size_t dimension = 0; dimension <= tensor.shape.size(); ++dimension) {
      std::vector<int64_t> shape = tensor.shape;
      if (dimension == shape.size()) {
        shape.push_back(1);
      } else {
        shape[dimension] += 1;
      }
      TinyVariant variant;
      variant.Replace(tensor.name, Zeros(tensor.dtype, shape));
      EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(kInvalidArgument, tensor.name + ": expected "));
    }
  }
}

TEST(LoadModelWeights, MessagesNameTheFileToo) {
  TinyVariant variant;
  variant.Replace("layers.2.attn.wo_b.scale", Zeros(FileDType::kF8E8m0, {1, 1}));
  const std::string directory = variant.Write();
  EXPECT_THAT(LoadOnCpu(directory),
              StatusIs(kInvalidArgument, directory + "/changed.safetensors: layers.2.attn.wo_b.scale: "
                                                     "expected F8_E8M0 [2, 1], got [1, 1]"));
}

TEST(LoadModelWeights, RefusesEachScaleThatIsNoNumber) {
  int scales = 0;
  for (const auto& [name, tensor] : TinyFile().tensors()) {
    if (tensor.dtype != FileDType::kF8E8m0) continue;
    ++scales;
    TinyVariant variant;
    StoredTensor changed = TinyTensor(name);
    changed.bytes.back() = 0xff;
    variant.Replace(name, changed);
    EXPECT_THAT(LoadOnCpu(variant.Write()),
                StatusIs(kInvalidArgument, name + ": expected scales that are finite numbers"));
  }
  EXPECT_EQ(scales, 5 * 8 + 2 + 8 + 2 + 6 * 12);  // attention and shared experts, indexers, mtp, projections, experts
}

TEST(LoadModelWeights, RefusesFp32ScalesThatAreNoNumbers) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const char* name : {"layers.1.attn.wq_b.scale", "layers.1.attn.compressor.wkv.scale"}) {
      RandomCheckpoint random;
      random.scale_dtype = FileDType::kF32;
      random.compressor_wkv_dtype = FileDType::kF8E4m3;
      StoredTensors tensors = random.Tensors();
      std::memcpy(tensors.at(name).bytes.data() + 4, &bad, 4);
      TestFolder folder;
      random.Write(folder, tensors);
      EXPECT_THAT(LoadOnCpu(folder.path()), StatusIs(kInvalidArgument, StrCat(name, ": expected scales")));
    }
  }
}

TEST(LoadModelWeights, RefusesExpertsThatDoNotExist) {
  // 2^32 is 0 when cut to 32 bits.
  for (const int64_t expert : {int64_t{4}, int64_t{-1}, int64_t{1} << 32, std::numeric_limits<int64_t>::min()}) {
    TinyVariant variant;
    StoredTensor table = TinyTensor("layers.0.ffn.gate.tid2eid");
    std::memcpy(table.bytes.data() + (2 * 77 + 1) * 8, &expert, 8);
    variant.Replace("layers.0.ffn.gate.tid2eid", table);
    EXPECT_THAT(
        LoadOnCpu(variant.Write()),
        StatusIs(kInvalidArgument, StrCat("layers.0.ffn.gate.tid2eid: expected experts below n_routed_experts, 4, "
                                          "got ",
                                          expert, " in the row of token 77")));
  }
}

TEST(LoadModelWeights, RefusesScalesOfAWeightThatHasNone) {
  TinyVariant variant;
  variant.Replace("layers.1.attn.wq_a.weight", Zeros(FileDType::kBf16, {128, 256}));
  EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(kInvalidArgument, "layers.1.attn.wq_a.scale: expected no scales"));
}

TEST(LoadModelWeights, RefusesFp4WithFp32Scales) {
  TinyVariant variant;
  variant.Replace("layers.1.ffn.experts.2.w1.scale", Zeros(FileDType::kF32, {128, 8}));
  EXPECT_THAT(LoadOnCpu(variant.Write()),
              StatusIs(kInvalidArgument, "layers.1.ffn.experts.2.w1.scale: expected F8_E8M0"));
}

TEST(LoadModelWeights, RefusesFp8WithoutBlocksInTheConfig) {
  TinyVariant variant;
  variant.config.erase("quantization_config");
  EXPECT_THAT(LoadOnCpu(variant.Write()), StatusIs(kInvalidArgument, "weight_block_size"));
}

TEST(LoadModelWeights, ExpertsOfALayerHaveOneType) {
  TinyVariant variant;
  variant.Replace("layers.3.ffn.experts.2.w3.weight", Zeros(FileDType::kF8E4m3, {128, 256}));
  variant.Replace("layers.3.ffn.experts.2.w3.scale", Zeros(FileDType::kF8E8m0, {1, 2}));
  EXPECT_THAT(LoadOnCpu(variant.Write()),
              StatusIs(kInvalidArgument, "layers.3.ffn.experts.2.w3.weight: expected the type of the first expert's"));

  RandomCheckpoint random;
  random.expert_dtype = FileDType::kF8E4m3;
  StoredTensors tensors = random.Tensors();
  tensors.at("layers.0.ffn.experts.1.w1.scale") = Zeros(FileDType::kF32, {1, 2});
  TestFolder folder;
  random.Write(folder, tensors);
  EXPECT_THAT(LoadOnCpu(folder.path()),
              StatusIs(kInvalidArgument, "layers.0.ffn.experts.1.w1.scale: expected the type of the first expert's"));
}

}  // namespace
}  // namespace dsv4
