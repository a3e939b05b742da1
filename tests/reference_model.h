// The model written straight from the specification: in double precision, whole sequences at once, without caches, steps or
// quantisation. Only the angles of the rotary embedding are fp32, as the specification wants them. An fp32 run must agree
// with it to fp32 accuracy, for any sizes and layer kinds.
#ifndef DSV4_TESTS_REFERENCE_MODEL_H_
#define DSV4_TESTS_REFERENCE_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/config.h"
#include "tests/random_model.h"

namespace dsv4 {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

struct ReferenceAttention {
  Rows out;           // [positions, D]
  Rows entries;       // [positions / ratio, d]
  Rows indexer_keys;  // [positions / ratio, di], after the Hadamard rotation; with an indexer
  Rows scores;        // of each position, its visible entries; with an indexer
  std::vector<std::vector<int32_t>> selection;  // of each position, ascending; with an indexer
};

struct ReferenceLogits {
  Rows logits;      // [positions, V]
  Rows mtp_logits;  // the same, with an MTP block
  // The smallest distance between the last entry that any position of any layer selected and the first that it did not,
  // relative to the position's largest score. Below 1e-5 an fp32 run may select others.
  double smallest_score_gap = 1.0;
};

// The distance between the k-th and the next of the scores, relative to the largest magnitude; 1 for at most k scores, and
// where both are exactly 0 (no head has a positive product), since their order is then that of the entries.
double ScoreGap(const Row& scores, int64_t k);

class ReferenceModel {
 public:
  explicit ReferenceModel(const RandomModel& model) : model_(model), config_(model.config()) {}

  // x: [positions, D], the normed input of main layer `layer`.
  ReferenceAttention Attention(int64_t layer, const Rows& x) const;

  // `next_token` follows the last of `tokens`.
  ReferenceLogits Run(const std::vector<int32_t>& tokens, int32_t next_token) const;

 private:
  ReferenceAttention Attention(const std::string& prefix, const LayerKind& kind, const Rows& x) const;
  Rows Entries(const std::string& prefix, const LayerKind& kind, int64_t channels, const Rows& x) const;
  Row Experts(const std::string& prefix, bool is_hash, int32_t token, const Row& x) const;
  Row Expert(const std::string& prefix, const Row& x, double weight) const;
  // Runs a block over the residual streams; returns the smallest score gap.
  double Block(const std::string& prefix, const LayerKind& kind, bool is_hash, const std::vector<int32_t>& tokens,
               std::vector<Rows>& streams) const;
  Row Head(const std::string& prefix, const Rows& streams) const;

  const Row& Weight(const std::string& name) const;
  Row Multiply(const std::string& name, const Row& x) const;
  Row Norm(const Row& x, const std::string& name) const;
  void Rotate(Row& values, int64_t position, bool compressed, bool inverse) const;

  const RandomModel& model_;
  const ModelConfig& config_;
  mutable std::map<std::string, Row> weights_;  // those used so far
};

}  // namespace dsv4

#endif  // DSV4_TESTS_REFERENCE_MODEL_H_
