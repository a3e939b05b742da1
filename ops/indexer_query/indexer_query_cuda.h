// The CUDA half of the op, which Record calls.
#ifndef DSV4_OPS_INDEXER_QUERY_INDEXER_QUERY_CUDA_H_
#define DSV4_OPS_INDEXER_QUERY_INDEXER_QUERY_CUDA_H_

#include "absl/status/status.h"
#include "ops/indexer_query/indexer_query.h"
#include "runtime/stream.h"

namespace dsv4::indexer_query {

// `params` must have passed Validate. Heads of 128 channels that allow wide accesses have a kernel of their own.
absl::Status RecordCuda(Stream& stream, const Params& params);

}  // namespace dsv4::indexer_query

#endif  // DSV4_OPS_INDEXER_QUERY_INDEXER_QUERY_CUDA_H_
