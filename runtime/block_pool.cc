#include "runtime/block_pool.h"

#include <algorithm>
#include <limits>

#include "runtime/str_cat.h"

namespace dsv4 {

BlockPool::BlockPool(int32_t num_blocks) : reference_counts_(std::max(num_blocks, 0), 0) {
  free_.reserve(reference_counts_.size());
  for (int32_t block = this->num_blocks() - 1; block >= 0; --block) free_.push_back(block);
}

int32_t BlockPool::reference_count(int32_t block) const {
  if (block < 0 || block >= num_blocks()) return 0;
  return reference_counts_[block];
}

absl::StatusOr<std::vector<int32_t>> BlockPool::Allocate(int64_t count) {
  if (count < 0) return absl::InvalidArgumentError(StrCat("blocks: expected a count of at least 0, got ", count));
  if (count > num_free()) {
    return absl::ResourceExhaustedError(
        StrCat("blocks: asked for ", count, ", ", num_free(), " of ", num_blocks(), " are free"));
  }
  std::vector<int32_t> blocks(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (int32_t block : blocks) reference_counts_[block] = 1;
  return blocks;
}

absl::Status BlockPool::Retain(absl::Span<const int32_t> blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int32_t references = reference_count(blocks[i]);
    if (references > 0 && references < std::numeric_limits<int32_t>::max()) {
      ++reference_counts_[blocks[i]];
      continue;
    }
    for (size_t k = 0; k < i; ++k) --reference_counts_[blocks[k]];
    return absl::InvalidArgumentError(StrCat("block ", blocks[i], ": expected a block in use of 0 to ",
                                                   num_blocks() - 1, ", got one with ", references, " references"));
  }
  return absl::OkStatus();
}

absl::Status BlockPool::Release(absl::Span<const int32_t> blocks) {
  const size_t num_free_before = free_.size();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (reference_count(blocks[i]) > 0) {
      if (--reference_counts_[blocks[i]] == 0) free_.push_back(blocks[i]);
      continue;
    }
    for (size_t k = 0; k < i; ++k) ++reference_counts_[blocks[k]];
    free_.resize(num_free_before);
    const bool in_range = blocks[i] >= 0 && blocks[i] < num_blocks();
    return absl::InvalidArgumentError(
        in_range ? StrCat("block ", blocks[i], ": released more often than it has references (",
                                reference_counts_[blocks[i]], ")")
                 : StrCat("block ", blocks[i], ": expected one of 0 to ", num_blocks() - 1));
  }
  return absl::OkStatus();
}

}  // namespace dsv4
