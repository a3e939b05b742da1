// The save kernels without their wait, for tests that must find it missing.
#ifndef DSV4_TESTS_SAVE_WITHOUT_WAIT_H_
#define DSV4_TESTS_SAVE_WITHOUT_WAIT_H_

#include "absl/status/status.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/stream.h"

namespace dsv4 {

// `params` must dispatch to kSpecialisedKeys[0] or [1]; InvalidArgument otherwise.
absl::Status RecordSaveWithoutWait(Stream& stream, const save_partial_states::Params& params);

}  // namespace dsv4

#endif  // DSV4_TESTS_SAVE_WITHOUT_WAIT_H_
