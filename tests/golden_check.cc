#include "tests/golden_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "model/checkpoint.h"
#include "model/engine.h"
#include "runtime/dtype.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "tests/layer_probe.h"
#include "tests/read_selection.h"

namespace dsv4 {
namespace {

// Bounds. The fp32 ones are ten and four times what an independent fp32 implementation reaches; the quantised ones are
// 1.3 times what an implementation of the specification's own decisions reaches (worst row, median row).
constexpr double kFp32LayerBound = 1e-5;
constexpr double kFp32LogitsBound = 5e-5;
constexpr double kFp32ScoreGap = 2e-5;   // of the largest score: closer scores may swap
constexpr double kFp32LogitGap = 1e-4;   // closer top logits may swap
constexpr double kSlack = 1.3;
constexpr double kEndToEndRatio = 0.95;  // of the error of an fp32 run
constexpr int64_t kLayerProbeChunk = 64;

struct LayerBounds {
  double plain_worst, plain_median;      // layers without an indexer
  double indexed_worst, indexed_median;  // layers with one, rows with equal selection
  double overlap;                        // of selections where there is a choice
};

LayerBounds QuantizedBounds(Precision precision) {
  if (precision == Precision::kBf16) return {0.010, 0.005, 0.030, 0.008, 0.986};
  return {0.036, 0.015, 0.042, 0.018, 0.987};
}

struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<float> values;

  const float* row(int64_t i) const { return values.data() + i * cols; }
};

absl::StatusOr<Matrix> ReadMatrix(const SafetensorsFile& file, const std::string& name, int64_t cols) {
  DSV4_ASSIGN_OR_RETURN(FileTensor tensor, file.Get(name));
  if (tensor.shape.size() != 2 || tensor.shape[1] != cols ||
      (tensor.dtype != FileDType::kF32 && tensor.dtype != FileDType::kBf16)) {
    return absl::InvalidArgumentError(
        StrCat(file.path(), ": ", name, ": expected F32 or BF16 [rows, ", cols, "], got another type or shape"));
  }
  Matrix matrix{tensor.shape[0], cols, {}};
  if (tensor.dtype == FileDType::kF32) {
    matrix.values = tensor.Copy<float>();
  } else {
    for (Bf16 value : tensor.Copy<Bf16>()) matrix.values.push_back(ToFloat(value));
  }
  return matrix;
}

struct Sequence {
  std::string name;  // "seq0"
  std::vector<int32_t> tokens;
  int64_t prompt_len = 0;
  Matrix logits;
  std::optional<Matrix> mtp_logits;

  int64_t fed_tokens() const { return static_cast<int64_t>(tokens.size()) - 1; }
};

absl::StatusOr<std::vector<Sequence>> ReadSequences(const SafetensorsFile& file, const ModelConfig& config) {
  std::vector<Sequence> sequences;
  for (int i = 0;; ++i) {
    Sequence sequence;
    sequence.name = StrCat("seq", i);
    if (!file.Has(sequence.name + ".tokens")) break;
    DSV4_ASSIGN_OR_RETURN(FileTensor tokens, file.Get(sequence.name + ".tokens", FileDType::kI32, {-1}));
    DSV4_ASSIGN_OR_RETURN(FileTensor prompt_len, file.Get(sequence.name + ".prompt_len", FileDType::kI32, {1}));
    sequence.tokens = tokens.Copy<int32_t>();
    if (sequence.tokens.size() < 2) {
      return absl::InvalidArgumentError(StrCat(file.path(), ": ", sequence.name, ".tokens: expected at least 2, got ",
                                               sequence.tokens.size()));
    }
    for (size_t t = 0; t < sequence.tokens.size(); ++t) {
      if (sequence.tokens[t] < 0 || sequence.tokens[t] >= config.vocab_size) {
        return absl::InvalidArgumentError(StrCat(file.path(), ": ", sequence.name, ".tokens[", t, "]: expected 0 .. ",
                                                 config.vocab_size - 1, ", got ", sequence.tokens[t]));
      }
    }
    sequence.prompt_len = prompt_len.Copy<int32_t>()[0];
    const int64_t outputs = static_cast<int64_t>(sequence.tokens.size()) - sequence.prompt_len;
    if (sequence.prompt_len < 1 || outputs < 1) {
      return absl::InvalidArgumentError(StrCat(file.path(), ": ", sequence.name, ".prompt_len: expected 1 to ",
                                               sequence.tokens.size() - 1, ", got ", sequence.prompt_len));
    }
    DSV4_ASSIGN_OR_RETURN(sequence.logits, ReadMatrix(file, sequence.name + ".logits", config.vocab_size));
    if (sequence.logits.rows != outputs) {
      return absl::InvalidArgumentError(StrCat(file.path(), ": ", sequence.name, ".logits: expected ", outputs,
                                               " rows, one after the prompt and one after each further token, got ",
                                               sequence.logits.rows));
    }
    if (file.Has(sequence.name + ".mtp_logits")) {
      DSV4_ASSIGN_OR_RETURN(sequence.mtp_logits,
                            ReadMatrix(file, sequence.name + ".mtp_logits", config.vocab_size));
      if (sequence.mtp_logits->rows != outputs) {
        return absl::InvalidArgumentError(StrCat(file.path(), ": ", sequence.name, ".mtp_logits: expected ", outputs,
                                                 " rows, got ", sequence.mtp_logits->rows));
      }
    }
    sequences.push_back(std::move(sequence));
  }
  if (sequences.empty()) return absl::InvalidArgumentError(StrCat(file.path(), ": seq0.tokens: missing"));
  return sequences;
}

double RowError(const float* got, const float* want, int64_t count) {
  double difference = 0.0;
  double norm = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    difference += d * d;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(difference / norm);  // a NaN stays one, and no bound holds for it
}

int64_t ArgMax(const float* values, int64_t count) { return std::max_element(values, values + count) - values; }

double TopTwoGap(const float* values, int64_t count) {
  std::vector<float> sorted(values, values + count);
  std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<float>());
  return static_cast<double>(sorted[0]) - sorted[1];
}

// Errors of a set of rows.
struct RowErrors {
  std::vector<double> errors;

  void Add(double error) { errors.push_back(std::isnan(error) ? INFINITY : error); }
  double worst() const { return errors.empty() ? 0.0 : *std::max_element(errors.begin(), errors.end()); }
  double median() const {
    if (errors.empty()) return 0.0;
    std::vector<double> sorted = errors;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    return sorted[sorted.size() / 2];
  }
};

class Bounds {
 public:
  explicit Bounds(GoldenVerdict& verdict) : verdict_(verdict) {}

  void AtMost(const std::string& what, double value, double bound) { Check(what, value <= bound, value, "at most", bound); }
  void AtLeast(const std::string& what, double value, double bound) {
    Check(what, value >= bound, value, "at least", bound);
  }

 private:
  void Check(const std::string& what, bool holds, double value, const char* relation, double bound) {
    ++verdict_.bounds_checked;
    if (!holds) {
      verdict_.failures.push_back(
          absl::StrFormat("%s: expected %s %.4g, got %.4g", what, relation, bound, value));
    }
  }
  GoldenVerdict& verdict_;
};

// What one run of all sequences gave.
struct SequenceRun {
  std::vector<float> logits;      // [outputs, V]
  std::vector<float> mtp_logits;  // [outputs, V]
  // Of layers with an indexer: of each position the chosen entries, ascending, and the scores of all visible ones.
  std::map<int64_t, std::vector<std::vector<int32_t>>> selections;
  std::map<int64_t, std::vector<std::vector<float>>> scores;
};

absl::Status KeepSelections(Engine& engine, Stream& stream, const StepReport& report,
                            const std::map<int64_t, size_t>& sequence_of, std::vector<SequenceRun>& runs) {
  const ModelConfig& config = engine.decoder().config();
  for (int64_t layer = 0; layer < config.num_layers(); ++layer) {
    if (!config.layers[layer].indexer) continue;
    DSV4_ASSIGN_OR_RETURN(const HostSelection selection,
                          HostSelection::Read(stream, engine.decoder().selection(layer)));
    for (const StepRow& row : report.live_rows) {
      SequenceRun& run = runs[sequence_of.at(row.request_id)];
      auto& chosen = run.selections[layer];
      auto& scored = run.scores[layer];
      const size_t needed = static_cast<size_t>(row.position) + 1;
      if (chosen.size() < needed) chosen.resize(needed);
      if (scored.size() < needed) scored.resize(needed);
      chosen[row.position] = selection.Chosen(row.row);
      scored[row.position] = selection.Scores(row.row, (row.position + 1) / config.layers[layer].ratio);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SequenceRun>> RunSequences(Device& device, const ModelConfig& config,
                                                      const ModelWeights& weights, const NumericOptions& numeric,
                                                      const GoldenOptions& options,
                                                      const std::vector<Sequence>& sequences, bool keep_selections) {
  EngineOptions engine_options;
  engine_options.numeric = numeric;
  engine_options.max_requests = static_cast<int64_t>(sequences.size());
  engine_options.max_context = 0;
  for (const Sequence& sequence : sequences) {
    engine_options.max_context = std::max(engine_options.max_context, sequence.fed_tokens());
    engine_options.mtp |= sequence.mtp_logits.has_value();
  }
  engine_options.prefill_chunk = std::min(options.prefill_chunk, engine_options.max_context);
  engine_options.max_step_rows = std::max<int64_t>(2 * engine_options.prefill_chunk, engine_options.max_requests);
  engine_options.copy_logits = true;
  engine_options.keep_selections = keep_selections;
  engine_options.poison = true;
  engine_options.extra_pads = options.extra_pads;
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, Engine::Create(device, config, weights, engine_options));
  DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.CreateStream());

  std::vector<SequenceRun> runs(sequences.size());
  std::map<int64_t, size_t> sequence_of;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const Sequence& sequence = sequences[s];
    Request request;
    request.prompt.assign(sequence.tokens.begin(), sequence.tokens.begin() + sequence.prompt_len);
    request.forced.assign(sequence.tokens.begin() + sequence.prompt_len, sequence.tokens.end());
    request.max_new_tokens = static_cast<int64_t>(request.forced.size());
    DSV4_ASSIGN_OR_RETURN(const int64_t id, engine->Submit(std::move(request)));
    sequence_of[id] = s;
  }
  while (engine->has_work()) {
    DSV4_ASSIGN_OR_RETURN(StepReport report, engine->Step());
    for (const StepOutput& output : report.outputs) {
      SequenceRun& run = runs[sequence_of.at(output.request_id)];
      run.logits.insert(run.logits.end(), output.logits.begin(), output.logits.end());
      run.mtp_logits.insert(run.mtp_logits.end(), output.mtp_logits.begin(), output.mtp_logits.end());
    }
    if (keep_selections) DSV4_RETURN_IF_ERROR(KeepSelections(*engine, *stream, report, sequence_of, runs));
  }
  return runs;
}

// How the chosen entries of some positions compare with the file's.
struct SelectionComparison {
  std::vector<bool> equal;     // per position
  int64_t unequal = 0;
  int64_t unexplained = 0;     // unequal, with a score gap at the boundary that rounding does not explain
  int64_t common = 0;          // entries chosen by both, over positions where there was a choice
  int64_t possible = 0;

  double overlap() const { return possible == 0 ? 1.0 : static_cast<double>(common) / static_cast<double>(possible); }
};

// True if the k-th and (k+1)-th best scores differ by less than kFp32ScoreGap of the largest.
bool ScoresAreClose(std::vector<float> scores, int64_t k) {
  if (static_cast<int64_t>(scores.size()) <= k) return false;
  std::sort(scores.begin(), scores.end(), std::greater<float>());
  float largest = 0.0f;
  for (float score : scores) largest = std::max(largest, std::abs(score));
  return static_cast<double>(scores[k - 1]) - scores[k] < kFp32ScoreGap * largest;
}

absl::StatusOr<SelectionComparison> CompareSelections(const SafetensorsFile& file, const std::string& name,
                                                      const ModelConfig& config, int64_t ratio,
                                                      const std::vector<std::vector<int32_t>>& chosen,
                                                      const std::vector<std::vector<float>>& scores) {
  const int64_t topk = config.index_topk;
  const int64_t positions = static_cast<int64_t>(chosen.size());
  DSV4_ASSIGN_OR_RETURN(FileTensor tensor, file.Get(name, FileDType::kI32, {positions, topk}));
  const std::vector<int32_t> expected = tensor.Copy<int32_t>();
  SelectionComparison comparison;
  for (int64_t p = 0; p < positions; ++p) {
    std::vector<int32_t> want;
    for (int64_t i = 0; i < topk; ++i) {
      if (expected[p * topk + i] >= 0) want.push_back(expected[p * topk + i]);
    }
    std::sort(want.begin(), want.end());
    const bool equal = want == chosen[p];
    comparison.equal.push_back(equal);
    if (!equal) {
      ++comparison.unequal;
      if (!ScoresAreClose(scores[p], topk)) ++comparison.unexplained;
    }
    if ((p + 1) / ratio > topk) {
      std::vector<int32_t> both;
      std::set_intersection(want.begin(), want.end(), chosen[p].begin(), chosen[p].end(), std::back_inserter(both));
      comparison.common += static_cast<int64_t>(both.size());
      comparison.possible += topk;
    }
  }
  return comparison;
}

void CompareLogits(const std::string& what, const std::vector<float>& got, const Matrix& want, bool fp32, Bounds& bounds,
                   std::ostream& out) {
  RowErrors errors;
  int64_t agree = 0;
  int64_t unexplained = 0;
  for (int64_t i = 0; i < want.rows; ++i) {
    const float* row = got.data() + i * want.cols;
    errors.Add(RowError(row, want.row(i), want.cols));
    const bool same = ArgMax(row, want.cols) == ArgMax(want.row(i), want.cols);
    agree += same;
    if (!same && TopTwoGap(want.row(i), want.cols) >= kFp32LogitGap) ++unexplained;
  }
  out << absl::StrFormat("  %-22s rel L2 worst %.3e median %.3e   arg-max %d of %d\n", what, errors.worst(),
                         errors.median(), agree, want.rows);
  if (!fp32) return;
  bounds.AtMost(what + " worst row", errors.worst(), kFp32LogitsBound);
  bounds.AtMost(what + " arg-max differences with a clear winner", static_cast<double>(unexplained), 0.0);
}

double PooledError(const std::vector<SequenceRun>& runs, const std::vector<Sequence>& sequences) {
  double difference = 0.0;
  double norm = 0.0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (size_t i = 0; i < sequences[s].logits.values.size(); ++i) {
      const double want = sequences[s].logits.values[i];
      const double d = runs[s].logits[i] - want;
      difference += d * d;
      norm += want * want;
    }
  }
  return std::sqrt(difference / norm);
}

class GoldenCheck {
 public:
  GoldenCheck(Device& device, const GoldenOptions& options, std::ostream& out)
      : device_(device), options_(options), out_(out) {}

  absl::StatusOr<GoldenVerdict> Run() {
    DSV4_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(options_.checkpoint));
    config_ = checkpoint.config();
    DSV4_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(options_.expected));
    DSV4_RETURN_IF_ERROR(ChoosePrecision(file));
    DSV4_ASSIGN_OR_RETURN(sequences_, ReadSequences(file, config_));
    DSV4_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device_.CreateStream());
    DSV4_ASSIGN_OR_RETURN(weights_, LoadModelWeights(checkpoint, device_, *stream));

    DSV4_RETURN_IF_ERROR(CheckNames(file));
    DSV4_RETURN_IF_ERROR(CheckEndToEnd(file));
    DSV4_RETURN_IF_ERROR(CheckLayers(file));

    for (const std::string& failure : verdict_.failures) out_ << "FAILED " << failure << "\n";
    out_ << absl::StrFormat("%s: %d of %d bounds hold\n", verdict_.passed() ? "PASSED" : "FAILED",
                            verdict_.bounds_checked - static_cast<int64_t>(verdict_.failures.size()),
                            verdict_.bounds_checked);
    return verdict_;
  }

 private:
  bool fp32_bounds() const { return bounds_precision_ == Precision::kFp32; }

  absl::Status ChoosePrecision(const SafetensorsFile& file) {
    const auto found = file.metadata().find("precision");
    if (found != file.metadata().end()) {
      DSV4_ASSIGN_OR_RETURN(bounds_precision_, ParsePrecision(found->second));
    } else if (options_.precision.has_value()) {
      bounds_precision_ = *options_.precision;
    } else {
      return absl::InvalidArgumentError(
          StrCat(file.path(), ": __metadata__.precision: missing; say which with --precision"));
    }
    numeric_.precision = options_.precision.value_or(bounds_precision_);
    numeric_.indexer_format = options_.indexer_format;
    numeric_.hadamard = options_.hadamard;
    return absl::OkStatus();
  }

  // Every tensor of the file must be one that is compared, so that none is passed over because of its name.
  absl::Status CheckNames(const SafetensorsFile& file) const {
    std::set<std::string> known;
    for (const Sequence& sequence : sequences_) {
      for (const char* field : {".tokens", ".prompt_len", ".logits", ".mtp_logits"}) known.insert(sequence.name + field);
      for (int64_t layer = 0; layer < config_.num_layers(); ++layer) {
        const std::string prefix = StrCat(sequence.name, ".layer", layer);
        const LayerKind& kind = config_.layers[layer];
        if (kind.indexer) known.insert(prefix + ".topk_sorted");
        if (!file.Has(prefix + ".attn_in")) continue;
        known.insert({prefix + ".attn_in", prefix + ".attn_out"});
        if (kind.compressed()) known.insert(prefix + ".entries");
        if (kind.indexer) known.insert(prefix + ".indexer_keys");
      }
    }
    for (const auto& [name, tensor] : file.tensors()) {
      if (known.find(name) == known.end()) {
        return absl::InvalidArgumentError(
            StrCat(file.path(), ": ", name, ": no tensor that this checkpoint's outputs can be compared with"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckEndToEnd(const SafetensorsFile& file) {
    out_ << "end to end, " << sequences_.size() << " sequences in one batch, precision "
         << PrecisionName(numeric_.precision) << ", bounds for " << PrecisionName(bounds_precision_) << "\n";
    DSV4_ASSIGN_OR_RETURN(std::vector<SequenceRun> runs,
                          RunSequences(device_, config_, weights_, numeric_, options_, sequences_, fp32_bounds()));
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const Sequence& sequence = sequences_[s];
      CompareLogits(sequence.name + ".logits", runs[s].logits, sequence.logits, fp32_bounds(), bounds_, out_);
      if (sequence.mtp_logits.has_value()) {
        CompareLogits(sequence.name + ".mtp_logits", runs[s].mtp_logits, *sequence.mtp_logits, fp32_bounds(), bounds_,
                      out_);
      }
    }
    if (fp32_bounds()) {
      for (size_t s = 0; s < sequences_.size(); ++s) {
        for (const auto& [layer, chosen] : runs[s].selections) {
          const std::string name = StrCat(sequences_[s].name, ".layer", layer, ".topk_sorted");
          if (!file.Has(name)) continue;
          DSV4_ASSIGN_OR_RETURN(SelectionComparison comparison,
                                CompareSelections(file, name, config_, config_.layers[layer].ratio, chosen,
                                                  runs[s].scores.at(layer)));
          out_ << absl::StrFormat("  %-22s selections equal in %d of %d rows\n", name,
                                  static_cast<int64_t>(chosen.size()) - comparison.unequal, chosen.size());
          bounds_.AtMost(name + " different selections with a clear score gap",
                         static_cast<double>(comparison.unexplained), 0.0);
        }
      }
      return absl::OkStatus();
    }
    NumericOptions fp32 = numeric_;
    fp32.precision = Precision::kFp32;
    DSV4_ASSIGN_OR_RETURN(std::vector<SequenceRun> oracle,
                          RunSequences(device_, config_, weights_, fp32, options_, sequences_, false));
    const double error = PooledError(runs, sequences_);
    const double fp32_error = PooledError(oracle, sequences_);
    out_ << absl::StrFormat("  all logits             rel L2 %.4f; of an fp32 run %.4f; ratio %.3f\n", error, fp32_error,
                            error / fp32_error);
    bounds_.AtMost("all logits, relative L2 over that of an fp32 run", error / fp32_error, kEndToEndRatio);
    return absl::OkStatus();
  }

  absl::Status CheckLayers(const SafetensorsFile& file) {
    RowErrors plain;    // layers without an indexer
    RowErrors indexed;  // layers with one, rows with equal selection
    SelectionComparison selections;
    bool any = false;
    for (const Sequence& sequence : sequences_) {
      std::unique_ptr<LayerProbe> probe;
      for (int64_t layer = 0; layer < config_.num_layers(); ++layer) {
        const std::string prefix = StrCat(sequence.name, ".layer", layer);
        if (!file.Has(prefix + ".attn_in")) continue;
        DSV4_ASSIGN_OR_RETURN(Matrix in, ReadMatrix(file, prefix + ".attn_in", config_.hidden_size));
        DSV4_ASSIGN_OR_RETURN(Matrix want, ReadMatrix(file, prefix + ".attn_out", config_.hidden_size));
        if (want.rows != in.rows || in.rows < 1) {
          return absl::InvalidArgumentError(StrCat(file.path(), ": ", prefix, ".attn_out: expected ", in.rows,
                                                   " rows as in attn_in, got ", want.rows));
        }
        if (!any) out_ << "layer by layer, each fed the file's attn_in\n";
        any = true;
        DSV4_ASSIGN_OR_RETURN(probe, LayerProbe::Create(device_, config_, weights_, numeric_, in.rows, kLayerProbeChunk));
        DSV4_ASSIGN_OR_RETURN(LayerResult got, probe->Run(layer, in.values));

        const LayerKind& kind = config_.layers[layer];
        std::vector<bool> same_selection(in.rows, true);
        if (kind.indexer && file.Has(prefix + ".topk_sorted")) {
          DSV4_ASSIGN_OR_RETURN(SelectionComparison comparison, CompareSelections(file, prefix + ".topk_sorted", config_, kind.ratio,
                                                                                       got.selection, got.scores));
          same_selection = comparison.equal;
          selections.unexplained += comparison.unexplained;
          selections.common += comparison.common;
          selections.possible += comparison.possible;
          out_ << absl::StrFormat("  %-22s selections equal in %d of %d rows, overlap %.4f\n", prefix,
                                  in.rows - comparison.unequal, in.rows, comparison.overlap());
        }
        RowErrors errors;
        for (int64_t p = 0; p < in.rows; ++p) {
          if (!same_selection[p]) continue;
          const double error = RowError(got.attn_out.data() + p * want.cols, want.row(p), want.cols);
          errors.Add(error);
          (kind.indexer ? indexed : plain).Add(error);
        }
        out_ << absl::StrFormat("  %-22s ratio %-3d attn_out rel L2 worst %.3e median %.3e\n", prefix, kind.ratio,
                                errors.worst(), errors.median());
        if (fp32_bounds()) bounds_.AtMost(prefix + ".attn_out worst row", errors.worst(), kFp32LayerBound);
        DSV4_RETURN_IF_ERROR(CheckRows(file, prefix + ".entries", config_.head_dim, got.entries));
        DSV4_RETURN_IF_ERROR(CheckRows(file, prefix + ".indexer_keys", config_.index_head_dim, got.indexer_keys));
      }
    }
    if (!any) return absl::OkStatus();
    if (fp32_bounds()) {
      bounds_.AtMost("layer by layer: different selections with a clear score gap",
                     static_cast<double>(selections.unexplained), 0.0);
      return absl::OkStatus();
    }
    const LayerBounds limit = QuantizedBounds(bounds_precision_);
    out_ << absl::StrFormat("  without indexer        worst %.4f median %.4f  (bounds %.4f %.4f)\n", plain.worst(),
                            plain.median(), kSlack * limit.plain_worst, kSlack * limit.plain_median);
    out_ << absl::StrFormat("  with indexer           worst %.4f median %.4f  (bounds %.4f %.4f)  overlap %.4f\n",
                            indexed.worst(), indexed.median(), kSlack * limit.indexed_worst,
                            kSlack * limit.indexed_median, selections.overlap());
    bounds_.AtMost("layers without an indexer, worst row", plain.worst(), kSlack * limit.plain_worst);
    bounds_.AtMost("layers without an indexer, median row", plain.median(), kSlack * limit.plain_median);
    bounds_.AtMost("layers with an indexer, worst row", indexed.worst(), kSlack * limit.indexed_worst);
    bounds_.AtMost("layers with an indexer, median row", indexed.median(), kSlack * limit.indexed_median);
    if (numeric_.key_format() == RowFormat::kMxfp4Key) {
      bounds_.AtLeast("overlap of selections", selections.overlap(), 1.0 - kSlack * (1.0 - limit.overlap));
    }
    return absl::OkStatus();
  }

  absl::Status CheckRows(const SafetensorsFile& file, const std::string& name, int64_t cols,
                         const std::vector<float>& got) {
    if (!file.Has(name)) return absl::OkStatus();
    DSV4_ASSIGN_OR_RETURN(Matrix want, ReadMatrix(file, name, cols));
    if (static_cast<int64_t>(got.size()) != want.rows * cols) {
      return absl::InvalidArgumentError(
          StrCat(file.path(), ": ", name, ": expected ", got.size() / cols, " rows, got ", want.rows));
    }
    RowErrors errors;
    for (int64_t j = 0; j < want.rows; ++j) errors.Add(RowError(got.data() + j * cols, want.row(j), cols));
    out_ << absl::StrFormat("  %-22s rel L2 worst %.3e median %.3e\n", name, errors.worst(), errors.median());
    if (fp32_bounds()) bounds_.AtMost(name + " worst row", errors.worst(), kFp32LayerBound);
    return absl::OkStatus();
  }

  Device& device_;
  const GoldenOptions& options_;
  std::ostream& out_;
  GoldenVerdict verdict_;
  Bounds bounds_{verdict_};
  ModelConfig config_;
  ModelWeights weights_;
  std::vector<Sequence> sequences_;
  Precision bounds_precision_ = Precision::kFp32;
  NumericOptions numeric_;
};

}  // namespace

absl::StatusOr<GoldenVerdict> CheckGolden(Device& device, const GoldenOptions& options, std::ostream& out) {
  return GoldenCheck(device, options, out).Run();
}

}  // namespace dsv4
