#include "ops/embed/embed.h"
#include "runtime/element_access.h"

namespace dsv4::embed {

void RunCpu(const Params& params) {
  const int64_t rows = params.out.extents[0];
  const int64_t copies = params.out.extents[1];
  const int64_t channels = params.out.extents[2];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = *params.token_ids.At<int32_t>(i);
    if (token < 0) continue;
    for (int64_t c = 0; c < copies; ++c) {
      for (int64_t k = 0; k < channels; ++k) StoreFloat(params.out, LoadFloat(params.table, token, k), i, c, k);
    }
  }
}

}  // namespace dsv4::embed
