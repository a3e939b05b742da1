#include "runtime/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
constexpr std::string_view kMetadataKey = "__metadata__";

constexpr FileDType kFileDTypes[] = {
    FileDType::kF64,    FileDType::kF32, FileDType::kF16, FileDType::kBf16, FileDType::kF8E4m3, FileDType::kF8E8m0,
    FileDType::kI64,    FileDType::kI32, FileDType::kI16, FileDType::kI8,   FileDType::kU8,     FileDType::kBool,
};

std::optional<FileDType> ParseFileDType(std::string_view name) {
  for (FileDType dtype : kFileDTypes) {
    if (FileDTypeName(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// A name or key for messages: printable and of limited length whatever the file holds.
std::string Quote(const std::string& name) {
  constexpr size_t kMaxLength = 200;
  return name.size() <= kMaxLength ? StrCat("\"", absl::CHexEscape(name), "\"")
                                   : StrCat("\"", absl::CHexEscape(name.substr(0, kMaxLength)), "\"...");
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    StrAppend(&text, i == 0 ? "" : ", ", shape[i] == -1 ? std::string("any") : StrCat(shape[i]));
  }
  return text + "]";
}

// The bytes of a tensor, or nothing if an extent is negative or they are too many for 64 bits.
std::optional<int64_t> TensorBytes(FileDType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = FileDTypeBytes(dtype);
  bool is_empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) is_empty = true;
  }
  if (is_empty) return 0;
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

struct HeaderTensor {
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;
};

// Takes the header as it is parsed and accepts nothing but what a header may hold, so that no document is built, however
// deep or large a hostile one is, and a repeated key is seen.
class HeaderParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, HeaderTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_float(number_float_t, const string_t& text) override {
    return Unexpected(StrCat("the number ", text.substr(0, 40)));
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool number_integer(number_integer_t value) override {
    if (place_ == Place::kArray) return Fail(StrCat(Where(), ": expected no negative number, got ", value));
    return Unexpected("a number");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kArray) return Unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail(StrCat(Where(), ": expected a number of 63 bits, got ", value));
    }
    array_->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      metadata[field_] = value;
      return true;
    }
    if (place_ == Place::kTensor && field_ == "dtype") {
      tensor_->dtype = value;
      return true;
    }
    return Unexpected("a string");
  }

  bool key(string_t& value) override {
    switch (place_) {
      case Place::kHeader:
        name_ = value;
        field_.clear();
        if (value == kMetadataKey) {
          if (std::exchange(has_metadata_, true)) return Fail(StrCat(Quote(value), ": named twice"));
          return true;
        }
        if (tensors.count(value) != 0) return Fail(StrCat("tensor ", Quote(value), ": named twice"));
        tensor_ = &tensors[value];
        return true;
      case Place::kMetadata:
        field_ = value;
        if (metadata.count(value) != 0) return Fail(StrCat(Where(), ": named twice"));
        return true;
      case Place::kTensor: {
        field_ = value;
        const bool is_dtype = value == "dtype", is_shape = value == "shape", is_offsets = value == "data_offsets";
        if (!is_dtype && !is_shape && !is_offsets) return Fail(StrCat(Where(), ": unknown field"));
        if ((is_dtype && tensor_->dtype) || (is_shape && tensor_->shape) || (is_offsets && tensor_->offsets)) {
          return Fail(StrCat(Where(), ": named twice"));
        }
        return true;
      }
      default:
        return Unexpected("a key");
    }
  }

  bool start_object(size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kHeader;
      return true;
    }
    if (place_ != Place::kHeader) return Unexpected("an object");
    place_ = name_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
    return true;
  }

  bool end_object() override {
    place_ = place_ == Place::kHeader ? Place::kOutside : Place::kHeader;
    field_.clear();
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == "dtype") return Unexpected("an array");
    array_ = &(field_ == "shape" ? tensor_->shape : tensor_->offsets).emplace();
    place_ = Place::kArray;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& cause) override {
    return Fail(StrCat("header: not valid json at byte ", position, ": ", cause.what()));
  }

 private:
  enum class Place { kOutside, kHeader, kMetadata, kTensor, kArray };

  std::string Where() const {
    if (place_ == Place::kOutside || name_.empty()) return "header";
    if (name_ == kMetadataKey) return field_.empty() ? Quote(name_) : StrCat("metadata ", Quote(field_));
    return field_.empty() ? StrCat("tensor ", Quote(name_)) : StrCat("tensor ", Quote(name_), ", ", Quote(field_));
  }

  std::string Expected() const {
    switch (place_) {
      case Place::kOutside:
      case Place::kHeader:
        return "an object";
      case Place::kMetadata:
        return "a string";
      case Place::kTensor:
        return field_ == "dtype" ? "a string" : "an array of numbers";
      case Place::kArray:
        return "whole numbers of 63 bits";
    }
    return "";
  }

  bool Unexpected(const std::string& what) { return Fail(StrCat(Where(), ": expected ", Expected(), ", got ", what)); }

  bool Fail(std::string message) {
    if (error.empty()) error = std::move(message);
    return false;
  }

  Place place_ = Place::kOutside;
  std::string name_;
  std::string field_;
  bool has_metadata_ = false;
  HeaderTensor* tensor_ = nullptr;  // stable: a map's
  std::vector<int64_t>* array_ = nullptr;
};

// A tensor of the header against the `data_bytes` that follow it; the tensor's bytes are set.
absl::StatusOr<FileTensor> CheckHeaderTensor(const std::string& path, const std::string& name,
                                             const HeaderTensor& header, absl::Span<const uint8_t> data) {
  auto where = [&] { return StrCat(path, ": tensor ", Quote(name), ": "); };
  if (!header.dtype) return absl::InvalidArgumentError(StrCat(where(), "no \"dtype\""));
  if (!header.shape) return absl::InvalidArgumentError(StrCat(where(), "no \"shape\""));
  if (!header.offsets) return absl::InvalidArgumentError(StrCat(where(), "no \"data_offsets\""));
  const std::optional<FileDType> dtype = ParseFileDType(*header.dtype);
  if (!dtype) return absl::InvalidArgumentError(StrCat(where(), "unknown dtype ", Quote(*header.dtype)));
  if (header.offsets->size() != 2) {
    return absl::InvalidArgumentError(StrCat(where(), "expected 2 data_offsets, got ", header.offsets->size()));
  }
  const int64_t begin = (*header.offsets)[0];
  const int64_t end = (*header.offsets)[1];
  if (begin > end) {
    return absl::InvalidArgumentError(
        StrCat(where(), "expected data_offsets in order, got [", begin, ", ", end, "]"));
  }
  const std::optional<int64_t> bytes = TensorBytes(*dtype, *header.shape);
  if (!bytes) {
    return absl::InvalidArgumentError(
        StrCat(where(), "the bytes of ", *header.dtype, " ", ShapeText(*header.shape), " are too many for 64 bits"));
  }
  if (end - begin != *bytes) {
    return absl::InvalidArgumentError(StrCat(where(), "expected ", *bytes, " bytes for ", *header.dtype, " ",
                                             ShapeText(*header.shape), ", got data_offsets [", begin, ", ", end, "]"));
  }
  if (end > static_cast<int64_t>(data.size())) {
    return absl::DataLossError(
        StrCat(where(), "ends at byte ", end, " of the data, the file has ", data.size(), " bytes of it"));
  }
  FileTensor tensor;
  tensor.name = name;
  tensor.dtype = *dtype;
  tensor.shape = *header.shape;
  tensor.bytes = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  return tensor;
}

// The tensors must cover the data without an overlap, a hole or a rest: a header that is off by a byte shows here.
absl::Status CheckCoverage(const std::string& path, const std::map<std::string, FileTensor, std::less<>>& tensors,
                           absl::Span<const uint8_t> data) {
  std::vector<const FileTensor*> in_order;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.bytes.empty()) in_order.push_back(&tensor);
  }
  std::sort(in_order.begin(), in_order.end(),
            [](const FileTensor* a, const FileTensor* b) { return a->bytes.data() < b->bytes.data(); });
  const uint8_t* end = data.data();
  const FileTensor* before = nullptr;
  for (const FileTensor* tensor : in_order) {
    if (tensor->bytes.data() < end) {
      return absl::InvalidArgumentError(StrCat(path, ": tensors ", Quote(before->name), " and ", Quote(tensor->name),
                                               ": data_offsets overlap"));
    }
    if (tensor->bytes.data() > end) {
      return absl::InvalidArgumentError(StrCat(path, ": tensor ", Quote(tensor->name), ": expected data_offsets from ",
                                               end - data.data(), ", got ", tensor->bytes.data() - data.data(),
                                               ": no tensor has the bytes between"));
    }
    end = tensor->bytes.data() + tensor->bytes.size();
    before = tensor;
  }
  const int64_t covered = end - data.data();
  if (covered != static_cast<int64_t>(data.size())) {
    return absl::InvalidArgumentError(
        StrCat(path, ": expected ", covered, " bytes of data after the header, got ", data.size()));
  }
  return absl::OkStatus();
}

absl::Status FileError(int error_number, const std::string& path, const char* what) {
  return absl::ErrnoToStatus(error_number, StrCat(path, ": ", what));
}

// JSON is UTF-8; other bytes would come back as something else.
bool IsUtf8(const std::string& text) {
  const std::string quoted = nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore);
  return nlohmann::json::parse(quoted).get<std::string>() == text;
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int Close() { return close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

absl::Status WriteAll(int fd, const std::string& path, const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = write(fd, next, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, path, "cannot write");
    next += written;
    size -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view FileDTypeName(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF64:
      return "F64";
    case FileDType::kF32:
      return "F32";
    case FileDType::kF16:
      return "F16";
    case FileDType::kBf16:
      return "BF16";
    case FileDType::kF8E4m3:
      return "F8_E4M3";
    case FileDType::kF8E8m0:
      return "F8_E8M0";
    case FileDType::kI64:
      return "I64";
    case FileDType::kI32:
      return "I32";
    case FileDType::kI16:
      return "I16";
    case FileDType::kI8:
      return "I8";
    case FileDType::kU8:
      return "U8";
    case FileDType::kBool:
      return "BOOL";
  }
  return "unknown dtype";
}

int64_t FileDTypeBytes(FileDType dtype) {
  switch (dtype) {
    case FileDType::kF64:
    case FileDType::kI64:
      return 8;
    case FileDType::kF32:
    case FileDType::kI32:
      return 4;
    case FileDType::kF16:
    case FileDType::kBf16:
    case FileDType::kI16:
      return 2;
    case FileDType::kF8E4m3:
    case FileDType::kF8E8m0:
    case FileDType::kI8:
    case FileDType::kU8:
    case FileDType::kBool:
      return 1;
  }
  return 1;
}

int64_t FileTensor::num_elements() const { return static_cast<int64_t>(bytes.size()) / FileDTypeBytes(dtype); }

class SafetensorsFile::Mapping {
 public:
  Mapping(void* data, size_t size) : data_(data), size_(size) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, size_); }

  absl::Span<const uint8_t> bytes() const { return {static_cast<const uint8_t*>(data_), size_}; }

 private:
  void* data_;
  size_t size_;
};

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return FileError(errno, path, "cannot open");
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return FileError(errno, path, "cannot read its size");
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(StrCat(path, ": expected a regular file"));
  if (info.st_size < kLengthBytes) {
    return absl::DataLossError(StrCat(path, ": expected at least ", kLengthBytes, " bytes, got ", info.st_size));
  }
  void* data = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) return FileError(errno, path, "cannot map");

  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = std::make_shared<const Mapping>(data, static_cast<size_t>(info.st_size));
  const absl::Span<const uint8_t> bytes = file.mapping_->bytes();

  uint64_t header_bytes = 0;
  for (int i = 0; i < kLengthBytes; ++i) header_bytes |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  const uint64_t bytes_after_length = bytes.size() - kLengthBytes;
  if (header_bytes > bytes_after_length) {
    return absl::DataLossError(
        StrCat(path, ": header: expected ", header_bytes, " bytes, the file has ", bytes_after_length, " after its length"));
  }
  if (header_bytes > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return absl::InvalidArgumentError(
        StrCat(path, ": header: expected at most ", kMaxHeaderBytes, " bytes, got ", header_bytes));
  }
  const uint8_t* header = bytes.data() + kLengthBytes;
  if (header_bytes == 0 || header[0] != '{') {
    return absl::InvalidArgumentError(StrCat(path, ": header: expected a json object that starts with '{'"));
  }
  HeaderParser parser;
  const bool parsed = nlohmann::json::sax_parse(header, header + header_bytes, &parser);
  if (!parsed || !parser.error.empty()) return absl::InvalidArgumentError(StrCat(path, ": ", parser.error));
  file.metadata_ = std::move(parser.metadata);

  for (const auto& [name, header_tensor] : parser.tensors) {
    DSV4_ASSIGN_OR_RETURN(FileTensor tensor,
                          CheckHeaderTensor(path, name, header_tensor, bytes.subspan(kLengthBytes + header_bytes)));
    file.tensors_.emplace(name, std::move(tensor));
  }
  DSV4_RETURN_IF_ERROR(CheckCoverage(path, file.tensors_, bytes.subspan(kLengthBytes + header_bytes)));
  return file;
}

absl::StatusOr<FileTensor> SafetensorsFile::Get(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return absl::NotFoundError(StrCat(path_, ": no tensor ", Quote(std::string(name))));
  return found->second;
}

absl::StatusOr<FileTensor> SafetensorsFile::Get(std::string_view name, FileDType dtype,
                                                const std::vector<int64_t>& shape) const {
  DSV4_ASSIGN_OR_RETURN(FileTensor tensor, Get(name));
  bool matches = tensor.dtype == dtype && tensor.shape.size() == shape.size();
  for (size_t i = 0; matches && i < shape.size(); ++i) matches = shape[i] == -1 || shape[i] == tensor.shape[i];
  if (matches) return tensor;
  return absl::InvalidArgumentError(StrCat(path_, ": tensor ", Quote(tensor.name), ": expected ",
                                           FileDTypeName(dtype), " ", ShapeText(shape), ", got ",
                                           FileDTypeName(tensor.dtype), " ", ShapeText(tensor.shape)));
}

void SafetensorsWriter::SetMetadata(const std::string& key, const std::string& value) { metadata_[key] = value; }

absl::Status SafetensorsWriter::Add(const std::string& name, FileDType dtype, const std::vector<int64_t>& shape,
                                    absl::Span<const uint8_t> bytes) {
  const std::string where = StrCat("tensor ", Quote(name), ": ");
  if (name == kMetadataKey) return absl::InvalidArgumentError(StrCat(where, "the name is reserved"));
  if (!IsUtf8(name)) return absl::InvalidArgumentError(StrCat(where, "expected a name in utf-8"));
  if (entries_.count(name) != 0) return absl::InvalidArgumentError(StrCat(where, "added twice"));
  const std::optional<int64_t> expected = TensorBytes(dtype, shape);
  if (!expected || *expected != static_cast<int64_t>(bytes.size())) {
    return absl::InvalidArgumentError(
        StrCat(where, "expected ", expected ? StrCat(*expected, " bytes") : std::string("a size of 64 bits"), " for ",
               FileDTypeName(dtype), " ", ShapeText(shape), ", got ", bytes.size(), " bytes"));
  }
  entries_.emplace(name, Entry{dtype, shape, std::vector<uint8_t>(bytes.begin(), bytes.end())});
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Write(const std::string& path) const {
  // Wide types first, so that every tensor is aligned to its own type.
  std::vector<const std::pair<const std::string, Entry>*> in_order;
  for (const auto& entry : entries_) in_order.push_back(&entry);
  std::stable_sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) {
    return FileDTypeBytes(a->second.dtype) > FileDTypeBytes(b->second.dtype);
  });

  nlohmann::json header = nlohmann::json::object();
  for (const auto& [key, value] : metadata_) {
    if (!IsUtf8(key) || !IsUtf8(value)) {
      return absl::InvalidArgumentError(StrCat(path, ": metadata ", Quote(key), ": expected utf-8"));
    }
    header[std::string(kMetadataKey)][key] = value;
  }
  int64_t offset = 0;
  for (const auto* entry : in_order) {
    const int64_t end = offset + static_cast<int64_t>(entry->second.bytes.size());
    header[entry->first] = {{"dtype", std::string(FileDTypeName(entry->second.dtype))},
                            {"shape", entry->second.shape},
                            {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  uint8_t length[kLengthBytes];
  for (int i = 0; i < kLengthBytes; ++i) length[i] = static_cast<uint8_t>(static_cast<uint64_t>(text.size()) >> (8 * i));

  static std::atomic<int> counter{0};
  const std::string temporary = StrCat(path, ".", getpid(), ".", counter++, ".tmp");
  FileDescriptor fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (fd.get() < 0) return FileError(errno, temporary, "cannot create");
  absl::Status status = WriteAll(fd.get(), temporary, length, sizeof(length));
  if (status.ok()) status = WriteAll(fd.get(), temporary, text.data(), text.size());
  for (size_t i = 0; i < in_order.size() && status.ok(); ++i) {
    const std::vector<uint8_t>& bytes = in_order[i]->second.bytes;
    status = WriteAll(fd.get(), temporary, bytes.data(), bytes.size());
  }
  if (fd.Close() != 0) status.Update(FileError(errno, temporary, "cannot close"));
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = FileError(errno, path, "cannot replace");
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

}  // namespace dsv4
