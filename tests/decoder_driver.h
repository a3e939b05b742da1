// Drives a decoder without an engine: a test says what each row of a step is, and looks at everything.
#ifndef DSV4_TESTS_DECODER_DRIVER_H_
#define DSV4_TESTS_DECODER_DRIVER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/decoder.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"
#include "tests/generate.h"

namespace dsv4 {

struct StepToken {
  int32_t request = 0;
  int64_t position = 0;
  int32_t token = 0;
  int32_t next_token = -1;
  bool wants_logits = true;
};

// The tokens of `sequence` at positions [begin, end), as rows of `request`.
std::vector<StepToken> TokensOf(int32_t request, const std::vector<int32_t>& sequence, int64_t begin, int64_t end);

class DecoderDriver {
 public:
  // Every request row gets its blocks by AssignBlocks(0). The model must outlive the driver.
  static absl::StatusOr<std::unique_ptr<DecoderDriver>> Create(const LoadedModel& model, const DecoderOptions& options);

  // Deals the blocks of every group out to the request rows: in order for seed 0 (request 0 gets the first), else in an order
  // that depends on the seed, in which no request's blocks follow each other.
  absl::Status AssignBlocks(uint64_t seed);

  // Fills the host's inputs: the tokens in rows 0, 1, ..., pads after them.
  void Fill(const std::vector<StepToken>& tokens);
  absl::Status Upload();
  // Fill, Upload, and a step of `rows` rows.
  absl::Status Run(const std::vector<StepToken>& tokens, int64_t rows);

  // Of the last step: the logits of the tokens that wanted them, one row each.
  absl::StatusOr<std::vector<std::vector<float>>> Logits() { return Read(decoder_->outputs().logits); }
  absl::StatusOr<std::vector<std::vector<float>>> MtpLogits() { return Read(decoder_->outputs().mtp_logits); }

  // Every cache of the main layers.
  std::vector<TensorView> Caches() const;
  absl::StatusOr<std::vector<std::vector<uint8_t>>> CacheBytes();

  Decoder& decoder() { return *decoder_; }
  Stream& stream() { return *stream_; }

 private:
  DecoderDriver() = default;
  absl::StatusOr<std::vector<std::vector<float>>> Read(const TensorView& logits);

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Decoder> decoder_;
  int64_t wanted_logits_ = 0;
};

}  // namespace dsv4

#endif  // DSV4_TESTS_DECODER_DRIVER_H_
