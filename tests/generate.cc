#include "tests/generate.h"

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "model/checkpoint.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

testing::AssertionResult SameBits(const char* name, const std::vector<float>& actual,
                                  const std::vector<float>& expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << name << ": " << actual.size() << " values, expected " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(expected[i])) return testing::AssertionFailure() << name << "[" << i << "] is expected to be NaN";
    if (std::memcmp(&actual[i], &expected[i], sizeof(float)) == 0) continue;
    return testing::AssertionFailure() << name << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
  }
  return testing::AssertionSuccess();
}

}  // namespace

absl::StatusOr<LoadedModel> LoadRandomModel(const RandomModel& model) {
  LoadedModel loaded;
  DSV4_ASSIGN_OR_RETURN(loaded.device, CreateDevice(DeviceKind::kCpu));
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, loaded.device->CreateStream());
  loaded.config = model.config();
  DSV4_ASSIGN_OR_RETURN(loaded.weights, model.Upload(*loaded.device, *stream));
  return loaded;
}

absl::StatusOr<LoadedModel> LoadCheckpointModel(const std::string& directory) {
  LoadedModel loaded;
  DSV4_ASSIGN_OR_RETURN(loaded.device, CreateDevice(DeviceKind::kCpu));
  DSV4_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, loaded.device->CreateStream());
  DSV4_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  loaded.config = checkpoint.config();
  DSV4_ASSIGN_OR_RETURN(loaded.weights, LoadModelWeights(checkpoint, *loaded.device, *stream));
  return loaded;
}

absl::StatusOr<std::vector<Generation>> Generate(Engine& engine, const std::vector<Arrival>& arrivals) {
  std::vector<Generation> generations(arrivals.size());
  std::map<int64_t, size_t> index_of_id;
  size_t submitted = 0;
  size_t finished = 0;
  for (int64_t step = 0; finished < arrivals.size(); ++step) {
    // Nothing else to do: the rest arrives now.
    const bool idle = !engine.has_work();
    while (submitted < arrivals.size() && (idle || arrivals[submitted].step <= step)) {
      DSV4_ASSIGN_OR_RETURN(generations[submitted].id, engine.Submit(arrivals[submitted].request));
      index_of_id[generations[submitted].id] = submitted;
      ++submitted;
    }
    DSV4_ASSIGN_OR_RETURN(const StepReport report, engine.Step());
    if (report.live_rows.empty()) return absl::InternalError(StrCat("step ", step, ": all of its rows are pads"));
    for (const StepOutput& output : report.outputs) {
      const auto found = index_of_id.find(output.request_id);
      if (found == index_of_id.end()) continue;
      Generation& generation = generations[found->second];
      if (output.index != static_cast<int64_t>(generation.tokens.size())) {
        return absl::InternalError(StrCat("request ", output.request_id, ": expected output ", generation.tokens.size(),
                                          " next, got ", output.index));
      }
      generation.tokens.push_back(output.token);
      generation.logits.insert(generation.logits.end(), output.logits.begin(), output.logits.end());
      generation.mtp_logits.insert(generation.mtp_logits.end(), output.mtp_logits.begin(), output.mtp_logits.end());
    }
    for (int64_t id : report.finished) finished += index_of_id.count(id);
  }
  for (const Generation& generation : generations) {
    if (engine.outputs(generation.id) != generation.tokens) {
      return absl::InternalError(StrCat("request ", generation.id, ": its outputs are not those of the steps"));
    }
  }
  return generations;
}

absl::StatusOr<Generation> GenerateAlone(const LoadedModel& model, const EngineOptions& options, const Request& request,
                                         int64_t id) {
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                        Engine::Create(*model.device, model.config, model.weights, options));
  for (int64_t other = 0; other < id; ++other) {
    DSV4_ASSIGN_OR_RETURN(const int64_t unused, engine->Submit(request));
    DSV4_RETURN_IF_ERROR(engine->Cancel(unused));
  }
  DSV4_ASSIGN_OR_RETURN(std::vector<Generation> generations, Generate(*engine, {{request}}));
  if (generations[0].id != id) return absl::InternalError(StrCat("expected id ", id, ", got ", generations[0].id));
  return std::move(generations[0]);
}

std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab_size, uint64_t seed, int32_t first) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(first + static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size - first)));
  }
  return tokens;
}

testing::AssertionResult SameGeneration(const Generation& actual, const Generation& expected) {
  if (actual.tokens != expected.tokens) {
    return testing::AssertionFailure() << "tokens " << testing::PrintToString(actual.tokens) << ", expected "
                                       << testing::PrintToString(expected.tokens);
  }
  if (testing::AssertionResult same = SameBits("logits", actual.logits, expected.logits); !same) return same;
  return SameBits("mtp_logits", actual.mtp_logits, expected.mtp_logits);
}

}  // namespace dsv4
