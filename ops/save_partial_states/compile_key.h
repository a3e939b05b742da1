// What a save kernel is compiled for, and which kernel serves which call. All of this is pure; the kernels are in
// save_partial_states_kernel.cuh.
//
//   const CompileKey key = Dispatch(params);
//   const int kernel = FindSpecialised(key);   // index into kSpecialisedKeys, or -1: a generic kernel
#ifndef DSV4_OPS_SAVE_PARTIAL_STATES_COMPILE_KEY_H_
#define DSV4_OPS_SAVE_PARTIAL_STATES_COMPILE_KEY_H_

#include <array>
#include <cstdint>
#include <vector>

#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/dtype.h"

namespace dsv4::save_partial_states {

// Sizes and strides are in elements.
struct CompileKey {
  int64_t head_size = 0;
  int64_t vector_width = 0;  // elements of one access, 1, 2 or 4: the most that sizes, strides and pointers allow
  int64_t state_width = 0;
  int64_t compress_ratio = 0;
  int64_t kv_stride = 0;
  int64_t score_stride = 0;
  int64_t ape_stride = 0;
  int64_t block_stride = 0;  // of the state cache
  int64_t row_stride = 0;    // of the state cache
  int64_t block_size = 0;
  DType input_dtype = DType::kF32;
  DType cache_dtype = DType::kF32;

  friend constexpr bool operator==(const CompileKey&, const CompileKey&) = default;
};

// The key of a layer of the published model: kv and score are two halves of one projection, the cache is contiguous.
// `compress_ratio` is 4, whose windows overlap and so keep two values a channel, or 128.
constexpr CompileKey PublishedKey(int64_t head_dim, int64_t compress_ratio) {
  const int64_t head_size = (compress_ratio == 4 ? 2 : 1) * head_dim;
  const int64_t block_size = compress_ratio == 4 ? 4 : 8;
  return {.head_size = head_size,
          .vector_width = head_size % 4 == 0 ? 4 : head_size % 2 == 0 ? 2 : 1,
          .state_width = head_size,
          .compress_ratio = compress_ratio,
          .kv_stride = 2 * head_size,
          .score_stride = 2 * head_size,
          .ape_stride = head_size,
          .block_stride = block_size * 2 * head_size,
          .row_stride = 2 * head_size,
          .block_size = block_size};
}

// The keys that have a kernel of their own.
inline constexpr std::array<CompileKey, 4> kSpecialisedKeys = {PublishedKey(512, 4), PublishedKey(512, 128),
                                                               PublishedKey(128, 4), PublishedKey(128, 128)};

// `params` must have passed Validate.
CompileKey Dispatch(const Params& params);

// Index into kSpecialisedKeys, or -1.
int FindSpecialised(const CompileKey& key);

// How many consecutive tokens a block of a kernel saves that takes `tokens_abreast` of them at a time: those, so that all
// multiprocessors share the work, but two where a block would take one of very many (1 % faster than one on an H200).
int64_t TokensPerBlock(int64_t tokens, int64_t tokens_abreast);

// The keys that a model with such layers uses; none if the ratio is not 4 or 128 or `head_dim` < 1.
std::vector<CompileKey> WarmupKeys(int64_t head_dim, int64_t compress_ratio);

}  // namespace dsv4::save_partial_states

#endif  // DSV4_OPS_SAVE_PARTIAL_STATES_COMPILE_KEY_H_
