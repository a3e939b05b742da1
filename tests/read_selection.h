// Reads what an indexer chose in a step, and the scores it chose by, back from the device.
#ifndef DSV4_TESTS_READ_SELECTION_H_
#define DSV4_TESTS_READ_SELECTION_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "model/indexer.h"
#include "runtime/stream.h"

namespace dsv4 {

class HostSelection {
 public:
  static absl::StatusOr<HostSelection> Read(Stream& stream, const Selection& selection);

  // The chosen entries of a row, ascending, and the scores of its first `visible` entries.
  std::vector<int32_t> Chosen(int64_t row) const;
  std::vector<float> Scores(int64_t row, int64_t visible) const;

 private:
  std::vector<int32_t> indices_;  // [N, k]
  std::vector<float> scores_;     // [N, width]
  int64_t k_ = 0;
  int64_t width_ = 0;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_READ_SELECTION_H_
