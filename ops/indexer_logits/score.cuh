// What the op's kernels share: their parameters, and where a request's keys are.
#ifndef DSV4_OPS_INDEXER_LOGITS_SCORE_CUH_
#define DSV4_OPS_INDEXER_LOGITS_SCORE_CUH_

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/paged_rows.cuh"

namespace dsv4::indexer_logits {

// No weight is read: everything waits.
struct NoWeights {};

// Strides are in stored elements.
struct ScoreParams {
  int64_t rows;
  int32_t heads;
  int32_t channels;
  const void* q_values;
  DType q_dtype;
  int64_t q_row_stride, q_head_stride;
  const uint8_t* q_scales;
  int64_t q_scales_row_stride, q_scales_head_stride;
  const float* weights;
  int64_t weights_row_stride;
  PagedRowsPointer keys;
  int32_t page_shift;  // log2 of the rows of a page, or -1
  const int32_t* block_table;
  int64_t block_table_row_stride;
  int32_t blocks;
  const int32_t* requests;
  const int32_t* counts;
  float* logits;
  int64_t logits_row_stride;

  __device__ __forceinline__ const int32_t* TableOf(int64_t row) const {
    return block_table + requests[row] * block_table_row_stride;
  }
  // Of entry `j` of the request with this table.
  __device__ __forceinline__ RowAddress KeyAddress(const int32_t* table, int32_t j) const {
    const auto rows_per_page = static_cast<int32_t>(keys.rows_per_page);
    const int32_t page = page_shift >= 0 ? j >> page_shift : j / rows_per_page;
    const int32_t row = j - page * rows_per_page;
    const int64_t block = table[page < blocks ? page : page % blocks];
    uint8_t* const base = keys.pages + block * keys.page_stride;
    return {base + int64_t{row} * keys.value_bytes,
            base + keys.rows_per_page * keys.value_bytes + int64_t{row} * keys.scale_bytes};
  }
};

// max(product, 0), but NaN stays.
__device__ __forceinline__ float Rectified(float product) { return product < 0.0f ? 0.0f : product; }

}  // namespace dsv4::indexer_logits

#endif  // DSV4_OPS_INDEXER_LOGITS_SCORE_CUH_
