// What the op's kernels share: their parameters, a row's list, and how a row's result is written.
#ifndef DSV4_OPS_SPARSE_ATTENTION_ATTEND_CUH_
#define DSV4_OPS_SPARSE_ATTENTION_ATTEND_CUH_

#include <cmath>
#include <cstdint>

#include "ops/sparse_attention/split_plan.h"
#include "runtime/paged_rows.cuh"
#include "runtime/weight_pointer.cuh"

namespace dsv4::sparse_attention {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

struct SlotList {
  const int32_t* slots = nullptr;
  int64_t row_stride = 0;
  int32_t width = 0;
  const int32_t* lengths = nullptr;  // null: the whole width

  __device__ __forceinline__ int32_t Length(int64_t row) const {
    return lengths == nullptr ? width : max(min(lengths[row], width), 0);
  }
};

struct SinkWeights {
  WeightPointer<float> sink;
};

// Strides are in elements.
struct AttendParams {
  const void* q;
  int64_t q_row_stride, q_head_stride;
  bool q_is_bf16;
  int32_t heads;
  int32_t channels;
  PagedRowsPointer window;
  SlotList window_list;
  PagedRowsPointer entries;
  SlotList entry_list;
  float scale;  // of q . k, to a logarithm to base 2
  void* out;
  int64_t out_row_stride, out_head_stride;
  bool out_is_bf16;
  float* lse;
  int64_t lse_row_stride;
  int32_t splits;  // of a row, at most
  float* split_out;
  int64_t split_out_row_stride, split_out_split_stride, split_out_head_stride;
  float* split_sums;
  int64_t split_sums_row_stride, split_sums_split_stride, split_sums_head_stride;
};

// The list of a row: its window rows, then its entries.
struct RowList {
  int32_t window_length;
  int32_t listed;
  int32_t split_length;

  __device__ __forceinline__ int32_t splits() const { return (listed + split_length - 1) / split_length; }
};

__device__ __forceinline__ RowList ListOf(const AttendParams& params, int64_t row) {
  const int32_t window_length = params.window_list.Length(row);
  const int32_t listed = window_length + params.entry_list.Length(row);
  return {window_length, listed, SplitLength(listed, params.splits)};
}

// The slot of a row's listed row `t` < listed; negative: invalid.
__device__ __forceinline__ int32_t SlotAt(const AttendParams& params, const RowList& list, int64_t row, int32_t t) {
  return t < list.window_length
             ? params.window_list.slots[row * params.window_list.row_stride + t]
             : params.entry_list.slots[row * params.entry_list.row_stride + (t - list.window_length)];
}

// Where the row of a valid slot at `t` lies.
__device__ __forceinline__ RowAddress AddressAt(const AttendParams& params, const RowList& list, int32_t t, int32_t slot) {
  return LocateRow(t < list.window_length ? params.window : params.entries, slot);
}

// 2^exponent of an integer <= 0; 0 where that is below all normal numbers.
__device__ __forceinline__ float PowerOfTwoOrZero(float exponent) {
  return exponent < -126.0f ? 0.0f : PowerOfTwo(static_cast<int>(exponent));
}

// The softmax of one head so far: weights are 2^(score - maximum), `maximum` an integer or, with nothing seen, -infinity.
struct RunningSoftmax {
  float maximum = -INFINITY;
  float sum = 0.0f;

  // 2^(score - maximum) needs a number.
  __device__ __forceinline__ float finite_maximum() const { return maximum == -INFINITY ? 0.0f : maximum; }

  // Lets scores of up to `largest` in. Returns the factor, exact, for what was weighted so far.
  __device__ __forceinline__ float Raise(float largest) {
    const float raised = fmaxf(maximum, ceilf(largest));
    const float factor = raised == maximum ? 1.0f : PowerOfTwoOrZero(maximum - raised);
    maximum = raised;
    sum *= factor;
    return factor;
  }

  // Of the whole list: what to multiply the sum of weighted values by, and the logarithm of the sum of weights.
  __device__ __forceinline__ float Normaliser(float sink) const {
    return maximum == -INFINITY ? 0.0f : 1.0f / (sum + exp2f(sink * kLog2E - maximum));
  }
  __device__ __forceinline__ float LogSumExp() const {
    return sum == 0.0f ? INFINITY : (maximum + log2f(sum)) * kLn2;
  }
};

}  // namespace dsv4::sparse_attention

#endif  // DSV4_OPS_SPARSE_ATTENTION_ATTEND_CUH_
