#include "tests/test_data.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {

absl::StatusOr<std::string> FindTestData(const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path in_sources = fs::path("tests") / "data" / name;
  std::vector<fs::path> candidates = {in_sources};  // bazel test, bazel run, and the top of a checkout
  if (const fs::path program = fs::read_symlink("/proc/self/exe", error); !error) {
    const fs::path folder = program.parent_path();
    candidates.push_back(fs::path(program.string() + ".runfiles") / "dsv4" / in_sources);
    candidates.push_back(folder / in_sources);
    candidates.push_back(folder / "data" / name);
  }
  std::string tried;
  for (const fs::path& candidate : candidates) {
    if (fs::is_regular_file(candidate, error)) return candidate.string();
    StrAppend(&tried, tried.empty() ? "" : ", ", candidate.string());
  }
  return absl::NotFoundError(StrCat("no test data ", name, "; looked at ", tried));
}

}  // namespace dsv4
