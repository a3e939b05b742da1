#include "runtime/data_files.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "runtime/str_cat.h"

namespace dsv4 {

absl::StatusOr<std::string> FindDataFile(const std::string& relative) {
  namespace fs = std::filesystem;
  std::vector<fs::path> candidates;
  const char* source_dir = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (source_dir != nullptr && workspace != nullptr) candidates.push_back(fs::path(source_dir) / workspace / relative);

  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    for (const fs::directory_entry& entry : fs::directory_iterator(program.string() + ".runfiles", error)) {
      candidates.push_back(entry.path() / relative);
    }
    candidates.push_back(program.parent_path() / relative);
  }
  candidates.push_back(fs::path(relative));

  std::string looked_at;
  for (const fs::path& candidate : candidates) {
    if (fs::exists(candidate, error)) return candidate.string();
    looked_at = StrCat(looked_at, looked_at.empty() ? "" : ", ", candidate.string());
  }
  return absl::NotFoundError(StrCat(relative, ": not found; looked at ", looked_at));
}

}  // namespace dsv4
