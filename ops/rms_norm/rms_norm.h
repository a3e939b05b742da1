// out = weight * x * rsqrt(mean(x^2) + eps), per row, in fp32, rounded once to out's type.
//
// Contract
//   Every row is processed, pads too (a row never affects another). x and out may be the same view.
//   Reads before the wait: the weight.
// Source: specification, section 3.1.
#ifndef DSV4_OPS_RMS_NORM_H_
#define DSV4_OPS_RMS_NORM_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4::rms_norm {

struct Params {
  TensorView x;       // f32|bf16 [N, D]
  WeightView weight;  // f32|bf16 [D]
  float eps = 0.0f;
  TensorView out;     // f32|bf16 [N, D]
};

absl::Status Validate(const Params& params);
absl::Status Record(Stream& stream, const Params& params);
void RunCpu(const Params& params);

}  // namespace dsv4::rms_norm

#endif  // DSV4_OPS_RMS_NORM_H_
