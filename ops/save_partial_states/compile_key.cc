#include "ops/save_partial_states/compile_key.h"

#include <algorithm>

#include "runtime/tensor_view.h"

namespace dsv4::save_partial_states {
namespace {

constexpr int64_t kWidestVector = 4;
constexpr int64_t kTokensForTwoPasses = 2048;  // any number gives the same result

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
  return tokens_abreast == 1 && tokens >= kTokensForTwoPasses ? 2 : tokens_abreast;
}

std::vector<CompileKey> WarmupKeys(int64_t head_dim, int64_t compress_ratio) {
  if (head_dim < 1 || (compress_ratio != 4 && compress_ratio != 128)) return {};
  return {PublishedKey(head_dim, compress_ratio)};
}

}  // namespace dsv4::save_partial_states
