// The CUDA half of the op. Record calls it; benchmarks and tests may choose the kernel.
#ifndef DSV4_OPS_COMPRESS_STORE_COMPRESS_STORE_CUDA_H_
#define DSV4_OPS_COMPRESS_STORE_COMPRESS_STORE_CUDA_H_

#include "absl/status/status.h"
#include "ops/compress_store/compress_store.h"
#include "ops/compress_store/kernel_choice.h"
#include "runtime/stream.h"

namespace dsv4::compress_store {

// `params` must have passed Validate. `kernel` is what ChooseKernel says, or kGeneric.
absl::Status RecordCuda(Stream& stream, const Params& params, Kernel kernel);

}  // namespace dsv4::compress_store

#endif  // DSV4_OPS_COMPRESS_STORE_COMPRESS_STORE_CUDA_H_
