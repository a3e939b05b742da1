#include "ops/linear/product_reference.h"

#include <cstddef>

namespace dsv4 {

std::vector<float> ReferenceProduct(const std::vector<double>& x, int64_t rows, const TestWeight& weight,
                                    int64_t groups) {
  const int64_t in = weight.view().cols();
  const int64_t out = weight.view().rows() / groups;
  std::vector<float> expected;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t o = 0; o < groups * out; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < in; ++k) {
        sum += x[static_cast<size_t>(i * groups * in + o / out * in + k)] * weight.At(o, k);
      }
      expected.push_back(static_cast<float>(sum));
    }
  }
  return expected;
}

std::vector<double> QuantizedInputs(const std::vector<float>& x, int64_t group_size) {
  std::vector<double> quantized;
  for (size_t begin = 0; begin < x.size(); begin += static_cast<size_t>(group_size)) {
    const std::vector<double> group(x.begin() + static_cast<std::ptrdiff_t>(begin),
                                    x.begin() + static_cast<std::ptrdiff_t>(begin) + group_size);
    const std::vector<double> rounded = QuantizedActivations(group, 128);
    quantized.insert(quantized.end(), rounded.begin(), rounded.end());
  }
  return quantized;
}

}  // namespace dsv4
