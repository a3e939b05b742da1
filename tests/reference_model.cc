#include "tests/reference_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double Dot(const double* a, const double* b, size_t size) { return std::inner_product(a, a + size, b, 0.0); }

double InverseRms(const Row& x, double eps) {
  return 1.0 / std::sqrt(Dot(x.data(), x.data(), x.size()) / static_cast<double>(x.size()) + eps);
}

Row Part(const Row& x, size_t begin, size_t count) { return Row(x.begin() + begin, x.begin() + begin + count); }

// Section 6.2, entry by entry.
Row Hadamard(const Row& x) {
  Row out(x.size(), 0.0);
  for (size_t a = 0; a < x.size(); ++a) {
    for (size_t b = 0; b < x.size(); ++b) out[a] += std::popcount(a & b) % 2 == 0 ? x[b] : -x[b];
    out[a] /= std::sqrt(static_cast<double>(x.size()));
  }
  return out;
}

// The indices of the `count` largest, the lower index first among equals, in ascending order.
std::vector<int32_t> Largest(const Row& values, size_t count) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  order.resize(std::min(count, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

// Section 7.1 for one head.
Row Attend(const Row& q, const Rows& keys, double sink) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size()));
  Row scores;
  for (const Row& key : keys) scores.push_back(scale * Dot(q.data(), key.data(), q.size()));
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = std::exp(sink - largest);
  Row out(q.size(), 0.0);
  for (size_t i = 0; i < keys.size(); ++i) {
    const double p = std::exp(scores[i] - largest);
    sum += p;
    for (size_t c = 0; c < out.size(); ++c) out[c] += p * keys[i][c];
  }
  for (double& value : out) value /= sum;
  return out;
}

}  // namespace

double ScoreGap(const Row& scores, int64_t k) {
  if (static_cast<int64_t>(scores.size()) <= k) return 1.0;
  Row sorted = scores;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  if (sorted[k - 1] == 0.0 && sorted[k] == 0.0) return 1.0;
  const double magnitude = std::max(std::abs(sorted.front()), std::abs(sorted.back()));
  return (sorted[k - 1] - sorted[k]) / magnitude;
}

const Row& ReferenceModel::Weight(const std::string& name) const {
  Row& values = weights_[name];
  if (values.empty()) values = model_.Values(name);
  return values;
}

Row ReferenceModel::Multiply(const std::string& name, const Row& x) const {
  const Row& weight = Weight(name);
  Row out(weight.size() / x.size());
  for (size_t o = 0; o < out.size(); ++o) out[o] = Dot(weight.data() + o * x.size(), x.data(), x.size());
  return out;
}

Row ReferenceModel::Norm(const Row& x, const std::string& name) const {
  const Row& weight = Weight(name);
  const double factor = InverseRms(x, config_.rms_norm_eps);
  Row out(x.size());
  for (size_t c = 0; c < x.size(); ++c) out[c] = weight[c] * x[c] * factor;
  return out;
}

// Sections 4.2 to 4.4: rotates the last channels of `values`.
void ReferenceModel::Rotate(Row& values, int64_t position, bool compressed, bool inverse) const {
  const double size = static_cast<double>(config_.qk_rope_head_dim);
  const double base = compressed ? config_.compress_rope_theta : config_.rope_theta;
  const double original = static_cast<double>(config_.yarn.original_max_position_embeddings);
  auto corr = [&](double n) { return size * std::log(original / (2.0 * std::numbers::pi * n)) / (2.0 * std::log(base)); };
  const double low = std::max(std::floor(corr(config_.yarn.beta_fast)), 0.0);
  double high = std::min(std::ceil(corr(config_.yarn.beta_slow)), size - 1.0);
  if (high == low) high += 0.001;
  double* pairs = values.data() + values.size() - config_.qk_rope_head_dim;
  for (int64_t i = 0; i < config_.qk_rope_head_dim / 2; ++i) {
    double frequency = std::pow(base, -2.0 * static_cast<double>(i) / size);
    if (compressed) {
      const double ramp = std::min(std::max((static_cast<double>(i) - low) / (high - low), 0.0), 1.0);
      frequency = frequency * (1.0 - ramp) + frequency / config_.yarn.factor * ramp;
    }
    const float angle = static_cast<float>(position) * static_cast<float>(frequency);
    const double c = std::cos(static_cast<double>(angle));
    const double s = inverse ? -std::sin(static_cast<double>(angle)) : std::sin(static_cast<double>(angle));
    const double a = pairs[2 * i];
    const double b = pairs[2 * i + 1];
    pairs[2 * i] = a * c - b * s;
    pairs[2 * i + 1] = a * s + b * c;
  }
}

// Sections 5.1 to 5.3 without quantisation.
Rows ReferenceModel::Entries(const std::string& prefix, const LayerKind& kind, int64_t channels, const Rows& x) const {
  const int64_t width = channels * (kind.overlap ? 2 : 1);
  const Row& ape = Weight(prefix + "ape");
  Rows u;
  Rows g;
  for (size_t p = 0; p < x.size(); ++p) {
    u.push_back(Multiply(prefix + "wkv", x[p]));
    g.push_back(Multiply(prefix + "wgate", x[p]));
    for (int64_t c = 0; c < width; ++c) g[p][c] += ape[static_cast<int64_t>(p) % kind.ratio * width + c];
  }
  Rows entries;
  for (int64_t j = 0; (j + 1) * kind.ratio <= static_cast<int64_t>(x.size()); ++j) {
    Row entry(channels);
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<std::pair<double, double>> terms;  // score, value
      if (kind.overlap && j > 0) {
        for (int64_t t = (j - 1) * kind.ratio; t < j * kind.ratio; ++t) terms.push_back({g[t][c], u[t][c]});
      }
      const int64_t column = kind.overlap ? channels + c : c;
      for (int64_t t = j * kind.ratio; t < (j + 1) * kind.ratio; ++t) terms.push_back({g[t][column], u[t][column]});
      double weights = 0.0;
      double sum = 0.0;
      for (const auto& [score, value] : terms) {
        weights += std::exp(score);
        sum += std::exp(score) * value;
      }
      entry[c] = sum / weights;
    }
    entry = Norm(entry, prefix + "norm");
    Rotate(entry, j * kind.ratio, /*compressed=*/true, /*inverse=*/false);
    entries.push_back(entry);
  }
  return entries;
}

ReferenceAttention ReferenceModel::Attention(int64_t layer, const Rows& x) const {
  return Attention(StrCat("layers.", layer, ".attn."), config_.layers[layer], x);
}

ReferenceAttention ReferenceModel::Attention(const std::string& prefix, const LayerKind& kind, const Rows& x) const {
  const bool compressed = kind.compressed();
  const size_t head_dim = static_cast<size_t>(config_.head_dim);
  ReferenceAttention result;
  if (compressed) result.entries = Entries(prefix + "compressor.", kind, config_.head_dim, x);
  if (kind.indexer) {
    for (const Row& key : Entries(prefix + "indexer.compressor.", kind, config_.index_head_dim, x)) {
      result.indexer_keys.push_back(Hadamard(key));
    }
  }

  Rows window;
  for (size_t p = 0; p < x.size(); ++p) {
    const int64_t position = static_cast<int64_t>(p);
    window.push_back(Norm(Multiply(prefix + "wkv", x[p]), prefix + "kv_norm"));
    Rotate(window.back(), position, compressed, /*inverse=*/false);
    const Row latent = Norm(Multiply(prefix + "wq_a", x[p]), prefix + "q_norm");

    // What the position attends to.
    const size_t first = p + 1 >= static_cast<size_t>(config_.sliding_window) ? p + 1 - config_.sliding_window : 0;
    Rows keys(window.begin() + first, window.end());
    const size_t visible = compressed ? (p + 1) / kind.ratio : 0;
    if (kind.indexer) {
      const size_t di = static_cast<size_t>(config_.index_head_dim);
      const Row queries = Multiply(prefix + "indexer.wq_b", latent);
      const Row weights = Multiply(prefix + "indexer.weights_proj", x[p]);
      Row scores(visible, 0.0);
      for (int64_t h = 0; h < config_.index_n_heads; ++h) {
        Row query = Part(queries, h * di, di);
        Rotate(query, position, compressed, /*inverse=*/false);
        query = Hadamard(query);
        const double weight = weights[h] / std::sqrt(static_cast<double>(di)) /
                              std::sqrt(static_cast<double>(config_.index_n_heads));
        for (size_t j = 0; j < visible; ++j) {
          scores[j] += weight * std::max(Dot(query.data(), result.indexer_keys[j].data(), di), 0.0);
        }
      }
      result.selection.push_back(Largest(scores, static_cast<size_t>(config_.index_topk)));
      result.scores.push_back(scores);
      for (int32_t j : result.selection.back()) keys.push_back(result.entries[j]);
    } else {
      keys.insert(keys.end(), result.entries.begin(), result.entries.begin() + visible);
    }

    const Row queries = Multiply(prefix + "wq_b", latent);
    Row heads;
    for (int64_t h = 0; h < config_.num_attention_heads; ++h) {
      Row query = Part(queries, h * head_dim, head_dim);
      const double factor = InverseRms(query, config_.rms_norm_eps);
      for (double& value : query) value *= factor;
      Rotate(query, position, compressed, /*inverse=*/false);
      Row out = Attend(query, keys, Weight(prefix + "attn_sink")[h]);
      Rotate(out, position, compressed, /*inverse=*/true);
      heads.insert(heads.end(), out.begin(), out.end());
    }

    // Section 8: each group of heads has its own rows of wo_a.
    const size_t group_size = heads.size() / config_.o_groups;
    const Row& wo_a = Weight(prefix + "wo_a");
    Row low_rank;
    for (int64_t row = 0; row < config_.o_groups * config_.o_lora_rank; ++row) {
      const double* group = heads.data() + row / config_.o_lora_rank * group_size;
      low_rank.push_back(Dot(wo_a.data() + row * group_size, group, group_size));
    }
    result.out.push_back(Multiply(prefix + "wo_b", low_rank));
  }
  return result;
}

Row ReferenceModel::Expert(const std::string& prefix, const Row& x, double weight) const {
  const double limit = config_.swiglu_limit;
  const Row gate = Multiply(prefix + "w1", x);
  const Row up = Multiply(prefix + "w3", x);
  Row hidden(gate.size());
  for (size_t k = 0; k < hidden.size(); ++k) {
    const double g = std::min(gate[k], limit);
    hidden[k] = g * Sigmoid(g) * std::clamp(up[k], -limit, limit) * weight;
  }
  return Multiply(prefix + "w2", hidden);
}

// Section 10.2.
Row ReferenceModel::Experts(const std::string& prefix, bool is_hash, int32_t token, const Row& x) const {
  Row s = Multiply(prefix + "gate", x);
  for (double& value : s) value = std::sqrt(std::log1p(std::exp(value)));
  std::vector<int32_t> chosen;
  if (is_hash) {
    const Row& table = Weight(prefix + "gate.tid2eid");
    for (int64_t c = 0; c < config_.num_experts_per_tok; ++c) {
      chosen.push_back(static_cast<int32_t>(table[token * config_.num_experts_per_tok + c]));
    }
  } else {
    Row biased = s;
    for (size_t e = 0; e < s.size(); ++e) biased[e] += Weight(prefix + "gate.bias")[e];
    chosen = Largest(biased, static_cast<size_t>(config_.num_experts_per_tok));
  }
  double sum = 0.0;
  for (int32_t e : chosen) sum += s[e];
  Row out = Expert(prefix + "shared_experts.", x, 1.0);
  for (int32_t e : chosen) {
    const Row y = Expert(StrCat(prefix, "experts.", e, "."), x, s[e] / sum * config_.routed_scaling_factor);
    for (size_t c = 0; c < out.size(); ++c) out[c] += y[c];
  }
  return out;
}

double ReferenceModel::Block(const std::string& prefix, const LayerKind& kind, bool is_hash,
                             const std::vector<int32_t>& tokens, std::vector<Rows>& streams) const {
  const size_t m = static_cast<size_t>(config_.hc_mult);
  double gap = 1.0;
  // Section 10.1 around a sublayer that maps all positions' normed inputs to outputs.
  auto around = [&](const std::string& name, const std::string& norm, auto sublayer) {
    const Row& scale = Weight(prefix + name + "_scale");
    const Row& base = Weight(prefix + name + "_base");
    Rows inputs;
    Rows posts;
    std::vector<Rows> combs;
    for (const Rows& x : streams) {
      Row flat;
      for (const Row& row : x) flat.insert(flat.end(), row.begin(), row.end());
      Row mix = Multiply(prefix + name + "_fn", flat);
      const double factor = InverseRms(flat, config_.rms_norm_eps);
      for (double& value : mix) value *= factor;
      Row input(x[0].size(), 0.0);
      Row post(m);
      Rows comb(m, Row(m));
      for (size_t a = 0; a < m; ++a) {
        const double pre = Sigmoid(mix[a] * scale[0] + base[a]) + config_.hc_eps;
        for (size_t c = 0; c < input.size(); ++c) input[c] += pre * x[a][c];
        post[a] = 2.0 * Sigmoid(mix[m + a] * scale[1] + base[m + a]);
        double sum = 0.0;
        for (size_t b = 0; b < m; ++b) {
          comb[a][b] = std::exp(mix[2 * m + m * a + b] * scale[2] + base[2 * m + m * a + b]);
          sum += comb[a][b];
        }
        for (size_t b = 0; b < m; ++b) comb[a][b] = comb[a][b] / sum + config_.hc_eps;
      }
      auto divide = [&](bool columns) {
        for (size_t i = 0; i < m; ++i) {
          double sum = config_.hc_eps;
          for (size_t k = 0; k < m; ++k) sum += columns ? comb[k][i] : comb[i][k];
          for (size_t k = 0; k < m; ++k) (columns ? comb[k][i] : comb[i][k]) /= sum;
        }
      };
      divide(/*columns=*/true);
      for (int64_t iteration = 1; iteration < config_.hc_sinkhorn_iters; ++iteration) {
        divide(/*columns=*/false);
        divide(/*columns=*/true);
      }
      inputs.push_back(Norm(input, prefix + norm));
      posts.push_back(post);
      combs.push_back(comb);
    }
    const Rows outputs = sublayer(inputs);
    for (size_t p = 0; p < streams.size(); ++p) {
      Rows mixed(m, Row(outputs[p].size()));
      for (size_t b = 0; b < m; ++b) {
        for (size_t c = 0; c < mixed[b].size(); ++c) {
          mixed[b][c] = posts[p][b] * outputs[p][c];
          for (size_t a = 0; a < m; ++a) mixed[b][c] += combs[p][a][b] * streams[p][a][c];
        }
      }
      streams[p] = mixed;
    }
  };
  around("hc_attn", "attn_norm", [&](const Rows& x) {
    const ReferenceAttention attention = Attention(prefix + "attn.", kind, x);
    for (const Row& scores : attention.scores) gap = std::min(gap, ScoreGap(scores, config_.index_topk));
    return attention.out;
  });
  around("hc_ffn", "ffn_norm", [&](const Rows& x) {
    Rows out;
    for (size_t p = 0; p < x.size(); ++p) out.push_back(Experts(prefix + "ffn.", is_hash, tokens[p], x[p]));
    return out;
  });
  return gap;
}

// Section 10.3.
Row ReferenceModel::Head(const std::string& prefix, const Rows& streams) const {
  Row flat;
  for (const Row& row : streams) flat.insert(flat.end(), row.begin(), row.end());
  const Row mix = Multiply(prefix + "hc_head_fn", flat);
  const double factor = InverseRms(flat, config_.rms_norm_eps);
  Row z(streams[0].size(), 0.0);
  for (size_t a = 0; a < streams.size(); ++a) {
    const double pre = Sigmoid(mix[a] * factor * Weight(prefix + "hc_head_scale")[0] + Weight(prefix + "hc_head_base")[a]);
    for (size_t c = 0; c < z.size(); ++c) z[c] += (pre + config_.hc_eps) * streams[a][c];
  }
  return Multiply("head", Norm(z, prefix + "norm"));
}

ReferenceLogits ReferenceModel::Run(const std::vector<int32_t>& tokens, int32_t next_token) const {
  const size_t hidden = static_cast<size_t>(config_.hidden_size);
  const size_t m = static_cast<size_t>(config_.hc_mult);
  ReferenceLogits result;
  std::vector<Rows> streams;
  for (int32_t token : tokens) streams.push_back(Rows(m, Part(Weight("embed"), token * hidden, hidden)));
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const bool is_hash = static_cast<int64_t>(i) < config_.num_hash_layers;
    result.smallest_score_gap = std::min(
        result.smallest_score_gap, Block(StrCat("layers.", i, "."), config_.layers[i], is_hash, tokens, streams));
  }
  for (const Rows& x : streams) result.logits.push_back(Head("", x));
  if (config_.mtp_layers.empty()) return result;

  for (size_t p = 0; p < tokens.size(); ++p) {
    const int32_t next = p + 1 < tokens.size() ? tokens[p + 1] : next_token;
    const Row e = Multiply("mtp.0.e_proj", Norm(Part(Weight("embed"), next * hidden, hidden), "mtp.0.enorm"));
    for (Row& x : streams[p]) {
      x = Multiply("mtp.0.h_proj", Norm(x, "mtp.0.hnorm"));
      for (size_t c = 0; c < hidden; ++c) x[c] += e[c];
    }
  }
  Block("mtp.0.", config_.mtp_layers[0], /*is_hash=*/false, tokens, streams);
  for (const Rows& x : streams) result.mtp_logits.push_back(Head("mtp.0.", x));
  return result;
}

}  // namespace dsv4
