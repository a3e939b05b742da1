// The CUDA half of the op. Record calls it; benchmarks and tests may choose the kernel.
#ifndef DSV4_OPS_SPARSE_ATTENTION_SPARSE_ATTENTION_CUDA_H_
#define DSV4_OPS_SPARSE_ATTENTION_SPARSE_ATTENTION_CUDA_H_

#include "absl/status/status.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "runtime/stream.h"

namespace dsv4::sparse_attention {

enum class KernelChoice {
  kBySizes,  // tensor cores where they serve (TensorCoresServe)
  kPlain,
};

// Whether the kernel on tensor cores takes these views. Pure.
bool TensorCoresServe(const Params& params);

// `params` must have passed Validate.
absl::Status RecordCuda(Stream& stream, const Params& params, KernelChoice choice = KernelChoice::kBySizes);

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_SPARSE_ATTENTION_CUDA_H_
