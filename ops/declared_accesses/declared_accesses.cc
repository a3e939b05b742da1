#include "ops/declared_accesses/declared_accesses.h"

#include "runtime/status.h"
#include "runtime/tensor_check.h"

namespace dsv4 {

absl::Status CheckWritesDisjoint(const AccessList& accesses) {
  for (const Access& write : accesses.accesses()) {
    if (write.kind != AccessKind::kWrite) continue;
    DSV4_RETURN_IF_ERROR(CheckNoSelfOverlap(write.name, write.view));
    for (const Access& other : accesses.accesses()) {
      if (other.name == write.name) continue;
      DSV4_RETURN_IF_ERROR(CheckDisjoint(write.name, write.view, other.name, other.view));
    }
  }
  return absl::OkStatus();
}

bool IsSameView(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.extents[i] != b.extents[i]) return false;
    if (a.extents[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

}  // namespace dsv4
