// out = x W^T, for weights in every published type, optionally in groups (the grouped output projection).
//
// Contract
//   Group g of G reads columns [g*K, (g+1)*K) of x and weight rows [g*O, (g+1)*O), and writes columns [g*O, (g+1)*O)
//   of out. G = 1 is an ordinary product.
//   Products accumulate in fp32; the result is rounded once to out's type.
//   quantize_activations: x is first quantised as e4m3 with one power-of-two scale per 128 channels of a group's
//   input (the last block may be shorter), as the published model does before FP8 and FP4 weights. The magnitude
//   floor is 1e-4.
//   A row's bits depend on that row alone, whatever N is; but on CUDA a product of more than 64 rows of bf16 by a bf16
//   weight goes to cublasLt (runtime/cublaslt.h), whose order of summation depends on N. Every row is processed, pads
//   too.
//   On CUDA, tensor cores sum the products of 32 or 128 channels where x is bf16 (choose_kernel.h says for which
//   weights); with f32 x all arithmetic is plain fp32.
//   Reads before the wait: the weight.
// Source: specification, sections 3.1, 3.3, 8, 12.1, 12.2.
#ifndef DSV4_OPS_LINEAR_H_
#define DSV4_OPS_LINEAR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::linear {

inline constexpr int64_t kActivationBlock = 128;  // channels that share a scale

struct Params {
  TensorView x;            // f32|bf16 [N, G*K]
  QuantizedWeight weight;  // [G*O, K]
  int64_t groups = 1;      // G
  bool quantize_activations = false;
  TensorView out;  // f32|bf16 [N, G*O]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::linear

#endif  // DSV4_OPS_LINEAR_H_
