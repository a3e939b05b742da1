// Inputs and state caches for timing the op: each copy of it in a graph gets its own, spread over a pool.
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_BUFFERS_H_
#define DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_BUFFERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/arena.h"
#include "runtime/device.h"

namespace dsv4::save_partial_states {

class SaveBuffers {
 public:
  static absl::StatusOr<SaveBuffers> Create(Device& device, int64_t bytes);

  struct Set {
    Params params;
    int64_t bytes = 0;  // that one step has to move: inputs and ape read, rows written
  };
  // The same step in `copies` layers of a published kind, each with its own projection, ape and state cache; `tokens` tokens of
  // different requests, at random slots and positions, which the layers share as those of a model do.
  // ResourceExhausted if the pool is too small.
  absl::StatusOr<std::vector<Set>> LayOut(const CompileKey& key, int64_t tokens, int copies);

  // How many steps to put into a graph: enough to be larger than the L2 where 200 of them can be.
  static int Copies(const CompileKey& key, int64_t tokens);

 private:
  Device* device_ = nullptr;
  Arena arena_;
  TensorView pool_;
};

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_SAVE_BUFFERS_H_
