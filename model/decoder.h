// The whole model as one recorded step: metadata, embedding, all blocks, output head and sampling, and the
// multi-token-prediction block if the model runs with it. It owns every cache and every buffer of a step; nothing is
// allocated after Create.
//
//   DSV4_ASSIGN_OR_RETURN(auto decoder, Decoder::Create(*device, config, weights, options));
//   ... fill decoder->step_state().host_inputs(), Upload ...
//   DSV4_RETURN_IF_ERROR(decoder->Record(stream, rows));
//   ... decoder->outputs().logits ...
#ifndef DSV4_MODEL_DECODER_H_
#define DSV4_MODEL_DECODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/attention.h"
#include "model/block.h"
#include "model/cache_plan.h"
#include "model/config.h"
#include "model/numeric_options.h"
#include "model/step_state.h"
#include "model/weights.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/stream.h"

namespace dsv4 {

struct DecoderOptions {
  NumericOptions numeric;
  CacheSizes sizes;
  int64_t max_rows = 0;        // of a step
  int64_t max_logit_rows = 0;  // of a step
  bool mtp = false;            // run the MTP block too
  // Keep each layer's selection apart instead of in one shared buffer, for tests that read them after a step.
  bool keep_selections = false;
  // Fill caches and buffers with NaN patterns first, for tests that nothing unwritten is ever read.
  bool poison = false;
};

// Valid until the next step. L rows, those of StepInputs::logit_rows.
struct DecoderOutputs {
  TensorView logits;      // f32 [L, V]
  TensorView tokens;      // i32 [L], sampled
  TensorView mtp_logits;  // f32 [L, V]; empty without MTP
};

class Decoder {
 public:
  // `weights` must outlive the decoder, as must `device`.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(Device& device, const ModelConfig& config,
                                                         const ModelWeights& weights, const DecoderOptions& options);

  // Records one step of `rows` rows (1 .. max_rows), pads included.
  absl::Status Record(Stream& stream, int64_t rows);

  StepState& step_state() { return *step_state_; }
  const DecoderOutputs& outputs() const { return outputs_; }
  const ModelConfig& config() const { return config_; }
  const DecoderOptions& options() const { return options_; }
  const CachePlan& cache_plan() const { return plan_; }

  const Attention& attention(int64_t layer) const { return blocks_[layer].attention(); }
  // Of a layer with an indexer; shared by all layers unless keep_selections.
  const Selection& selection(int64_t layer) const { return selections_[layer]; }
  const BlockScratch& scratch() const { return scratch_; }

  int64_t cache_bytes() const { return cache_arena_.size_bytes(); }
  int64_t buffer_bytes() const { return buffer_arena_.size_bytes() + step_state_->device_bytes(); }

 private:
  Decoder(const ModelConfig& config, const ModelWeights& weights, const DecoderOptions& options)
      : config_(config), weights_(weights), options_(options) {}

  absl::Status LoadRopeTables(Device& device, Stream& stream);
  absl::Status RecordHead(Stream& stream, const TensorView& streams, const MhcWeights& hc_head, const WeightView& norm,
                          const TensorView& logits);
  absl::Status RecordMtp(Stream& stream, const StepContext& context);

  ModelConfig config_;
  const ModelWeights& weights_;
  DecoderOptions options_;
  CachePlan plan_;
  std::unique_ptr<StepState> step_state_;

  Arena rope_arena_;
  WeightView plain_cos_sin_;       // f32 [max_context, dr]
  WeightView compressed_cos_sin_;  // the same

  std::vector<Block> blocks_;      // main layers
  std::vector<Block> mtp_blocks_;  // 0 or 1

  Arena cache_arena_;
  Arena buffer_arena_;
  TensorView streams_;      // act [N, M, D]
  TensorView head_mixed_;   // act [L, D]
  TensorView head_x_;       // act [L, D]
  BlockScratch scratch_;
  std::vector<Selection> selections_;  // a main layer each
  DecoderOutputs outputs_;

  // MTP
  TensorView mtp_embedding_;  // act [N, 1, D], of the next token
  TensorView mtp_normed_;     // act [N, D]
  TensorView mtp_e_;          // act [N, D]
  TensorView mtp_h_normed_;   // act [N, M, D]
  TensorView mtp_streams_;    // act [N, M, D]
};

}  // namespace dsv4

#endif  // DSV4_MODEL_DECODER_H_
