// Runs the attention of single layers on given inputs, one request from position 0 on, and reads back what the layer
// put into its caches. Errors of earlier layers do not add up this way.
#ifndef DSV4_TESTS_LAYER_PROBE_H_
#define DSV4_TESTS_LAYER_PROBE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/decoder.h"
#include "model/weights.h"
#include "runtime/device.h"

namespace dsv4 {

struct LayerResult {
  std::vector<float> attn_out;             // [positions, D]
  std::vector<float> entries;              // [positions / ratio, d]
  std::vector<float> indexer_keys;         // [positions / ratio, di], with an indexer
  std::vector<std::vector<int32_t>> selection;  // of each position, the chosen entries, ascending; with an indexer
  std::vector<std::vector<float>> scores;  // of each position, its visible entries; with an indexer
};

class LayerProbe {
 public:
  // Steps of at most `chunk` positions of a request of at most `positions`.
  static absl::StatusOr<std::unique_ptr<LayerProbe>> Create(Device& device, const ModelConfig& config,
                                                            const ModelWeights& weights, const NumericOptions& numeric,
                                                            int64_t positions, int64_t chunk);

  // inputs: [positions, D], what `attn_norm` puts out. InvalidArgument if they are of another size, or there is no such
  // layer.
  absl::StatusOr<LayerResult> Run(int64_t layer, const std::vector<float>& inputs);

 private:
  LayerProbe() = default;

  absl::Status RunChunk(int64_t layer, const float* inputs, int64_t first_position, int64_t count, LayerResult& result);
  absl::Status ReadRows(const PagedRows& cache, int64_t count, std::vector<float>& rows);

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Decoder> decoder_;
  int64_t positions_ = 0;
  int64_t chunk_ = 0;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_LAYER_PROBE_H_
