#include "runtime/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, StrCat(path, ": cannot open"));
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, StrCat(path, ": cannot read its size"));
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(StrCat(path, ": expected a regular file"));
  if (info.st_size > kMaxTextFileBytes) {
    return absl::InvalidArgumentError(
        StrCat(path, ": expected at most ", kMaxTextFileBytes, " bytes, got ", info.st_size));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = read(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, StrCat(path, ": cannot read"));
    if (count == 0) break;  // it was shortened meanwhile
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace dsv4
