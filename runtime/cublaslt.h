// Matrix products of cublasLt, with algorithms that are chosen once and never change, and a workspace of our own.
//
//   DSV4_RETURN_IF_ERROR(RecordCublasLtProduct(stream, {.x = x, .weight = weight, .out = out}));
//
// Choosing an algorithm and allocating the stream's workspace happen at the first call with given sizes; that call must
// be outside a capture (run the step once before capturing it, which loads cublasLt's kernels too), and later ones may
// be inside. The choice depends on shapes, strides, alignments and the device, and is kept for the life of the process.
// Algorithms that add into the output in an undetermined order are ruled out.
//
// CUDA only.
#ifndef DSV4_RUNTIME_CUBLASLT_H_
#define DSV4_RUNTIME_CUBLASLT_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

// out = x W^T with fp32 accumulation, rounded once to out's type. Rows may have any stride of at least their length.
struct CublasLtProduct {
  TensorView x;       // bf16 [N, K]
  WeightView weight;  // bf16 [O, K]
  TensorView out;     // f32|bf16 [N, O]
};

// Whether cublasLt takes operands of these alignments and strides: 16 bytes. Pure.
bool CublasLtFits(const CublasLtProduct& product);

// FailedPrecondition inside a capture if the algorithm or the workspace is missing; Unimplemented if cublasLt has no
// algorithm.
absl::Status RecordCublasLtProduct(Stream& stream, const CublasLtProduct& product);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_CUBLASLT_H_
