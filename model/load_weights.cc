// LoadModelWeights in two steps: a plan, which finds and checks every tensor that the config asks for, then one arena
// and the copies into it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "model/checkpoint.h"
#include "runtime/dtype.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

constexpr int64_t kFp4Block = 32;  // columns that share a scale

int64_t NumBlocks(int64_t size, int64_t block) { return size / block + (size % block != 0 ? 1 : 0); }

// A tensor of the arena and where its bytes come from.
struct Upload {
  WeightView* target = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> extents = {};
  bool is_scale = false;
  // The file's bytes as they are, one tensor after another ...
  std::vector<FileTensor> parts = {};
  // ... or, where the stored form is not the one wanted, what makes them.
  std::function<absl::StatusOr<std::vector<uint8_t>>()> convert = nullptr;
};

// A matrix as the file has it.
struct StoredMatrix {
  DType dtype = DType::kF32;
  FileTensor values;
  DType scale_dtype = DType::kE8m0;
  FileTensor scales;  // without a name if the type has none
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t block_rows = 1;
  int64_t block_cols = 1;

  bool has_scales() const { return !scales.name.empty(); }
};

template <typename T>
T Element(const FileTensor& tensor, int64_t index) {
  T value;
  std::memcpy(&value, tensor.bytes.data() + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

float StoredValue(const StoredMatrix& matrix, int64_t row, int64_t col) {
  switch (matrix.dtype) {
    case DType::kBf16:
      return ToFloat(Element<Bf16>(matrix.values, row * matrix.cols + col));
    case DType::kE4m3:
      return ToFloat(Element<E4m3>(matrix.values, row * matrix.cols + col));
    case DType::kE2m1x2: {
      const uint8_t pair = Element<uint8_t>(matrix.values, (row * matrix.cols + col) / 2);
      return ToFloat(E2m1{static_cast<uint8_t>(col % 2 == 0 ? pair & 0xf : pair >> 4)});
    }
    default:
      return Element<float>(matrix.values, row * matrix.cols + col);
  }
}

float StoredScale(const StoredMatrix& matrix, int64_t row, int64_t col) {
  if (!matrix.has_scales()) return 1.0f;
  const int64_t index = row / matrix.block_rows * NumBlocks(matrix.cols, matrix.block_cols) + col / matrix.block_cols;
  return matrix.scale_dtype == DType::kE8m0 ? ToFloat(Element<E8m0>(matrix.scales, index))
                                            : Element<float>(matrix.scales, index);
}

void AppendDequantised(const StoredMatrix& matrix, std::vector<uint8_t>* bytes) {
  std::vector<float> values(static_cast<size_t>(matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t col = 0; col < matrix.cols; ++col) {
      values[static_cast<size_t>(col)] = StoredValue(matrix, row, col) * StoredScale(matrix, row, col);
    }
    const auto* begin = reinterpret_cast<const uint8_t*>(values.data());
    bytes->insert(bytes->end(), begin, begin + values.size() * sizeof(float));
  }
}

class Plan {
 public:
  explicit Plan(const Checkpoint& checkpoint) : checkpoint_(checkpoint), config_(checkpoint.config()) {}

  std::vector<Upload>& uploads() { return uploads_; }

  // Plans the uploads of all of *weights, whose address must not change until they are done.
  absl::Status AddModel(ModelWeights* weights) {
    const int64_t hidden = config_.hidden_size;
    DSV4_RETURN_IF_ERROR(
        AddTensor("embed.weight", {FileDType::kBf16, FileDType::kF32}, {config_.vocab_size, hidden}, &weights->embed));
    DSV4_RETURN_IF_ERROR(AddMatrix("head", config_.vocab_size, hidden, &weights->head));
    DSV4_RETURN_IF_ERROR(AddNorm("norm", hidden, &weights->norm));
    DSV4_RETURN_IF_ERROR(AddMhcHead("", &weights->hc_head));
    weights->layers.resize(config_.layers.size());
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      const bool is_hash = static_cast<int64_t>(i) < config_.num_hash_layers;
      DSV4_RETURN_IF_ERROR(AddBlock(StrCat("layers.", i, "."), config_.layers[i], is_hash, &weights->layers[i]));
    }
    weights->mtp.resize(config_.mtp_layers.size());
    for (size_t i = 0; i < config_.mtp_layers.size(); ++i) {
      DSV4_RETURN_IF_ERROR(AddMtp(StrCat("mtp.", i, "."), config_.mtp_layers[i], &weights->mtp[i]));
    }
    return absl::OkStatus();
  }

  // One scale that is no number would spread over a whole tile of weights.
  absl::Status CheckScales(DType dtype, const FileTensor& scales) const {
    for (int64_t i = 0; i < scales.num_elements(); ++i) {
      const float scale = dtype == DType::kE8m0 ? ToFloat(Element<E8m0>(scales, i)) : Element<float>(scales, i);
      if (!std::isfinite(scale)) {
        return Error(scales.name, StrCat("expected scales that are finite numbers, got ", scale, " as element ", i));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status AddMtp(const std::string& prefix, const LayerKind& kind, MtpWeights* weights) {
    const int64_t hidden = config_.hidden_size;
    DSV4_RETURN_IF_ERROR(AddBlock(prefix, kind, /*is_hash=*/false, &weights->block));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "e_proj", hidden, hidden, &weights->e_proj));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "h_proj", hidden, hidden, &weights->h_proj));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "enorm", hidden, &weights->enorm));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "hnorm", hidden, &weights->hnorm));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "norm", hidden, &weights->norm));
    return AddMhcHead(prefix, &weights->hc_head);
  }

  absl::Status AddBlock(const std::string& prefix, const LayerKind& kind, bool is_hash, BlockWeights* weights) {
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "attn_norm", config_.hidden_size, &weights->attn_norm));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "ffn_norm", config_.hidden_size, &weights->ffn_norm));
    DSV4_RETURN_IF_ERROR(AddMhc(prefix + "hc_attn", &weights->hc_attn));
    DSV4_RETURN_IF_ERROR(AddMhc(prefix + "hc_ffn", &weights->hc_ffn));
    DSV4_RETURN_IF_ERROR(AddAttention(prefix + "attn.", kind, &weights->attention));
    return AddMoe(prefix + "ffn.", is_hash, &weights->moe);
  }

  absl::Status AddAttention(const std::string& prefix, const LayerKind& kind, AttentionWeights* weights) {
    const int64_t hidden = config_.hidden_size;
    const int64_t query = config_.num_attention_heads * config_.head_dim;
    const int64_t low_rank = config_.o_groups * config_.o_lora_rank;
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "wq_a", config_.q_lora_rank, hidden, &weights->wq_a));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "q_norm", config_.q_lora_rank, &weights->q_norm));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "wq_b", query, config_.q_lora_rank, &weights->wq_b));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "wkv", config_.head_dim, hidden, &weights->wkv));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "kv_norm", config_.head_dim, &weights->kv_norm));
    DSV4_RETURN_IF_ERROR(AddF32(prefix + "attn_sink", {config_.num_attention_heads}, &weights->sink));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "wo_a", low_rank, query / config_.o_groups, &weights->wo_a));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "wo_b", hidden, low_rank, &weights->wo_b));
    if (kind.compressed()) {
      DSV4_RETURN_IF_ERROR(
          AddCompressor(prefix + "compressor.", kind, config_.head_dim, &weights->compressor.emplace()));
    }
    if (kind.indexer) {
      const std::string indexer_prefix = prefix + "indexer.";
      IndexerWeights& indexer = weights->indexer.emplace();
      DSV4_RETURN_IF_ERROR(AddMatrix(indexer_prefix + "wq_b", config_.index_n_heads * config_.index_head_dim,
                                     config_.q_lora_rank, &indexer.wq_b));
      DSV4_RETURN_IF_ERROR(
          AddMatrix(indexer_prefix + "weights_proj", config_.index_n_heads, hidden, &indexer.weights_proj));
      DSV4_RETURN_IF_ERROR(
          AddCompressor(indexer_prefix + "compressor.", kind, config_.index_head_dim, &indexer.compressor));
    }
    return absl::OkStatus();
  }

  absl::Status AddCompressor(const std::string& prefix, const LayerKind& kind, int64_t channels,
                             CompressorWeights* weights) {
    const int64_t width = channels * (kind.overlap ? 2 : 1);
    DSV4_RETURN_IF_ERROR(AddF32(prefix + "ape", {kind.ratio, width}, &weights->ape));
    DSV4_RETURN_IF_ERROR(AddNorm(prefix + "norm", channels, &weights->norm));
    DSV4_ASSIGN_OR_RETURN(StoredMatrix wkv, FindMatrix(prefix + "wkv", width, config_.hidden_size));
    DSV4_ASSIGN_OR_RETURN(StoredMatrix wgate, FindMatrix(prefix + "wgate", width, config_.hidden_size));
    Upload upload = {.target = &weights->wkv_gate.values, .extents = {2 * width, config_.hidden_size}};
    if (wkv.dtype == DType::kBf16 && wgate.dtype == DType::kBf16) {
      upload.dtype = DType::kBf16;
      upload.parts = {wkv.values, wgate.values};
    } else {
      // One matrix has one stored type; fp32 holds both parts exactly.
      upload.dtype = DType::kF32;
      upload.convert = [this, wkv, wgate]() -> absl::StatusOr<std::vector<uint8_t>> {
        std::vector<uint8_t> bytes;
        bytes.reserve(static_cast<size_t>(2 * wkv.rows * wkv.cols) * sizeof(float));
        for (const StoredMatrix* matrix : {&wkv, &wgate}) {
          if (matrix->has_scales()) DSV4_RETURN_IF_ERROR(CheckScales(matrix->scale_dtype, matrix->scales));
          AppendDequantised(*matrix, &bytes);
        }
        return bytes;
      };
    }
    uploads_.push_back(std::move(upload));
    return absl::OkStatus();
  }

  absl::Status AddMoe(const std::string& prefix, bool is_hash, MoeWeights* weights) {
    const int64_t experts = config_.n_routed_experts;
    const int64_t hidden = config_.hidden_size;
    const int64_t inner = config_.moe_intermediate_size;
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "gate", experts, hidden, &weights->gate));
    if (is_hash) {
      DSV4_RETURN_IF_ERROR(AddExpertTable(prefix + "gate.tid2eid", &weights->expert_table));
    } else {
      DSV4_RETURN_IF_ERROR(AddF32(prefix + "gate.bias", {experts}, &weights->bias));
    }
    DSV4_RETURN_IF_ERROR(AddExperts(prefix, "w1", inner, hidden, &weights->experts.w1));
    DSV4_RETURN_IF_ERROR(AddExperts(prefix, "w3", inner, hidden, &weights->experts.w3));
    DSV4_RETURN_IF_ERROR(AddExperts(prefix, "w2", hidden, inner, &weights->experts.w2));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "shared_experts.w1", inner, hidden, &weights->shared.w1));
    DSV4_RETURN_IF_ERROR(AddMatrix(prefix + "shared_experts.w3", inner, hidden, &weights->shared.w3));
    return AddMatrix(prefix + "shared_experts.w2", hidden, inner, &weights->shared.w2);
  }

  absl::Status AddExpertTable(const std::string& name, WeightView* target) {
    const std::vector<int64_t> extents = {config_.vocab_size, config_.num_experts_per_tok};
    DSV4_ASSIGN_OR_RETURN(FileTensor table, Find(name, {FileDType::kI64}, extents));
    Upload upload = {.target = target, .dtype = DType::kI32, .extents = extents};
    upload.convert = [this, table]() -> absl::StatusOr<std::vector<uint8_t>> {
      std::vector<uint8_t> bytes;
      for (int64_t i = 0; i < table.num_elements(); ++i) {
        const int64_t expert = Element<int64_t>(table, i);
        if (expert < 0 || expert >= config_.n_routed_experts) {
          return Error(table.name, StrCat("expected experts below n_routed_experts, ", config_.n_routed_experts,
                                          ", got ", expert, " in the row of token ", i / config_.num_experts_per_tok));
        }
        const int32_t narrow = static_cast<int32_t>(expert);
        const auto* begin = reinterpret_cast<const uint8_t*>(&narrow);
        bytes.insert(bytes.end(), begin, begin + sizeof(narrow));
      }
      return bytes;
    };
    uploads_.push_back(std::move(upload));
    return absl::OkStatus();
  }

  absl::Status AddMhc(const std::string& name, MhcWeights* weights) {
    const int64_t streams = config_.hc_mult;
    const int64_t mixes = 2 * streams + streams * streams;
    DSV4_RETURN_IF_ERROR(AddF32(name + "_fn", {mixes, streams * config_.hidden_size}, &weights->fn));
    DSV4_RETURN_IF_ERROR(AddF32(name + "_base", {mixes}, &weights->base));
    return AddF32(name + "_scale", {3}, &weights->scale);
  }

  absl::Status AddMhcHead(const std::string& prefix, MhcWeights* weights) {
    const int64_t streams = config_.hc_mult;
    DSV4_RETURN_IF_ERROR(AddF32(prefix + "hc_head_fn", {streams, streams * config_.hidden_size}, &weights->fn));
    DSV4_RETURN_IF_ERROR(AddF32(prefix + "hc_head_base", {streams}, &weights->base));
    return AddF32(prefix + "hc_head_scale", {1}, &weights->scale);
  }

  absl::Status AddNorm(const std::string& name, int64_t channels, WeightView* target) {
    return AddTensor(name + ".weight", {FileDType::kBf16, FileDType::kF32}, {channels}, target);
  }

  absl::Status AddF32(const std::string& name, const std::vector<int64_t>& extents, WeightView* target) {
    return AddTensor(name, {FileDType::kF32}, extents, target);
  }

  // A tensor of one of some file types, all of which are bf16 or f32.
  absl::Status AddTensor(const std::string& name, std::initializer_list<FileDType> dtypes,
                         const std::vector<int64_t>& extents, WeightView* target) {
    DSV4_ASSIGN_OR_RETURN(FileTensor tensor, Find(name, dtypes, extents));
    const DType dtype = tensor.dtype == FileDType::kBf16 ? DType::kBf16 : DType::kF32;
    uploads_.push_back({.target = target, .dtype = dtype, .extents = extents, .parts = {std::move(tensor)}});
    return absl::OkStatus();
  }

  absl::Status AddMatrix(const std::string& name, int64_t rows, int64_t cols, QuantizedWeight* target) {
    DSV4_ASSIGN_OR_RETURN(StoredMatrix matrix, FindMatrix(name, rows, cols));
    return AddMatrices({std::move(matrix)}, {}, target);
  }

  absl::Status AddExperts(const std::string& prefix, std::string_view matrix_name, int64_t rows, int64_t cols,
                          QuantizedWeight* target) {
    std::vector<StoredMatrix> matrices;
    for (int64_t expert = 0; expert < config_.n_routed_experts; ++expert) {
      const std::string name = StrCat(prefix, "experts.", expert, ".", matrix_name);
      DSV4_ASSIGN_OR_RETURN(StoredMatrix matrix, FindMatrix(name, rows, cols));
      if (expert > 0 && matrix.dtype != matrices[0].dtype) {
        return Error(matrix.values.name,
                     StrCat("expected the type of the first expert's, ", FileDTypeName(matrices[0].values.dtype),
                            ", got ", FileDTypeName(matrix.values.dtype)));
      }
      if (expert > 0 && matrix.scale_dtype != matrices[0].scale_dtype) {
        return Error(matrix.scales.name,
                     StrCat("expected the type of the first expert's, ", FileDTypeName(matrices[0].scales.dtype),
                            ", got ", FileDTypeName(matrix.scales.dtype)));
      }
      matrices.push_back(std::move(matrix));
    }
    return AddMatrices(std::move(matrices), {config_.n_routed_experts}, target);
  }

  // Matrices of one type, size and block size, below `outer` extents.
  absl::Status AddMatrices(std::vector<StoredMatrix> matrices, const std::vector<int64_t>& outer,
                           QuantizedWeight* target) {
    const StoredMatrix& first = matrices[0];
    target->block_rows = first.block_rows;
    target->block_cols = first.block_cols;
    Upload values = {.target = &target->values, .dtype = first.dtype, .extents = outer};
    values.extents.push_back(first.rows);
    values.extents.push_back(first.dtype == DType::kE2m1x2 ? first.cols / 2 : first.cols);
    Upload scales = {.target = &target->scales, .dtype = first.scale_dtype, .extents = outer, .is_scale = true};
    scales.extents.push_back(NumBlocks(first.rows, first.block_rows));
    scales.extents.push_back(NumBlocks(first.cols, first.block_cols));
    const bool has_scales = first.has_scales();
    for (StoredMatrix& matrix : matrices) {
      values.parts.push_back(std::move(matrix.values));
      scales.parts.push_back(std::move(matrix.scales));
    }
    uploads_.push_back(std::move(values));
    if (has_scales) uploads_.push_back(std::move(scales));
    return absl::OkStatus();
  }

  // Finds `name`.weight and, where the weight's type has them, `name`.scale.
  absl::StatusOr<StoredMatrix> FindMatrix(const std::string& name, int64_t rows, int64_t cols) const {
    const std::string values_name = name + ".weight";
    const std::string scales_name = name + ".scale";
    StoredMatrix matrix;
    matrix.rows = rows;
    matrix.cols = cols;
    DSV4_ASSIGN_OR_RETURN(matrix.values, Find(values_name, {FileDType::kF8E4m3, FileDType::kI8, FileDType::kU8,
                                                            FileDType::kBf16, FileDType::kF32}));
    switch (matrix.values.dtype) {
      case FileDType::kBf16:
      case FileDType::kF32:
        matrix.dtype = matrix.values.dtype == FileDType::kBf16 ? DType::kBf16 : DType::kF32;
        DSV4_RETURN_IF_ERROR(CheckShape(matrix.values, {rows, cols}));
        if (checkpoint_.Has(scales_name)) {
          return Error(scales_name, StrCat("expected no scales for a weight of ", FileDTypeName(matrix.values.dtype)));
        }
        return matrix;
      case FileDType::kF8E4m3:
        matrix.dtype = DType::kE4m3;
        if (config_.weight_block_rows == 0) {
          return Error(values_name, "F8_E4M3 needs quantization_config.weight_block_size, which the config lacks");
        }
        matrix.block_rows = config_.weight_block_rows;
        matrix.block_cols = config_.weight_block_cols;
        DSV4_RETURN_IF_ERROR(CheckShape(matrix.values, {rows, cols}));
        break;
      default:
        matrix.dtype = DType::kE2m1x2;
        matrix.block_cols = kFp4Block;
        if (cols % 2 != 0) {
          return Error(values_name, StrCat("expected an even number of columns in pairs of FP4, got ", cols));
        }
        DSV4_RETURN_IF_ERROR(CheckShape(matrix.values, {rows, cols / 2}));
        break;
    }
    const std::vector<int64_t> scale_shape = {NumBlocks(rows, matrix.block_rows), NumBlocks(cols, matrix.block_cols)};
    if (matrix.dtype == DType::kE4m3) {
      DSV4_ASSIGN_OR_RETURN(matrix.scales, Find(scales_name, {FileDType::kF8E8m0, FileDType::kF32}, scale_shape));
    } else {
      DSV4_ASSIGN_OR_RETURN(matrix.scales, Find(scales_name, {FileDType::kF8E8m0}, scale_shape));
    }
    matrix.scale_dtype = matrix.scales.dtype == FileDType::kF32 ? DType::kF32 : DType::kE8m0;
    return matrix;
  }

  absl::StatusOr<FileTensor> Find(const std::string& name, std::initializer_list<FileDType> dtypes) const {
    DSV4_ASSIGN_OR_RETURN(FileTensor tensor, checkpoint_.Get(name));
    if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) != dtypes.end()) return tensor;
    std::string expected;
    for (FileDType dtype : dtypes) StrAppend(&expected, expected.empty() ? "" : " or ", FileDTypeName(dtype));
    return Error(name, StrCat("expected ", expected, ", got ", FileDTypeName(tensor.dtype)));
  }

  absl::StatusOr<FileTensor> Find(const std::string& name, std::initializer_list<FileDType> dtypes,
                                  const std::vector<int64_t>& shape) const {
    DSV4_ASSIGN_OR_RETURN(FileTensor tensor, Find(name, dtypes));
    DSV4_RETURN_IF_ERROR(CheckShape(tensor, shape));
    return tensor;
  }

  absl::Status CheckShape(const FileTensor& tensor, const std::vector<int64_t>& shape) const {
    if (tensor.shape == shape) return absl::OkStatus();
    return Error(tensor.name, StrCat("expected ", FileDTypeName(tensor.dtype), " [", absl::StrJoin(shape, ", "),
                                     "], got [", absl::StrJoin(tensor.shape, ", "), "]"));
  }

  absl::Status Error(const std::string& name, std::string_view problem) const {
    return absl::InvalidArgumentError(StrCat(checkpoint_.FileOf(name), ": ", name, ": ", problem));
  }

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  std::vector<Upload> uploads_;
};

TensorView AddToArena(Arena& arena, DType dtype, const std::vector<int64_t>& extents) {
  switch (extents.size()) {
    case 1:
      return arena.Add(dtype, {extents[0]});
    case 2:
      return arena.Add(dtype, {extents[0], extents[1]});
    default:
      return arena.Add(dtype, {extents[0], extents[1], extents[2]});
  }
}

absl::Status Copy(const Plan& plan, const Upload& upload, Stream& stream) {
  // The arena's memory is not const, the view of it is.
  char* destination = static_cast<char*>(upload.target->view().data);
  if (upload.convert) {
    DSV4_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes, upload.convert());
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(destination, bytes.data(), static_cast<int64_t>(bytes.size())));
    return stream.Synchronize();  // before `bytes` goes
  }
  for (const FileTensor& part : upload.parts) {
    if (upload.is_scale) DSV4_RETURN_IF_ERROR(plan.CheckScales(upload.dtype, part));
    DSV4_RETURN_IF_ERROR(stream.CopyToDevice(destination, part.bytes.data(), static_cast<int64_t>(part.bytes.size())));
    destination += part.bytes.size();
  }
  return absl::OkStatus();
}

absl::Status CopyAll(Plan& plan, Stream& stream) {
  for (const Upload& upload : plan.uploads()) DSV4_RETURN_IF_ERROR(Copy(plan, upload, stream));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelWeights> LoadModelWeights(const Checkpoint& checkpoint, Device& device, Stream& stream) {
  ModelWeights weights;
  Plan plan(checkpoint);
  DSV4_RETURN_IF_ERROR(plan.AddModel(&weights));
  DSV4_ASSIGN_OR_RETURN(weights.arena, Arena::Create(device, [&plan](Arena& arena) {
                          for (Upload& upload : plan.uploads()) {
                            *upload.target = WeightView(AddToArena(arena, upload.dtype, upload.extents));
                          }
                        }));
  // Also after an error no copy may be under way when the arena goes.
  const absl::Status copied = CopyAll(plan, stream);
  const absl::Status finished = stream.Synchronize();
  DSV4_RETURN_IF_ERROR(copied);
  DSV4_RETURN_IF_ERROR(finished);
  return weights;
}

}  // namespace dsv4
