// Loads a checkpoint, decodes several requests together, and prints what it does: the model, the progress, the tokens, the
// time.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "model/cache_plan.h"
#include "model/checkpoint.h"
#include "model/engine.h"
#include "model/numeric_options.h"
#include "runtime/data_files.h"
#include "runtime/device.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

ABSL_FLAG(std::string, checkpoint, "",
          "folder with config.json and model.safetensors (or its shards) in the published DeepSeek-V4 format; by default the "
          "tiny random-weight checkpoint that comes with this repository");
ABSL_FLAG(std::string, device, "auto", "cpu, cuda, or auto: a GPU if this build and machine have one, else the CPU");
ABSL_FLAG(std::string, precision, "published",
          "fp32 (no quantisation: the oracle), bf16 (bf16 activations, FP8 cache rows), or published (also FP8 activations "
          "before FP8 and FP4 weights)");
ABSL_FLAG(std::string, indexer, "fp8", "format of the indexer's keys outside fp32 precision: fp8 or mxfp4");
ABSL_FLAG(std::vector<std::string>, prompt_lengths, std::vector<std::string>({"5", "37", "150"}),
          "one request for each number: a random prompt of that many tokens");
ABSL_FLAG(std::string, prompts, "",
          "prompts as token ids instead of random ones, for example \"1,2,3;40,50\" for two requests (there is no tokenizer)");
ABSL_FLAG(int64_t, max_new_tokens, 24, "tokens to generate for each request");
ABSL_FLAG(double, temperature, 0.0, "0 takes the likeliest token each time; above 0 tokens are sampled");
ABSL_FLAG(int64_t, seed, 0, "seed of the random prompts and of sampling");
ABSL_FLAG(bool, ignore_eos, false, "go on after an end-of-sequence token");
ABSL_FLAG(int64_t, prefill_chunk, 32, "prompt tokens of one request that go into one step");
ABSL_FLAG(bool, mtp, false, "run the multi-token-prediction block too, and print how often it predicts the token after next");

namespace dsv4 {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

absl::StatusOr<int64_t> ParseInteger(const std::string& flag, const std::string& text) {
  int64_t value;
  if (!absl::SimpleAtoi(text, &value)) {
    return absl::InvalidArgumentError(StrCat("--", flag, ": expected whole numbers, got \"", text, "\""));
  }
  return value;
}

absl::StatusOr<std::unique_ptr<Device>> DeviceFromFlag() {
  const std::string name = absl::GetFlag(FLAGS_device);
  if (name == "cpu") return CreateDevice(DeviceKind::kCpu);
  if (name == "cuda") return CreateDevice(DeviceKind::kCuda);
  if (name != "auto") {
    return absl::InvalidArgumentError(StrCat("--device: expected cpu, cuda or auto, got \"", name, "\""));
  }
  absl::StatusOr<std::unique_ptr<Device>> cuda = CreateDevice(DeviceKind::kCuda);
  if (cuda.ok()) return cuda;
  std::cout << "no GPU: " << cuda.status().message() << "; running on the CPU\n";
  return CreateDevice(DeviceKind::kCpu);
}

absl::StatusOr<NumericOptions> NumericFromFlags() {
  NumericOptions numeric;
  DSV4_ASSIGN_OR_RETURN(numeric.precision, ParsePrecision(absl::GetFlag(FLAGS_precision)));
  DSV4_ASSIGN_OR_RETURN(numeric.indexer_format, ParseIndexerFormat(absl::GetFlag(FLAGS_indexer)));
  return numeric;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> PromptsFromFlags(const ModelConfig& config) {
  std::vector<std::vector<int32_t>> prompts;
  if (const std::string text = absl::GetFlag(FLAGS_prompts); !text.empty()) {
    const std::vector<std::string> texts = absl::StrSplit(text, ';');
    for (const std::string& prompt : texts) {
      std::vector<int32_t>& tokens = prompts.emplace_back();
      const std::vector<std::string> ids = absl::StrSplit(prompt, ',');
      for (const std::string& token : ids) {
        DSV4_ASSIGN_OR_RETURN(const int64_t id, ParseInteger("prompts", token));
        if (id < 0 || id >= config.vocab_size) {
          return absl::InvalidArgumentError(
              StrCat("--prompts: expected token ids in 0 .. ", config.vocab_size - 1, ", got ", id));
        }
        tokens.push_back(static_cast<int32_t>(id));
      }
    }
    return prompts;
  }
  std::mt19937_64 random(static_cast<uint64_t>(absl::GetFlag(FLAGS_seed)));
  for (const std::string& text : absl::GetFlag(FLAGS_prompt_lengths)) {
    DSV4_ASSIGN_OR_RETURN(const int64_t length, ParseInteger("prompt_lengths", text));
    if (length < 1 || length > config.max_position_embeddings) {
      return absl::InvalidArgumentError(StrCat("--prompt_lengths: expected 1 to max_position_embeddings = ",
                                               config.max_position_embeddings, ", got ", length));
    }
    std::vector<int32_t>& tokens = prompts.emplace_back();
    for (int64_t i = 0; i < length; ++i) {
      tokens.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(config.vocab_size)));
    }
  }
  return prompts;
}

void PrintModel(const Checkpoint& checkpoint, const ModelWeights& weights, const NumericOptions& numeric,
                const Device& device) {
  const ModelConfig& config = checkpoint.config();
  std::map<int64_t, int64_t> layers_by_ratio;
  for (const LayerKind& kind : config.layers) ++layers_by_ratio[kind.ratio];
  std::vector<std::string> kinds;
  for (const auto& [ratio, count] : layers_by_ratio) {
    kinds.push_back(ratio == 0 ? absl::StrFormat("%d window only", count)
                               : absl::StrFormat("%d compressing %d tokens to an entry", count, ratio));
  }
  const CacheBytes bytes = CountCacheBytes(config, numeric);
  const bool is_default = absl::GetFlag(FLAGS_checkpoint).empty();
  std::cout << "checkpoint  "
            << (is_default ? "the tiny one of this repository, with random weights" : checkpoint.directory()) << "\n"
            << absl::StrFormat("model       %d layers (%s), %d heads of %d, hidden %d, %d experts (%d a token), vocabulary %d\n",
                               config.num_layers(), absl::StrJoin(kinds, ", "), config.num_attention_heads,
                               config.head_dim, config.hidden_size, config.n_routed_experts,
                               config.num_experts_per_tok, config.vocab_size)
            << absl::StrFormat("weights     %.1f MB as stored\n", static_cast<double>(weights.arena.size_bytes()) / 1e6)
            << absl::StrFormat("cache       %.1f bytes a token, and %.1f KB a request (window %.1f, partial states %.1f)\n",
                               bytes.growing_per_token,
                               static_cast<double>(bytes.window_per_request + bytes.state_per_request) / 1e3,
                               static_cast<double>(bytes.window_per_request) / 1e3,
                               static_cast<double>(bytes.state_per_request) / 1e3)
            << "precision   " << PrecisionName(numeric.precision) << ", indexer keys "
            << RowFormatName(numeric.key_format()) << "\n"
            << "device      " << device.name() << "\n\n";
}

std::string JoinTokens(const std::vector<int32_t>& tokens, size_t limit) {
  const size_t count = std::min(tokens.size(), limit);
  std::string text = absl::StrJoin(tokens.begin(), tokens.begin() + static_cast<int64_t>(count), " ");
  return count < tokens.size() ? StrCat(text, " ...") : text;
}

// How often the MTP block's likeliest token was the one that came after next.
struct MtpRecord {
  std::map<int64_t, int32_t> predicted;  // request -> prediction for its next output
  int64_t right = 0;
  int64_t total = 0;

  void Add(const StepOutput& output) {
    if (output.mtp_logits.empty()) return;
    const auto found = predicted.find(output.request_id);
    if (found != predicted.end()) {
      ++total;
      right += found->second == output.token;
    }
    predicted[output.request_id] = static_cast<int32_t>(
        std::max_element(output.mtp_logits.begin(), output.mtp_logits.end()) - output.mtp_logits.begin());
  }
};

struct Timing {
  int64_t steps = 0;
  int64_t rows = 0;
  double milliseconds = 0.0;

  void Add(int64_t step_rows, double step_milliseconds) {
    ++steps;
    rows += step_rows;
    milliseconds += step_milliseconds;
  }
  void Print(const char* what) const {
    if (steps == 0) return;
    std::cout << absl::StrFormat("%s %4d steps, %5d tokens, %8.2f ms a step, %9.1f tokens/s\n", what, steps, rows,
                                 milliseconds / static_cast<double>(steps),
                                 1e3 * static_cast<double>(rows) / milliseconds);
  }
};

absl::Status Run() {
  std::string directory = absl::GetFlag(FLAGS_checkpoint);
  if (directory.empty()) {
    DSV4_ASSIGN_OR_RETURN(directory, FindDataFile("tests/data/tiny"));
  }
  DSV4_ASSIGN_OR_RETURN(const NumericOptions numeric, NumericFromFlags());
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, DeviceFromFlag());
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream());
  DSV4_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  DSV4_ASSIGN_OR_RETURN(const ModelWeights weights, LoadModelWeights(checkpoint, *device, *stream));
  const ModelConfig& config = checkpoint.config();
  PrintModel(checkpoint, weights, numeric, *device);

  DSV4_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> prompts, PromptsFromFlags(config));
  if (prompts.empty()) return absl::InvalidArgumentError("--prompt_lengths: expected at least one");
  const int64_t max_new_tokens = absl::GetFlag(FLAGS_max_new_tokens);
  if (max_new_tokens < 1 || max_new_tokens > config.max_position_embeddings) {
    return absl::InvalidArgumentError(StrCat("--max_new_tokens: expected 1 to max_position_embeddings = ",
                                             config.max_position_embeddings, ", got ", max_new_tokens));
  }
  EngineOptions options;
  options.numeric = numeric;
  options.max_requests = std::max<int64_t>(1, static_cast<int64_t>(prompts.size()));
  // What the longest request needs; the engine refuses what the model cannot address.
  int64_t context = 1;
  for (const std::vector<int32_t>& prompt : prompts) {
    context = std::max(context, static_cast<int64_t>(prompt.size()) + max_new_tokens - 1);
  }
  options.max_context = std::min(context, config.max_position_embeddings);
  options.prefill_chunk = std::min(absl::GetFlag(FLAGS_prefill_chunk), options.max_context);
  options.max_step_rows = std::max(options.max_requests, 2 * options.prefill_chunk);
  options.mtp = absl::GetFlag(FLAGS_mtp);
  options.copy_logits = options.mtp;
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, Engine::Create(*device, config, weights, options));

  std::vector<int64_t> ids;
  for (const std::vector<int32_t>& prompt : prompts) {
    DSV4_ASSIGN_OR_RETURN(const int64_t id,
                          engine->Submit({.prompt = prompt,
                                          .max_new_tokens = max_new_tokens,
                                          .temperature = static_cast<float>(absl::GetFlag(FLAGS_temperature)),
                                          .seed = absl::GetFlag(FLAGS_seed),
                                          .ignore_eos = absl::GetFlag(FLAGS_ignore_eos)}));
    ids.push_back(id);
  }

  Timing prefill;
  Timing decode;
  MtpRecord mtp;
  Clock::time_point last_line = Clock::now() - std::chrono::hours(1);
  for (int64_t step = 0; engine->has_work(); ++step) {
    const Clock::time_point start = Clock::now();
    DSV4_ASSIGN_OR_RETURN(const StepReport report, engine->Step());
    const Clock::time_point end = Clock::now();
    // A step with prompt tokens in it counts as prefill, its decoding rows too.
    Timing& timing = report.prefill_rows > 0 ? prefill : decode;
    timing.Add(report.prefill_rows + report.decode_rows, Milliseconds(end - start));
    for (const StepOutput& output : report.outputs) mtp.Add(output);
    if (end - last_line > std::chrono::milliseconds(500) || report.prefill_rows > 0 || !report.finished.empty()) {
      last_line = end;
      std::cout << absl::StrFormat("step %4d: %3d prompt tokens, %3d decoded, %3d pads, %8.2f ms", step,
                                   report.prefill_rows, report.decode_rows,
                                   report.rows - report.prefill_rows - report.decode_rows, Milliseconds(end - start));
      if (!report.finished.empty()) std::cout << "; finished request " << absl::StrJoin(report.finished, ", ");
      std::cout << std::endl;
    }
  }

  constexpr size_t kShownPromptTokens = 12;
  std::cout << "\n";
  for (size_t i = 0; i < ids.size(); ++i) {
    std::cout << absl::StrFormat("request %d, prompt of %d tokens: %s\n  output: %s\n", ids[i], prompts[i].size(),
                                 JoinTokens(prompts[i], kShownPromptTokens),
                                 JoinTokens(engine->outputs(ids[i]), engine->outputs(ids[i]).size()));
  }
  std::cout << "\n";
  prefill.Print("prefill");
  decode.Print("decode ");
  if (options.mtp) {
    std::cout << absl::StrFormat("mtp     predicted %d of %d following tokens\n", mtp.right, mtp.total);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dsv4

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "decodes a batch of requests with a DeepSeek-V4 checkpoint and prints tokens and times.\n\n"
      "  decode_demo                                    the tiny checkpoint of this repository, three random prompts\n"
      "  decode_demo --checkpoint=DIR --prompts=\"1,2,3\"  a checkpoint of yours, a prompt of yours\n"
      "  decode_demo --prompt_lengths=8,300 --temperature=0.8 --seed=7\n");
  // --help shows the flags of this program, not those of the libraries.
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return absl::StrContains(file, "decode_demo"); };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() > 1) {
    std::cerr << "decode_demo: " << arguments[1] << ": not a flag; see --help\n";
    return 1;
  }
  if (absl::Status status = dsv4::Run(); !status.ok()) {
    std::cerr << "decode_demo: " << status.message() << "\n";
    return 1;
  }
  return 0;
}
