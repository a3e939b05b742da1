#include <vector>

#include "ops/linear/linear.h"
#include "ops/linear/matrix_product_cpu.h"
#include "runtime/element_access.h"

namespace dsv4::linear {

void RunCpu(const Params& params) {
  const int64_t rows = params.x.extents[0];
  const int64_t in = params.weight.cols();
  const int64_t out = params.weight.rows() / params.groups;
  std::vector<float> x(rows * in);
  std::vector<float> product(rows * out);
  for (int64_t group = 0; group < params.groups; ++group) {
    const TensorView x_group = params.x.Columns(group * in, in);
    const TensorView out_group = params.out.Columns(group * out, out);
    for (int64_t i = 0; i < rows; ++i) {
      float* row = x.data() + i * in;
      LoadRow(x_group, row, i);
      if (params.quantize_activations) QuantizeActivationRowCpu(row, in, kActivationBlock);
    }
    MatrixProductCpu(x.data(), rows, params.weight, group * out, out, product.data());
    for (int64_t i = 0; i < rows; ++i) StoreRow(out_group, product.data() + i * out, i);
  }
}

}  // namespace dsv4::linear
