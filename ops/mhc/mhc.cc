#include "ops/mhc/mhc.h"

#include "ops/declared_accesses/declared_accesses.h"
#include "ops/mhc/mhc_cuda.h"
#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4::mhc {
namespace {

AccessList Accesses(const PreParams& params) {
  return AccessList()
      .Read("streams", params.streams)
      .Weight("fn", params.fn)
      .Weight("scale", params.scale)
      .Weight("base", params.base)
      .Write("out", params.out)
      .Write("post", params.post)
      .Write("comb", params.comb);
}

AccessList Accesses(const PostParams& params) {
  return AccessList()
      .Read("streams", params.streams)
      .Read("y", params.y)
      .Read("post", params.post)
      .Read("comb", params.comb)
      .Write("out", params.out);
}

AccessList Accesses(const HeadParams& params) {
  return AccessList()
      .Read("streams", params.streams)
      .Read("rows", params.rows)
      .Weight("fn", params.fn)
      .Weight("scale", params.scale)
      .Weight("base", params.base)
      .Write("out", params.out);
}

absl::Status CheckStreams(const TensorView& streams) {
  DSV4_RETURN_IF_ERROR(
      CheckTensor("streams", streams, {DType::kF32, DType::kBf16}, {kAnyExtent, kAnyExtent, kAnyExtent}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("streams of a row", streams.extents[1], 1));
  return CheckAtLeast("channels of a stream", streams.extents[2], 1);
}

}  // namespace

absl::Status Validate(const PreParams& params) {
  DSV4_RETURN_IF_ERROR(CheckStreams(params.streams));
  const int64_t rows = params.streams.extents[0];
  const int64_t streams = params.streams.extents[1];
  const int64_t channels = params.streams.extents[2];
  const int64_t mixes = 2 * streams + streams * streams;
  DSV4_RETURN_IF_ERROR(CheckTensor("fn", params.fn, {DType::kF32}, {mixes, streams * channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("scale", params.scale, {DType::kF32}, {3}));
  DSV4_RETURN_IF_ERROR(CheckTensor("base", params.base, {DType::kF32}, {mixes}));
  DSV4_RETURN_IF_ERROR(CheckAtLeast("sinkhorn_iters", params.sinkhorn_iters, 1));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("post", params.post, {DType::kF32}, {rows, streams}));
  DSV4_RETURN_IF_ERROR(CheckTensor("comb", params.comb, {DType::kF32}, {rows, streams, streams}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Validate(const PostParams& params) {
  DSV4_RETURN_IF_ERROR(CheckStreams(params.streams));
  const int64_t rows = params.streams.extents[0];
  const int64_t streams = params.streams.extents[1];
  const int64_t channels = params.streams.extents[2];
  DSV4_RETURN_IF_ERROR(CheckTensor("y", params.y, {DType::kF32, DType::kBf16}, {rows, channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("post", params.post, {DType::kF32}, {rows, streams}));
  DSV4_RETURN_IF_ERROR(CheckTensor("comb", params.comb, {DType::kF32}, {rows, streams, streams}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {rows, streams, channels}));
  if (IsSameView(params.streams, params.out)) {
    PostParams in_place = params;
    in_place.streams = TensorView();
    return CheckWritesDisjoint(Accesses(in_place));
  }
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Validate(const HeadParams& params) {
  DSV4_RETURN_IF_ERROR(CheckStreams(params.streams));
  const int64_t streams = params.streams.extents[1];
  const int64_t channels = params.streams.extents[2];
  int64_t out_rows = params.streams.extents[0];
  if (!params.rows.empty()) {
    DSV4_RETURN_IF_ERROR(CheckTensor("rows", params.rows, {DType::kI32}, {kAnyExtent}));
    out_rows = params.rows.extents[0];
  }
  DSV4_RETURN_IF_ERROR(CheckTensor("fn", params.fn, {DType::kF32}, {streams, streams * channels}));
  DSV4_RETURN_IF_ERROR(CheckTensor("scale", params.scale, {DType::kF32}, {1}));
  DSV4_RETURN_IF_ERROR(CheckTensor("base", params.base, {DType::kF32}, {streams}));
  DSV4_RETURN_IF_ERROR(CheckTensor("out", params.out, {DType::kF32, DType::kBf16}, {out_rows, channels}));
  return CheckWritesDisjoint(Accesses(params));
}

absl::Status Record(Stream& stream, const PreParams& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "mhc_pre",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

absl::Status Record(Stream& stream, const PostParams& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "mhc_post",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

absl::Status Record(Stream& stream, const HeadParams& params) {
  DSV4_RETURN_IF_ERROR(Validate(params));
  return stream.Enqueue({.op = "mhc_head",
                         .accesses = Accesses(params),
                         .run = [params] { RunCpu(params); },
                         .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, params); })});
}

}  // namespace dsv4::mhc
