// Checks an op's declared accesses against each other: what it writes must not overlap anything else that it touches.
#ifndef DSV4_OPS_DECLARED_ACCESSES_H_
#define DSV4_OPS_DECLARED_ACCESSES_H_

#include "absl/status/status.h"
#include "runtime/stream.h"
#include "runtime/tensor_view.h"

namespace dsv4 {

// InvalidArgument, naming the tensors, if a written view maps two indices to one element or shares a byte with another
// declared view. A tensor that is read and written under one name (AccessList::ReadWrite) does not conflict with
// itself.
absl::Status CheckWritesDisjoint(const AccessList& accesses);

// Whether the two are the same elements in the same order: an op that works in place.
bool IsSameView(const TensorView& a, const TensorView& b);

}  // namespace dsv4

#endif  // DSV4_OPS_DECLARED_ACCESSES_H_
