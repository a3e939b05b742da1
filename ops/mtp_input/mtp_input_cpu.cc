#include <cstdint>

#include "ops/mtp_input/mtp_input.h"
#include "runtime/element_access.h"

namespace dsv4::mtp_input {

void RunCpu(const Params& params) {
  for (int64_t i = 0; i < params.out.extents[0]; ++i) {
    for (int64_t a = 0; a < params.out.extents[1]; ++a) {
      for (int64_t c = 0; c < params.out.extents[2]; ++c) {
        StoreFloat(params.out, LoadFloat(params.e, i, c) + LoadFloat(params.h, i, a, c), i, a, c);
      }
    }
  }
}

}  // namespace dsv4::mtp_input
