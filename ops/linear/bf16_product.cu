#include "ops/linear/tensor_core_product.cuh"

namespace dsv4 {

absl::Status LaunchBf16Product(Stream& stream, const ProductWeights& weights, const ProductParams& params,
                               int64_t groups_or_slots, const ProductTiles& tiles) {
  return tensor_core_product::LaunchWeight<tensor_core_product::Bf16Weight>(stream, weights, params, groups_or_slots,
                                                                            tiles);
}

}  // namespace dsv4
