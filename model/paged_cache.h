// Places the pages of a cache group for one layer.
#ifndef DSV4_MODEL_PAGED_CACHE_H_
#define DSV4_MODEL_PAGED_CACHE_H_

#include <cstdint>

#include "model/cache_plan.h"
#include "runtime/arena.h"
#include "runtime/paged_rows.h"

namespace dsv4 {

inline PagedRows AddPagedRows(Arena& arena, RowFormat format, const CacheGroupPlan& plan, int64_t row_size,
                              int64_t rope_size) {
  const int64_t page_bytes = PageStrideBytes(format, plan.rows_per_block, row_size, rope_size);
  return {.pages = arena.Add(DType::kU8, {plan.num_blocks, page_bytes}),
          .format = format,
          .rows_per_page = plan.rows_per_block,
          .row_size = row_size,
          .rope_size = rope_size};
}

}  // namespace dsv4

#endif  // DSV4_MODEL_PAGED_CACHE_H_
