#include "tests/read_selection.h"

#include "runtime/status.h"

namespace dsv4 {

absl::StatusOr<HostSelection> HostSelection::Read(Stream& stream, const Selection& selection) {
  HostSelection host;
  host.k_ = selection.indices.extents[1];
  host.width_ = selection.scores.extents[1];
  host.indices_.resize(selection.indices.num_elements());
  host.scores_.resize(selection.scores.num_elements());
  DSV4_RETURN_IF_ERROR(
      stream.CopyToHost(host.indices_.data(), selection.indices.data, selection.indices.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.CopyToHost(host.scores_.data(), selection.scores.data, selection.scores.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream.Synchronize());
  return host;
}

std::vector<int32_t> HostSelection::Chosen(int64_t row) const {
  std::vector<int32_t> chosen;
  for (int64_t i = row * k_; i < (row + 1) * k_; ++i) {
    if (indices_[i] >= 0) chosen.push_back(indices_[i]);
  }
  return chosen;
}

std::vector<float> HostSelection::Scores(int64_t row, int64_t visible) const {
  const auto first = scores_.begin() + row * width_;
  return std::vector<float>(first, first + visible);
}

}  // namespace dsv4
