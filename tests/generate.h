// Runs requests through an engine to their ends and keeps everything that they put out, to compare runs bit by bit.
#ifndef DSV4_TESTS_GENERATE_H_
#define DSV4_TESTS_GENERATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "model/config.h"
#include "model/engine.h"
#include "model/weights.h"
#include "runtime/device.h"
#include "tests/random_model.h"

namespace dsv4 {

// A device and a model on it.
struct LoadedModel {
  LoadedModel() = default;
  LoadedModel(LoadedModel&&) = default;
  // What this held goes in the right order, the device last.
  LoadedModel& operator=(LoadedModel&& other) {
    std::swap(device, other.device);
    std::swap(config, other.config);
    std::swap(weights, other.weights);
    return *this;
  }

  std::unique_ptr<Device> device;
  ModelConfig config;
  ModelWeights weights;
};
absl::StatusOr<LoadedModel> LoadRandomModel(const RandomModel& model);
absl::StatusOr<LoadedModel> LoadCheckpointModel(const std::string& directory);

struct Arrival {
  Request request;
  int64_t step = 0;  // submitted once this many steps have run
};

struct Generation {
  int64_t id = -1;
  std::vector<int32_t> tokens;
  std::vector<float> logits;      // of each token, one after another; with copy_logits
  std::vector<float> mtp_logits;  // the same, with mtp
};

// The generations are in the order of `arrivals`, which must be in the order of their steps. An error if the engine does not
// finish them.
absl::StatusOr<std::vector<Generation>> Generate(Engine& engine, const std::vector<Arrival>& arrivals);

// In an engine of its own with these options. `id` is what the request shall be called there, since sampling depends on it.
absl::StatusOr<Generation> GenerateAlone(const LoadedModel& model, const EngineOptions& options, const Request& request,
                                         int64_t id = 0);

// `count` tokens below `vocab_size`, never those below `first`; the same for the same seed.
std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, uint64_t seed, int32_t first = 2);

// Success if tokens and the bits of all logits are equal and no logit is NaN.
testing::AssertionResult SameGeneration(const Generation& actual, const Generation& expected);

}  // namespace dsv4

#endif  // DSV4_TESTS_GENERATE_H_
