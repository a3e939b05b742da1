#include "ops/save_partial_states/compile_key.h"

#include <algorithm>
#include <memory>

#include "runtime/status.h"
#include "runtime/stream.h"

namespace dsv4::save_partial_states {
namespace {

constexpr int64_t kWidestVector = 4;
constexpr int64_t kBlocksWanted = 132;  // the multiprocessors of an H200; any number gives the same result
constexpr int64_t kMostPasses = 4;

// Whether rows that start at `view`'s first element, a multiple of `stride` apart, can be accessed in vectors.
bool Allows(const TensorView& view, int64_t vector_width, int64_t stride) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  return address % static_cast<uintptr_t>(vector_width * DTypeBytes(view.dtype)) == 0 && stride % vector_width == 0;
}

int64_t VectorWidth(const Params& params, const CompileKey& key) {
  int64_t width = kWidestVector;
  while (width > 1 && !(key.head_size % width == 0 && key.state_width % width == 0 &&
                        Allows(params.kv, width, key.kv_stride) && Allows(params.score, width, key.score_stride) &&
                        Allows(params.ape.view(), width, key.ape_stride) &&
                        Allows(params.state_cache, width, key.block_stride) &&
                        Allows(params.state_cache, width, key.row_stride))) {
    width /= 2;
  }
  return width;
}

}  // namespace

CompileKey Dispatch(const Params& params) {
  CompileKey key = {.head_size = params.kv.extents[1],
                    .state_width = params.state_cache.extents[2] / 2,
                    .compress_ratio = params.ape.extent(0),
                    .kv_stride = params.kv.strides[0],
                    .score_stride = params.score.strides[0],
                    .ape_stride = params.ape.stride(0),
                    .block_stride = params.state_cache.strides[0],
                    .row_stride = params.state_cache.strides[1],
                    .block_size = params.state_cache.extents[1],
                    .input_dtype = params.kv.dtype,
                    .cache_dtype = params.state_cache.dtype};
  key.vector_width = VectorWidth(params, key);
  return key;
}

int FindSpecialised(const CompileKey& key) {
  const auto found = std::find(kSpecialisedKeys.begin(), kSpecialisedKeys.end(), key);
  return found == kSpecialisedKeys.end() ? -1 : static_cast<int>(found - kSpecialisedKeys.begin());
}

int64_t TokensPerBlock(int64_t tokens, int64_t tokens_abreast) {
  const int64_t passes = (tokens + kBlocksWanted * tokens_abreast - 1) / (kBlocksWanted * tokens_abreast);
  return tokens_abreast * std::clamp<int64_t>(passes, 1, kMostPasses);
}

std::vector<CompileKey> WarmupKeys(int64_t head_dim, int64_t compress_ratio) {
  if (head_dim < 1 || (compress_ratio != 4 && compress_ratio != 128)) return {};
  return {PublishedKey(head_dim, compress_ratio)};
}

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
