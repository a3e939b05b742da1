#include "ops/save_partial_states/save_buffers.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/stream.h"

namespace dsv4::save_partial_states {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kColdBytes = int64_t{1} << 30;  // that the steps of a graph touch together, where they can

int64_t RowBytes(const CompileKey& key) { return 2 * key.state_width * DTypeBytes(key.cache_dtype); }

}  // namespace

absl::StatusOr<SaveBuffers> SaveBuffers::Create(Device& device, int64_t bytes) {
  SaveBuffers buffers;
  buffers.device_ = &device;
  DSV4_ASSIGN_OR_RETURN(buffers.arena_, Arena::Create(device, [&](Arena& arena) {
                          buffers.pool_ = arena.Add(DType::kU8, {bytes});
                        }));
  // The same random numbers all over, as floats of about 1.
  constexpr int64_t kChunk = int64_t{16} << 20;
  std::vector<float> chunk(kChunk / sizeof(float));
  std::mt19937 random(1);
  for (float& x : chunk) x = static_cast<float>(random()) * 0x1p-31f - 1.0f;
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device.CreateStream());
  for (int64_t begin = 0; begin < bytes; begin += kChunk) {
    DSV4_RETURN_IF_ERROR(
        stream->CopyToDevice(buffers.pool_.At<uint8_t>(begin), chunk.data(), std::min(kChunk, bytes - begin)));
  }
  DSV4_RETURN_IF_ERROR(stream->Synchronize());
  return buffers;
}

int SaveBuffers::Copies(const CompileKey& key, int64_t tokens) {
  const int64_t step_bytes = 2 * tokens * RowBytes(key);
  return static_cast<int>(std::clamp<int64_t>(kColdBytes / step_bytes, 20, 200));
}

absl::StatusOr<std::vector<SaveBuffers::Set>> SaveBuffers::LayOut(const CompileKey& key, int64_t tokens, int copies) {
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device_->CreateStream());
  std::mt19937_64 random(7);
  int64_t used = 0;
  const auto add = [&](DType dtype, std::initializer_list<int64_t> extents) {
    const TensorView view = TensorView::Contiguous(pool_.At<uint8_t>(used), dtype, extents);
    used += (view.num_bytes() + kAlignment - 1) / kAlignment * kAlignment;
    return view;
  };
  // Twice as many rows as tokens: the rest belongs to requests that are not in the step.
  const int64_t blocks = (2 * tokens + key.block_size - 1) / key.block_size;
  // The layers of a step share their slots and positions.
  const TensorView shared_positions = add(DType::kI64, {tokens});
  const TensorView shared_slots = add(DType::kI64, {tokens});
  std::vector<int64_t> slots(blocks * key.block_size), positions(tokens);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  std::shuffle(slots.begin(), slots.end(), random);
  for (int64_t& position : positions) position = static_cast<int64_t>(random() % 65536);
  DSV4_RETURN_IF_ERROR(stream->CopyToDevice(shared_slots.data, slots.data(), shared_slots.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream->CopyToDevice(shared_positions.data, positions.data(), shared_positions.num_bytes()));
  DSV4_RETURN_IF_ERROR(stream->Synchronize());
  std::vector<Set> sets(copies);
  for (Set& set : sets) {
    Params& params = set.params;
    const TensorView projection = add(key.input_dtype, {tokens, 2 * key.head_size});
    params.kv = projection.Columns(0, key.head_size);
    params.score = projection.Columns(key.head_size, key.head_size);
    params.ape = WeightView(add(DType::kF32, {key.compress_ratio, key.head_size}));
    params.positions = shared_positions;
    params.slots = shared_slots;
    params.state_cache = add(key.cache_dtype, {blocks, key.block_size, 2 * key.state_width});
    if (used > pool_.num_bytes()) {
      return absl::ResourceExhaustedError(StrCat("a pool of ", pool_.num_bytes(), " bytes is too small"));
    }
    set.bytes = projection.num_bytes() + tokens * RowBytes(key) + params.positions.num_bytes() +
                params.slots.num_bytes() + std::min(tokens, key.compress_ratio) * key.head_size * 4;
  }
  return sets;
}

}  // namespace dsv4::save_partial_states
