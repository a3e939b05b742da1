// Reads a small text file.
#ifndef DSV4_RUNTIME_READ_FILE_H_
#define DSV4_RUNTIME_READ_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace dsv4 {

// The whole of a regular file of at most kMaxTextFileBytes. NotFound if there is none; InvalidArgument for anything else (a
// folder, a device, a pipe, a larger file). Never waits for a writer.
inline constexpr int64_t kMaxTextFileBytes = 100'000'000;
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_READ_FILE_H_
