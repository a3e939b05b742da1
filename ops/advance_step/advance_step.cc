#include "ops/advance_step/advance_step.h"

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "ops/advance_step/advance_step_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::advance_step {

absl::Status Validate(const Params& params) {
  DSV4_RETURN_IF_ERROR(CheckTensor("requests", params.requests, {DType::kI32}, {kAnyExtent}));
  const int64_t rows = params.requests.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("token_ids", params.token_ids, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("positions", params.positions, {DType::kI64}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("next_tokens", params.next_tokens, {DType::kI32}, {rows}));
  DSV4_RETURN_IF_ERROR(CheckTensor("remaining", params.remaining, {DType::kI32}, {kAnyExtent}));
  const int64_t num_requests = params.remaining.extents[0];
  DSV4_RETURN_IF_ERROR(CheckTensor("ignore_eos", params.ignore_eos, {DType::kU8}, {num_requests}));
  if (!params.forced.empty()) {
    DSV4_RETURN_IF_ERROR(CheckTensor("forced", params.forced, {DType::kI32}, {num_requests, kAnyExtent}));
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("outputs", params.outputs, {DType::kI32}, {num_requests, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckTensor("output_counts", params.output_counts, {DType::kI32}, {num_requests}));
  DSV4_RETURN_IF_ERROR(CheckTensor("live_rows", params.live_rows, {DType::kI32}, {1}));

  const struct {
    const char* name;
    const TensorView& view;
  } written[] = {{"requests", params.requests},           {"token_ids", params.token_ids},
                 {"positions", params.positions},         {"next_tokens", params.next_tokens},
                 {"remaining", params.remaining},         {"outputs", params.outputs},
                 {"output_counts", params.output_counts}, {"live_rows", params.live_rows}};
  for (size_t a = 0; a < std::size(written); ++a) {
    DSV4_RETURN_IF_ERROR(CheckNoSelfOverlap(written[a].name, written[a].view));
    for (size_t b = a + 1; b < std::size(written); ++b) {
      DSV4_RETURN_IF_ERROR(CheckDisjoint(written[a].name, written[a].view, written[b].name, written[b].view));
    }
    DSV4_RETURN_IF_ERROR(CheckDisjoint(written[a].name, written[a].view, "ignore_eos", params.ignore_eos));
    if (params.forced.empty()) continue;
    DSV4_RETURN_IF_ERROR(CheckDisjoint(written[a].name, written[a].view, "forced", params.forced));
  }
  return absl::OkStatus();
}

absl::Status Record(Stream& stream, const Params& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "advance_step",
                         .accesses = AccessList()
                                         .ReadWrite("requests", params.requests)
                                         .ReadWrite("token_ids", params.token_ids)
                                         .ReadWrite("positions", params.positions)
                                         .ReadWrite("next_tokens", params.next_tokens)
                                         .ReadWrite("remaining", params.remaining)
                                         .Read("ignore_eos", params.ignore_eos)
                                         .Read("forced", params.forced)
                                         .Write("outputs", params.outputs)
                                         .ReadWrite("output_counts", params.output_counts)
                                         .Write("live_rows", params.live_rows),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::advance_step
