#include "ops/compress_store/kernel_choice.h"

#include <cstdint>

namespace dsv4::compress_store {
namespace {

// The specialised kernels read four f32 of a state row at a time.
bool HasWideRows(const TensorView& state_cache) {
  return state_cache.dtype == DType::kF32 && reinterpret_cast<uintptr_t>(state_cache.data) % 16 == 0 &&
         state_cache.strides[0] % 4 == 0 && state_cache.strides[1] % 4 == 0;
}

}  // namespace

Kernel ChooseKernel(const Params& params) {
  const PagedRows& entries = params.entries;
  if (!HasWideRows(params.state_cache) || entries.rope_size % 4 != 0) return Kernel::kGeneric;
  const int64_t block_size = params.state_cache.extents[1];
  if (params.ratio == 4 && params.overlap && block_size == 4) {
    // A warp has all channels of a head of 128, which the rotation and a scale a row need.
    if (entries.row_size == 128) return Kernel::kOverlapped128;
    if (entries.row_size == 512 && !params.hadamard && entries.format != RowFormat::kFp8Key) {
      return Kernel::kOverlapped512;
    }
  }
  if (params.ratio == 128 && !params.overlap && block_size == 8 && entries.row_size == 512 && !params.hadamard &&
      entries.format != RowFormat::kFp8Key) {
    return Kernel::kLong512;
  }
  return Kernel::kGeneric;
}

}  // namespace dsv4::compress_store
