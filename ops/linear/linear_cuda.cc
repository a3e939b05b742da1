#include "ops/linear/linear_cuda.h"

#include "ops/linear/choose_kernel.h"
#include "ops/linear/matrix_product_cuda.h"
#include "runtime/cublaslt.h"

namespace dsv4::linear {

absl::Status RecordCuda(Stream& stream, const Params& params) {
  const CublasLtProduct library = {.x = params.x, .weight = params.weight.values, .out = params.out};
  ProductProblem problem = MakeProductProblem(params.x, params.weight, params.groups, params.quantize_activations);
  problem.library_allowed = CublasLtFits(library);
  if (ChooseKernel(problem) == ProductKernel::kCublasLt) return RecordCublasLtProduct(stream, library);
  return RecordMatrixProductCuda(stream, {.x = params.x,
                                          .weight = params.weight,
                                          .groups = params.groups,
                                          .quantize_activations = params.quantize_activations,
                                          .out = params.out});
}

}  // namespace dsv4::linear
