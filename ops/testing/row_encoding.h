// The bytes that a cache row's format makes of a row of values, computed apart from the runtime's codec. Test only.
#ifndef DSV4_OPS_TESTING_ROW_ENCODING_H_
#define DSV4_OPS_TESTING_ROW_ENCODING_H_

#include <cstdint>
#include <vector>

#include "runtime/paged_rows.h"

namespace dsv4 {

struct EncodedRow {
  std::vector<uint8_t> values;  // at row * values.size() of a page
  std::vector<uint8_t> scales;  // behind the values of all rows; for kFp8 padded with 0 to a multiple of 8
};

// From specification sections 5.6, 5.7 and 12: each value rounded to bf16, then quantised with its group's scale. Not
// for kF32.
EncodedRow EncodeByDefinition(RowFormat format, const std::vector<float>& row, int64_t rope_size);

}  // namespace dsv4

#endif  // DSV4_OPS_TESTING_ROW_ENCODING_H_
