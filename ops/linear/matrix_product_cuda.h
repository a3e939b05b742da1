// The CUDA backend's matrix product, shared by the ops that multiply by a weight matrix (linear, lm_head, moe); the
// counterpart of matrix_product_cpu.h.
//
// Which kernel serves is a pure function (choose_kernel.h). Nothing here needs a preparation but the loading of
// kernels, which the warm-up registry does.
#ifndef DSV4_OPS_LINEAR_MATRIX_PRODUCT_CUDA_H_
#define DSV4_OPS_LINEAR_MATRIX_PRODUCT_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

// Rows by expert, as `moe` lists them on the device. A choice is a number of a row of `out`.
struct ExpertRows {
  TensorView slots;    // i32 [S, 3], contiguous: the expert (-1: the slot is empty), where in `choices` its rows
                       // begin, and how many they are
  TensorView choices;  // i32 [C], contiguous
  int64_t choices_per_row = 1;  // choice c reads row c / choices_per_row of x
  int64_t rows = 0;             // that an expert has, at most or nearly so
};

struct MatrixProduct {
  TensorView x;                         // f32|bf16 [N, G*K]
  QuantizedWeight weight;               // [G*O, K]; with `experts` [E, O, K]
  int64_t groups = 1;                   // G
  bool quantize_activations = false;    // as `linear` does
  TensorView out;                       // f32|bf16 [N, G*O]; with `experts` [C, O]
  TensorView live_rows;                 // optional, i32 [N]: rows with a value below 0 are neither read nor written
  const ExpertRows* experts = nullptr;  // optional; with groups = 1 and without live_rows
};

// The caller has validated the operands. A row's bits depend on that row alone and on no number of rows.
absl::Status RecordMatrixProductCuda(Stream& stream, const MatrixProduct& product);

}  // namespace dsv4

#endif  // DSV4_OPS_LINEAR_MATRIX_PRODUCT_CUDA_H_
