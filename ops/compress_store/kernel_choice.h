// Which kernel serves which call. Pure; the kernels are in compress_store_cuda.cu.
#ifndef DSV4_OPS_COMPRESS_STORE_KERNEL_CHOICE_H_
#define DSV4_OPS_COMPRESS_STORE_KERNEL_CHOICE_H_

#include <cstdint>

#include "ops/compress_store/compress_store.h"

namespace dsv4::compress_store {

enum class Kernel : uint8_t {
  kOverlapped512,  // ratio 4 with overlap, head 512: a block an entry, a thread four channels of all eight rows
  kOverlapped128,  // the same with head 128: a warp an entry
  kLong512,        // ratio 128 without overlap, head 512: a cluster of blocks an entry, which share its channels
  kGeneric,        // anything: a block an entry, which is put together in shared memory
};

// `params` must have passed Validate.
Kernel ChooseKernel(const Params& params);

}  // namespace dsv4::compress_store

#endif  // DSV4_OPS_COMPRESS_STORE_KERNEL_CHOICE_H_
