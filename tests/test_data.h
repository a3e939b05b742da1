// Finds the files of tests/data, wherever a test binary runs: under Bazel, or copied somewhere with a folder
// `tests/data` or `data` beside it.
#ifndef DSV4_TESTS_TEST_DATA_H_
#define DSV4_TESTS_TEST_DATA_H_

#include <string>

#include "absl/status/statusor.h"

namespace dsv4 {

// The path of `name` (such as "ops_golden.safetensors"). NotFound names the places that were tried.
absl::StatusOr<std::string> FindTestData(const std::string& name);

}  // namespace dsv4

#endif  // DSV4_TESTS_TEST_DATA_H_
