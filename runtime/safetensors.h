// Reads and writes safetensors files. The reader maps the file and checks everything before it returns a
// view; a truncated or lying file gives InvalidArgument (or DataLoss when the file is shorter than it says) that
// names the file, the tensor and what is wrong.
//
//   DSV4_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
//   DSV4_ASSIGN_OR_RETURN(FileTensor t, file.Get("seq0.logits", FileDType::kF32, {271, 256}));
//
//   SafetensorsWriter writer;
//   writer.SetMetadata("precision", "fp32");
//   DSV4_RETURN_IF_ERROR(writer.Add("x", FileDType::kF32, {2, 3}, bytes));
//   DSV4_RETURN_IF_ERROR(writer.Write(path));
//
// Format: 8 bytes little-endian header length, a JSON header, then the data; offsets are relative to the data.
// The tensors cover the data exactly: no overlap, no hole, nothing after the last.
#ifndef DSV4_RUNTIME_SAFETENSORS_H_
#define DSV4_RUNTIME_SAFETENSORS_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace dsv4 {

// The element types of the format that this project reads ("F32", "BF16", "F8_E4M3", "F8_E8M0", ...).
enum class FileDType : uint8_t { kF64, kF32, kF16, kBf16, kF8E4m3, kF8E8m0, kI64, kI32, kI16, kI8, kU8, kBool };

std::string_view FileDTypeName(FileDType dtype);
int64_t FileDTypeBytes(FileDType dtype);

struct FileTensor {
  std::string name;
  FileDType dtype = FileDType::kU8;
  std::vector<int64_t> shape;
  absl::Span<const uint8_t> bytes;  // into the mapped file; no particular alignment

  int64_t num_elements() const;

  // A copy of the elements. T's size must be that of the stored type.
  template <typename T>
  std::vector<T> Copy() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

class SafetensorsFile {
 public:
  // NotFound if there is no such file. Rejects: a header longer than the file or than 100 MB, JSON that is not one
  // object of tensors (and metadata that is not one of strings), a duplicate or unknown field, a duplicate name, an
  // unknown dtype, a negative extent, offsets that are out of order, past the end, that overlap another tensor's or leave a hole, or
  // whose length is not that of dtype and shape. The file must not be shortened while it is open.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  // In the order of their names.
  const std::map<std::string, FileTensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  bool Has(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // NotFound names the file and the tensor.
  absl::StatusOr<FileTensor> Get(std::string_view name) const;
  // InvalidArgument unless dtype and shape are these (an extent of -1 matches all).
  absl::StatusOr<FileTensor> Get(std::string_view name, FileDType dtype, const std::vector<int64_t>& shape) const;

 private:
  class Mapping;
  std::string path_;
  std::shared_ptr<const Mapping> mapping_;  // FileTensors stay valid while a copy of this file lives
  std::map<std::string, FileTensor, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

class SafetensorsWriter {
 public:
  // Names, keys and values are UTF-8; Write or Add refuses others.
  void SetMetadata(const std::string& key, const std::string& value);
  // Copies the bytes. InvalidArgument if the name is taken or the size is not that of dtype and shape.
  absl::Status Add(const std::string& name, FileDType dtype, const std::vector<int64_t>& shape,
                   absl::Span<const uint8_t> bytes);
  // Writes to a temporary file beside `path` and renames it, so that no reader sees half a file.
  absl::Status Write(const std::string& path) const;

 private:
  struct Entry {
    FileDType dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_SAFETENSORS_H_
