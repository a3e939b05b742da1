#include "ops/step_metadata/step_metadata.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/step_metadata/step_metadata_cuda.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"
#include "runtime/tensor_check.h"

namespace dsv4::step_metadata {
namespace {

struct NamedView {
  std::string name;
  TensorView view;
};

std::string Name(const char* list, size_t index, const char* field) { return StrCat(list, "[", index, "].", field); }

// All tables have a row for each request. `num_requests` is kAnyExtent until the first table has set it.
absl::Status CheckBlockTable(const std::string& name, const TensorView& table, int64_t& num_requests) {
  DSV4_RETURN_IF_ERROR(CheckTensor(name, table, {DType::kI32}, {num_requests, kAnyExtent}));
  num_requests = table.extents[0];
  return CheckAtLeast(StrCat(name, ": blocks of a request"), table.extents[1], 1);
}

}  // namespace

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("token_ids", params.token_ids, {DType::kI32}, {kAnyExtent}));
  const int64_t tokens = params.token_ids.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("row_tokens", params.row_tokens, {DType::kI32}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("row_requests", params.row_requests, {DType::kI32}, {tokens}));
  DSV4_RETURN_IF_ERROR(CheckTensor("row_positions", params.row_positions, {DType::kI64}, {tokens}));

  std::vector<NamedView> inputs = {
      {"token_ids", params.token_ids}, {"requests", params.requests}, {"positions", params.positions}};
  std::vector<NamedView> outputs = {{"row_tokens", params.row_tokens},
                                    {"row_requests", params.row_requests},
                                    {"row_positions", params.row_positions}};
  int64_t num_requests = kAnyExtent;
  for (size_t g = 0; g < params.groups.size(); ++g) {
    const CacheGroup& group = params.groups[g];
    const std::string table = Name("groups", g, "block_table"), slots = Name("groups", g, "slots");
    DSV4_RETURN_IF_ERROR(CheckAtLeast(Name("groups", g, "ratio"), group.ratio, 1));
    DSV4_RETURN_IF_ERROR(CheckAtLeast(Name("groups", g, "rows_per_block"), group.rows_per_block, 1));
    DSV4_RETURN_IF_ERROR(CheckBlockTable(table, group.block_table, num_requests));
    DSV4_RETURN_IF_ERROR(CheckTensor(slots, group.slots, {DType::kI64}, {tokens}));
    inputs.push_back({table, group.block_table});
    outputs.push_back({slots, group.slots});
  }
  for (size_t v = 0; v < params.visible.size(); ++v) {
    const VisibleRows& visible = params.visible[v];
    const std::string counts = Name("visible", v, "counts");
    DSV4_RETURN_IF_ERROR(CheckAtLeast(Name("visible", v, "ratio"), visible.ratio, 1));
    DSV4_RETURN_IF_ERROR(CheckAtLeast(Name("visible", v, "limit"), visible.limit, 0));
    DSV4_RETURN_IF_ERROR(CheckTensor(counts, visible.counts, {DType::kI32}, {tokens}));
    outputs.push_back({counts, visible.counts});
    if (visible.slots.empty()) continue;
    const std::string table = Name("visible", v, "block_table"), slots = Name("visible", v, "slots");
    DSV4_RETURN_IF_ERROR(CheckAtLeast(Name("visible", v, "rows_per_block"), visible.rows_per_block, 1));
    DSV4_RETURN_IF_ERROR(CheckBlockTable(table, visible.block_table, num_requests));
    DSV4_RETURN_IF_ERROR(CheckTensor(slots, visible.slots, {DType::kI32}, {tokens, kAnyExtent}));
    inputs.push_back({table, visible.block_table});
    outputs.push_back({slots, visible.slots});
  }

  for (size_t i = 0; i < outputs.size(); ++i) {
    DSV4_RETURN_IF_ERROR(CheckNoSelfOverlap(outputs[i].name, outputs[i].view));
    for (const NamedView& input : inputs) {
      DSV4_RETURN_IF_ERROR(CheckDisjoint(outputs[i].name, outputs[i].view, input.name, input.view));
    }
    for (size_t j = i + 1; j < outputs.size(); ++j) {
      DSV4_RETURN_IF_ERROR(CheckDisjoint(outputs[i].name, outputs[i].view, outputs[j].name, outputs[j].view));
    }
  }
  return absl::OkStatus();
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  AccessList accesses;
  accesses.Read("token_ids", params.token_ids)
      .Read("requests", params.requests)
      .Read("positions", params.positions)
      .Write("row_tokens", params.row_tokens)
      .Write("row_requests", params.row_requests)
      .Write("row_positions", params.row_positions);
  for (const CacheGroup& group : params.groups) {
    accesses.Read("groups.block_table", group.block_table).Write("groups.slots", group.slots);
  }
  for (const VisibleRows& visible : params.visible) {
    accesses.Write("visible.counts", visible.counts);
    if (visible.slots.empty()) continue;
    accesses.Read("visible.block_table", visible.block_table).Write("visible.slots", visible.slots);
  }
  return stream.Enqueue({.op = "step_metadata",
                         .accesses = accesses,
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::step_metadata
