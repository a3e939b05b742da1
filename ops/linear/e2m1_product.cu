#include "ops/linear/tensor_core_product.cuh"

namespace dsv4 {

absl::Status LaunchE2m1Product(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                               int64_t groups_or_slots, const ProductTiles& tiles) {
  return params.quantize_activations ? tensor_core_product::LaunchWeight<tensor_core_product::E2m1Weight<true>>(
                                           stream, weights, params, groups_or_slots, tiles)
                                     : tensor_core_product::LaunchWeight<tensor_core_product::E2m1Weight<false>>(
                                           stream, weights, params, groups_or_slots, tiles);
}

}  // namespace dsv4
