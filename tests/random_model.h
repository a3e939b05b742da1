// A model of random weights under the published tensor names and in their published types: e4m3 with E8M0 scales, FP4
// experts, bf16, f32. It stands in for a checkpoint where a test needs sizes or layer kinds that no checkpoint has, and it
// can write itself as one.
//
//   ModelConfig config = SmallModelConfig({kWindowOnly, {.ratio = 8, .overlap = true}});
//   RandomModel model(config, /*seed=*/1);
//   DSV4_ASSERT_OK_AND_ASSIGN(ModelWeights weights, model.Upload(*device, *stream));
#ifndef DSV4_TESTS_RANDOM_MODEL_H_
#define DSV4_TESTS_RANDOM_MODEL_H_

#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/weights.h"
#include "runtime/device.h"
#include "runtime/safetensors.h"
#include "runtime/stream.h"

namespace dsv4 {

// The published kinds of layers.
inline constexpr LayerKind kWindowOnly = {};
inline constexpr LayerKind kRatio4 = {.ratio = 4, .overlap = true, .indexer = true};
inline constexpr LayerKind kRatio128 = {.ratio = 128, .overlap = false, .indexer = false};

// A config of small, odd sizes that every precision can run: hidden size 96, 4 heads of 64 + 16 channels, a window of 8,
// the best 4 entries, 4 experts, one hash layer, one MTP block, a vocabulary of 64, weight tiles of 16 x 32.
ModelConfig SmallModelConfig(std::vector<LayerKind> layers);

struct NamedConfig {
  std::string name;
  ModelConfig config;
};
inline std::ostream& operator<<(std::ostream& out, const NamedConfig& named) { return out << named.name; }

// Configs that differ from SmallModelConfig's in one respect or two each: head and hidden sizes that are multiples of
// nothing, odd counts, other numbers of streams, a long or a tiny window, ratios that no published model has, routing by table
// everywhere or nowhere, no MTP block.
std::vector<NamedConfig> VariedModelConfigs();

struct HostTensor {
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

enum class ConfigSpelling : uint8_t { kCompressRatios, kLayerTypes };

struct CheckpointForm {
  ConfigSpelling spelling = ConfigSpelling::kCompressRatios;
  int shards = 1;  // 1: one file and no index
};

class RandomModel {
 public:
  // A tensor's values depend on the seed, its name and its size. The config must be valid.
  RandomModel(const ModelConfig& config, uint64_t seed);

  const ModelConfig& config() const { return config_; }
  // By published name.
  const std::map<std::string, HostTensor>& tensors() const { return tensors_; }

  // The values of `name`, or of `name`.weight times its scales, row by row. They are exact. Empty if there is no such tensor.
  std::vector<double> Values(const std::string& name) const;

  absl::StatusOr<ModelWeights> Upload(Device& device, Stream& stream) const;

  // FailedPrecondition if the layer kinds are not those that a config.json can express.
  absl::StatusOr<std::string> ConfigJson(ConfigSpelling spelling) const;
  // Writes config.json and the safetensors files into a directory, which is made if needed.
  absl::Status WriteCheckpoint(const std::string& directory, const CheckpointForm& form) const;

 private:
  ModelConfig config_;
  std::map<std::string, HostTensor> tensors_;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_RANDOM_MODEL_H_
