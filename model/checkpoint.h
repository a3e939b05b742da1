// Loads a published-format checkpoint: DIR/config.json, and DIR/model.safetensors or, where there is no such file, the
// shards that DIR/model.safetensors.index.json names.
//
//   DSV4_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(dir));
//   DSV4_ASSIGN_OR_RETURN(ModelWeights weights, LoadModelWeights(checkpoint, *device, *stream));
//
// Every tensor's presence, type and shape is checked against the config; the message names the file and the tensor.
// What a weight is follows from its stored type, not from its name: e4m3 with E8M0 or fp32 scales, FP4 pairs with E8M0
// scales (I8 or U8), bf16, f32; I64 tables become i32. Refused too: a scale that is no number, an expert that does not
// exist. Tensors that the model does not use (copies of the embedding and head under mtp.) are ignored.
#ifndef DSV4_MODEL_CHECKPOINT_H_
#define DSV4_MODEL_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/weights.h"
#include "runtime/device.h"
#include "runtime/safetensors.h"

namespace dsv4 {

class Checkpoint {
 public:
  // NotFound if the directory or one of its files does not exist. InvalidArgument if the index names a tensor that its
  // shard lacks, or a shard that is not a file of this directory.
  static absl::StatusOr<Checkpoint> Open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }
  bool Has(std::string_view name) const;
  // NotFound names the directory and the tensor.
  absl::StatusOr<FileTensor> Get(std::string_view name) const;
  int64_t num_tensors() const { return static_cast<int64_t>(shard_of_.size()); }
  // The path of the file that holds a tensor; the directory if none does.
  const std::string& FileOf(std::string_view name) const;

 private:
  absl::Status OpenShards(const std::string& index_path);

  std::string directory_;
  ModelConfig config_;
  std::vector<SafetensorsFile> shards_;
  std::map<std::string, size_t, std::less<>> shard_of_;  // tensor name -> index in shards_
};

// Copies all weights into one arena of the device. Returns when they are there.
absl::StatusOr<ModelWeights> LoadModelWeights(const Checkpoint& checkpoint, Device& device, Stream& stream);

}  // namespace dsv4

#endif  // DSV4_MODEL_CHECKPOINT_H_
