#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "ops/linear/choose_kernel.h"
#include "ops/linear/matrix_product_cuda.h"
#include "ops/linear/product_kernel.cuh"

namespace dsv4 {
namespace {

// Strides of a weight or its scales, in bytes; of a stack, the matrices' too.
int64_t RowBytes(const WeightView& view) {
  return view.empty() ? 0 : view.stride(view.rank() - 2) * DTypeBytes(view.dtype());
}
int64_t MatrixBytes(const WeightView& view) { return view.rank() == 3 ? view.stride(0) * DTypeBytes(view.dtype()) : 0; }

bool IsMultiple(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether the scalar kernel may read four consecutive elements at a time.
bool AllowsQuads(const QuantizedWeight& weight) {
  const int64_t bytes = 4 * DTypeBytes(weight.values.dtype());
  return weight.cols() % 4 == 0 && IsMultiple(weight.values.data(), bytes) && RowBytes(weight.values) % bytes == 0 &&
         MatrixBytes(weight.values) % bytes == 0;
}

// Whether each group's part of each row of x starts on `bytes`, and has a whole number of them.
bool XAligned(const MatrixProduct& product, int64_t inputs, int64_t bytes) {
  const int64_t element_bytes = DTypeBytes(product.x.dtype);
  return IsMultiple(product.x.data, bytes) && (inputs * element_bytes % bytes == 0 || product.groups == 1) &&
         (product.x.extents[0] <= 1 || product.x.strides[0] * element_bytes % bytes == 0);
}

}  // namespace

absl::Status RecordMatrixProductCuda(Stream& stream, const MatrixProduct& product) {
  const QuantizedWeight& weight = product.weight;
  ProductProblem problem = MakeProductProblem(product.x, weight, product.groups, product.quantize_activations);
  if (product.experts != nullptr) {
    problem.by_expert = true;
    problem.rows = product.experts->rows;
    problem.groups = product.experts->slots.extents[0];
  }
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() / 2;
  if (problem.inputs > kMaxExtent || weight.rows() > kMaxExtent || weight.block_rows > kMaxExtent ||
      weight.block_cols > kMaxExtent) {
    return absl::InvalidArgumentError(absl::StrCat("weight: expected at most ", kMaxExtent, " rows and columns, got ",
                                                   weight.rows(), " x ", problem.inputs, ", in blocks of ",
                                                   weight.block_rows, " x ", weight.block_cols));
  }
  const ProductKernel kernel = ChooseKernel(problem);
  const ProductTiles tiles = ChooseTiles(problem);
  const bool tensor_core = kernel == ProductKernel::kTensorCore;
  const int64_t x_piece_bytes = tensor_core ? 16 : 4 * DTypeBytes(product.x.dtype);

  const ProductWeights weights = {.values = WeightPointer<uint8_t>(weight.values),
                                  .scales = WeightPointer<uint8_t>(weight.scales),
                                  .row_bytes = RowBytes(weight.values),
                                  .matrix_bytes = MatrixBytes(weight.values),
                                  .scale_row_bytes = RowBytes(weight.scales),
                                  .scale_matrix_bytes = MatrixBytes(weight.scales),
                                  .inputs = problem.inputs,
                                  .outputs = problem.outputs,
                                  .block_rows = static_cast<int32_t>(weight.block_rows),
                                  .block_cols = static_cast<int32_t>(weight.block_cols),
                                  .dtype = weight.values.dtype(),
                                  .has_scales = !weight.scales.empty(),
                                  .float_scales = weight.scales.dtype() == DType::kF32,
                                  .vectors = AllowsQuads(weight),
                                  .by_expert = problem.by_expert,
                                  .channel_tiles = tiles.channel_tiles,
                                  .stages = tiles.stages,
                                  .x_rows = tiles.x_rows};
  ProductParams params = {.x = product.x.data,
                          .x_stride = product.x.strides[0],
                          .out = product.out.data,
                          .out_stride = product.out.strides[0],
                          .x_is_bf16 = product.x.dtype == DType::kBf16,
                          .x_vectors = XAligned(product, problem.inputs, x_piece_bytes),
                          .out_is_bf16 = product.out.dtype == DType::kBf16,
                          .quantize_activations = product.quantize_activations,
                          .rows = problem.rows,
                          .live_rows = product.live_rows.As<int32_t>(),
                          .expert_slots = nullptr,
                          .choices = nullptr,
                          .choices_per_row = 1};
  const int64_t groups_or_slots = problem.groups;
  if (product.experts != nullptr) {
    const ExpertRows& experts = *product.experts;
    params.expert_slots = experts.slots.As<int32_t>();
    params.choices = experts.choices.As<int32_t>();
    params.choices_per_row = experts.choices_per_row;
  }
  if (problem.rows == 0 || problem.outputs == 0 || groups_or_slots == 0) return absl::OkStatus();
  if (!tensor_core) return LaunchScalarProduct(stream, weights, params, groups_or_slots);
  switch (problem.weight_dtype) {
    case DType::kBf16:
      return LaunchBf16Product(stream, weights, params, groups_or_slots, tiles);
    case DType::kE4m3:
      return LaunchE4m3Product(stream, weights, params, groups_or_slots, tiles);
    default:
      return LaunchE2m1Product(stream, weights, params, groups_or_slots, tiles);
  }
}

}  // namespace dsv4
