#include "ops/output_projection/output_projection.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/linear/check_weight.h"
#include "ops/linear/linear.h"
#include "ops/output_projection/output_projection_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::output_projection {
namespace {

AccessList RotationAccesses(const Params& params) {
  return AccessList()
      .Read("o", params.o)
      .Read("positions", params.positions)
      .Weight("cos_sin", params.cos_sin)
      .Write("rotated", params.rotated);
}

// wo_a, over the heads of each group side by side.
linear::Params FirstProduct(const Params& params) {
  const TensorView& rotated = params.rotated;
  return {.x = rotated.Reshape({rotated.extents[0], rotated.extents[1] * rotated.extents[2]}),
          .weight = params.wo_a,
          .groups = params.groups,
          .quantize_activations = false,
          .out = params.low_rank};
}

linear::Params SecondProduct(const Params& params) {
  return {.x = params.low_rank,
          .weight = params.wo_b,
          .groups = 1,
          .quantize_activations = params.quantize_activations,
          .out = params.out};
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("o", params.o, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, kAnyExtent}));
  const int64_t rows = params.o.extents[0];
  const int64_t heads = params.o.extents[1];
  const int64_t channels = params.o.extents[2];
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("cos_sin", params.cos_sin, {DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t rotary = params.cos_sin.extent(1);
  if (rotary % 2 != 0 || rotary > channels) {
    return absl::InvalidArgumentError(
        StrCat("cos_sin: expected an even number of at most ", channels, " rotary channels, got ", rotary));
  }
  DSV4_RETURN_IF_ERROR(CheckAtLeast("groups", params.groups, 1));
  if (heads % params.groups != 0) {
    return absl::InvalidArgumentError(StrCat("o: expected heads in ", params.groups, " equal groups, got ", heads));
  }
  DSV4_RETURN_IF_ERROR(CheckMatrix("wo_a", params.wo_a, kAnyExtent, heads / params.groups * channels));
  const int64_t low_rank = params.wo_a.rows();
  if (low_rank % params.groups != 0) {
    return absl::InvalidArgumentError(
        StrCat("wo_a: expected rows in ", params.groups, " equal groups, got ", low_rank));
  }
  DSV4_RETURN_IF_ERROR(CheckMatrix("wo_b", params.wo_b, kAnyExtent, low_rank));
  DSV4_RETURN_IF_ERROR(CheckTensor("rotated", params.rotated, {DType::kF32, DType::kBf16}, {rows, heads, channels}));
  if (!params.rotated.is_contiguous()) {
    return absl::InvalidArgumentError("rotated: expected a contiguous tensor, got other strides");
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("low_rank", params.low_rank, {DType::kF32, DType::kBf16}, {rows, low_rank}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, params.wo_b.rows()}));
  return CheckWritesDisjoint(RotationAccesses(params)
                                 .Weight("wo_a", params.wo_a)
                                 .Write("low_rank", params.low_rank)
                                 .Weight("wo_b", params.wo_b)
                                 .Write("out", params.out));
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  DSV4_RETURN_IF_ERROR(stream.Enqueue({.op = "inverse_rope",
                                       .accesses = RotationAccesses(params),
                                       .run = [params] { RunRotationCpu(params); },
                                       .launch = DSV4_IF_CUDA([&] { return RecordRotationCuda(stream, params); })}));
  DSV4_RETURN_IF_ERROR(linear::Record(stream, FirstProduct(params)));
  return linear::Record(stream, SecondProduct(params));
}

}  // namespace dsv4::output_projection
