#include "model/checkpoint.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "model/json_fields.h"
#include "runtime/read_file.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

bool Exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

// An index that could name files elsewhere would be a way to have them read.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& directory) {
  if (!IsDirectory(directory)) return absl::NotFoundError(StrCat(directory, ": no such directory"));
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  DSV4_ASSIGN_OR_RETURN(checkpoint.config_, LoadModelConfig(StrCat(directory, "/config.json")));

  const std::string single_path = StrCat(directory, "/model.safetensors");
  const std::string index_path = StrCat(directory, "/model.safetensors.index.json");
  if (Exists(single_path)) {
    DSV4_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(single_path));
    for (const auto& [name, tensor] : file.tensors()) checkpoint.shard_of_.emplace(name, 0);
    checkpoint.shards_.push_back(std::move(file));
  } else if (Exists(index_path)) {
    DSV4_RETURN_IF_ERROR(checkpoint.OpenShards(index_path));
  } else {
    return absl::NotFoundError(
        StrCat(directory, ": expected model.safetensors or model.safetensors.index.json, found neither"));
  }
  return checkpoint;
}

absl::Status Checkpoint::OpenShards(const std::string& index_path) {
  DSV4_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(index_path));
  DSV4_ASSIGN_OR_RETURN(const JsonFields index, JsonFields::Parse(text, index_path));
  DSV4_ASSIGN_OR_RETURN(const auto file_of, index.StringMap("weight_map"));

  std::map<std::string, size_t> shard_of_file;
  for (const auto& [name, file_name] : file_of) {
    const std::string field = StrCat("weight_map.", name);
    auto it = shard_of_file.find(file_name);
    if (it == shard_of_file.end()) {
      if (!IsPlainFileName(file_name)) {
        return index.Error(field, StrCat("expected the name of a file in the same directory, got \"", file_name, "\""));
      }
      const std::string path = StrCat(directory_, "/", file_name);
      if (!Exists(path)) return absl::NotFoundError(StrCat(index_path, ": ", field, ": no such file: ", path));
      DSV4_ASSIGN_OR_RETURN(SafetensorsFile shard, SafetensorsFile::Open(path));
      shards_.push_back(std::move(shard));
      it = shard_of_file.emplace(file_name, shards_.size() - 1).first;
    }
    if (!shards_[it->second].Has(name)) {
      return index.Error(field, StrCat("expected a tensor of ", file_name, ", which has none of this name"));
    }
    shard_of_.emplace(name, it->second);
  }
  return absl::OkStatus();
}

bool Checkpoint::Has(std::string_view name) const { return shard_of_.find(name) != shard_of_.end(); }

absl::StatusOr<FileTensor> Checkpoint::Get(std::string_view name) const {
  const auto it = shard_of_.find(name);
  if (it == shard_of_.end()) return absl::NotFoundError(StrCat(directory_, ": ", name, ": no such tensor"));
  return shards_[it->second].Get(name);
}

const std::string& Checkpoint::FileOf(std::string_view name) const {
  const auto it = shard_of_.find(name);
  return it == shard_of_.end() ? directory_ : shards_[it->second].path();
}

}  // namespace dsv4
