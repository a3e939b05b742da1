#include "ops/lm_head/lm_head_cuda.h"

#include "ops/linear/matrix_product_cuda.h"

namespace dsv4::lm_head {

absl::Status RecordCuda(Stream& stream, const Params& params) {
  return RecordMatrixProductCuda(
      stream, {.x = params.x, .weight = params.weight, .out = params.logits, .live_rows = params.rows});
}

}  // namespace dsv4::lm_head
