#include "ops/save_partial_states/save_partial_states_warmup.h"

#include <memory>

#include "runtime/status.h"
#include "runtime/stream.h"

namespace dsv4::save_partial_states {

absl::StatusOr<WarmupTensors> WarmupInputs(Device& device, const CompileKey& key) {
  WarmupTensors inputs;
  Params& params = inputs.params;
  TensorView ape;
  DSV4_ASSIGN_OR_RETURN(inputs.arena, Arena::Create(device, [&](Arena& arena) {
                          params.kv = arena.Add(key.input_dtype, {1, key.head_size});
                          params.score = arena.Add(key.input_dtype, {1, key.head_size});
                          ape = arena.Add(DType::kF32, {key.compress_ratio, key.ape_stride});
                          params.positions = arena.Add(DType::kI64, {1});
                          params.slots = arena.Add(DType::kI64, {1});
                          params.state_cache = arena.Add(key.cache_dtype, {key.block_size, key.row_stride});
                        }));
  // One row, or one block, may have any stride.
  params.kv.strides[0] = key.kv_stride;
  params.score.strides[0] = key.score_stride;
  ape.extents[1] = key.head_size;
  params.ape = WeightView(ape);
  const TensorView rows = params.state_cache;
  params.state_cache = {.data = rows.data,
                        .dtype = rows.dtype,
                        .rank = 3,
                        .extents = {1, key.block_size, 2 * key.state_width},
                        .strides = {key.block_stride, key.row_stride, 1}};

  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateStream());
  DSV4_RETURN_IF_ERROR(stream->Fill(params.slots.data, 0xFF, params.slots.num_bytes()));  // -1
  DSV4_RETURN_IF_ERROR(stream->Synchronize());
  return inputs;
}

absl::Status Warmup(Device& device, const std::vector<CompileKey>& keys) {
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateStream());
  for (const CompileKey& key : keys) {
    DSV4_ASSIGN_OR_RETURN(const WarmupTensors inputs, WarmupInputs(device, key));
    DSV4_RETURN_IF_ERROR(Record(*stream, inputs.params));
    DSV4_RETURN_IF_ERROR(stream->Synchronize());
  }
  return absl::OkStatus();
}

}  // namespace dsv4::save_partial_states
