#include <vector>

#include "ops/output_projection/output_projection.h"
#include "ops/rope/rope_cpu.h"
#include "runtime/element_access.h"

namespace dsv4::output_projection {

void RunRotationCpu(const Params& params) {
  const int64_t rows = params.o.extents[0];
  const int64_t heads = params.o.extents[1];
  const int64_t channels = params.o.extents[2];
  const int64_t rotary = params.cos_sin.extent(1);
  std::vector<float> head(channels);
  for (int64_t i = 0; i < rows; ++i) {
    const float* cos_sin = params.cos_sin.Row<float>(*params.positions.At<int64_t>(i));
    for (int64_t h = 0; h < heads; ++h) {
      LoadRow(params.o, head.data(), i, h);
      RotateInverseCpu(head.data() + channels - rotary, rotary, cos_sin);
      StoreRow(params.rotated, head.data(), i, h);
    }
  }
}

}  // namespace dsv4::output_projection
