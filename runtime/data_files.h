// Finds the data files that come with the repository, wherever a program was started: under Bazel, from the
// repository's root, or copied elsewhere together with its data.
#ifndef DSV4_RUNTIME_DATA_FILES_H_
#define DSV4_RUNTIME_DATA_FILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace dsv4 {

// The path of `relative` (from the repository's root, for example "tests/data/tiny"), looked for in this order: Bazel's
// test runfiles, the runfiles beside the running program, the program's folder, the working directory. NotFound names
// the places looked at.
absl::StatusOr<std::string> FindDataFile(const std::string& relative);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_DATA_FILES_H_
