// Allocates the blocks (pages) of one cache group. Blocks have reference counts, so that requests can share
// the blocks of a common prefix. Host only: it hands out indices, it owns no cache memory.
//
//   BlockPool pool(1024);
//   DSV4_ASSIGN_OR_RETURN(std::vector<int32_t> blocks, pool.Allocate(3));   // all three or none
//   pool.Release(blocks);
#ifndef DSV4_RUNTIME_BLOCK_POOL_H_
#define DSV4_RUNTIME_BLOCK_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace dsv4 {

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(reference_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t reference_count(int32_t block) const;

  // `count` blocks with one reference each, or ResourceExhausted and none. A released block is reused before one
  // that was never used (last released, first reused).
  absl::StatusOr<std::vector<int32_t>> Allocate(int64_t count);

  // Adds, or drops, one reference to each block; a block without references is free. InvalidArgument, and nothing
  // changed, if a block is out of range or free, or if `blocks` names one more often than it has references.
  absl::Status Retain(absl::Span<const int32_t> blocks);
  absl::Status Release(absl::Span<const int32_t> blocks);

 private:
  std::vector<int32_t> reference_counts_;
  std::vector<int32_t> free_;  // a stack
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_BLOCK_POOL_H_
