#include "ops/step_metadata/step_metadata_cuda.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "runtime/division.cuh"
#include "runtime/launch.cuh"
#include "runtime/status.h"

namespace dsv4::step_metadata {
namespace {

constexpr int kMostGroups = 8;
constexpr int kMostVisible = 8;

struct KernelTable {
  const int32_t* blocks = nullptr;  // [requests, count]
  int64_t stride = 0;
  int64_t count = 0;
  int64_t rows_per_block = 0;
};

struct KernelGroup {
  KernelTable table;
  int64_t ratio;
  int64_t* slots;
};

struct KernelVisible {
  KernelTable table;
  int64_t ratio, limit;
  int32_t* counts;
  int32_t* slots;  // null: counts only
  int64_t slots_stride, width;
};

// A block a row and part of the lists' columns.
struct FillMetadata {
  static constexpr char kName[] = "step_metadata";
  static constexpr int kThreads = 256;
  static constexpr int kColumns = 4 * kThreads;  // of a list, a block
  static constexpr int kFirstVisibleThread = 32;
  static_assert(kMostGroups <= kFirstVisibleThread && kFirstVisibleThread + kMostVisible <= kThreads);

  struct Weights {};
  struct Params {
    const int32_t* token_ids;
    const int32_t* requests;
    const int64_t* positions;
    int32_t* row_tokens;  // null: another launch writes the rows
    int32_t* row_requests;
    int64_t* row_positions;
    int num_groups, num_visible;
    KernelGroup groups[kMostGroups];
    KernelVisible visible[kMostVisible];
  };

  static __device__ __forceinline__ void Prefetch(const Weights&) {}

  static __device__ __forceinline__ int64_t EntrySlot(const KernelTable& table, int32_t request, int64_t entry) {
    const auto [block, row] = Divide(entry, table.rows_per_block);
    return int64_t{table.blocks[request * table.stride + Divide(block, table.count).remainder]} * table.rows_per_block +
           row;
  }

  static __device__ __forceinline__ void Run(const Weights&, const Params& params) {
    const int64_t row = blockIdx.x;
    const int32_t request = params.requests[row];
    const bool live = request >= 0;
    const int64_t position = live ? params.positions[row] : 0;
    const int thread = static_cast<int>(threadIdx.x);

    if (blockIdx.y == 0) {
      if (thread == 0 && params.row_tokens != nullptr) {
        params.row_tokens[row] = live ? params.token_ids[row] : 0;
        params.row_requests[row] = live ? request : 0;
        params.row_positions[row] = position;
      }
      if (thread < params.num_groups) {
        const KernelGroup& group = params.groups[thread];
        int64_t slot = -1;
        if (live && Divide(position + 1, group.ratio).remainder == 0) {
          slot = EntrySlot(group.table, request, Divide(position, group.ratio).quotient);
        }
        group.slots[row] = slot;
      }
      const int v = thread - kFirstVisibleThread;
      if (v >= 0 && v < params.num_visible) {
        params.visible[v].counts[row] = static_cast<int32_t>(Visible(params.visible[v], live, position).count);
      }
    }

    for (int v = 0; v < params.num_visible; ++v) {
      const KernelVisible& visible = params.visible[v];
      if (visible.slots == nullptr) continue;
      const auto [first, count] = Visible(visible, live, position);
      int32_t* const slots = visible.slots + row * visible.slots_stride;
      const int64_t begin = int64_t{blockIdx.y} * kColumns, end = min(begin + kColumns, visible.width);
      for (int64_t k = begin + thread; k < end; k += kThreads) {
        slots[k] = k < count ? static_cast<int32_t>(EntrySlot(visible.table, request, first + k)) : -1;
      }
    }
  }

 private:
  struct Range {
    int64_t first;
    int64_t count;
  };
  static __device__ __forceinline__ Range Visible(const KernelVisible& visible, bool live, int64_t position) {
    const int64_t existing = live ? Divide(position + 1, visible.ratio).quotient : 0;
    const int64_t count = visible.limit > 0 ? min(existing, visible.limit) : existing;
    return {existing - count, count};
  }
};

KernelTable MakeTable(const TensorView& block_table, int64_t rows_per_block) {
  return {block_table.As<int32_t>(), block_table.strides[0], block_table.extents[1], rows_per_block};
}

}  // namespace

absl::Status RecordCuda(Stream& stream, const Params& params) {
  size_t group = 0, visible = 0;
  bool rows_written = false;
  while (!rows_written || group < params.groups.size() || visible < params.visible.size()) {
    FillMetadata::Params kernel_params = {};
    kernel_params.token_ids = params.token_ids.As<int32_t>();
    kernel_params.requests = params.requests.As<int32_t>();
    kernel_params.positions = params.positions.As<int64_t>();
    if (!rows_written) {
      kernel_params.row_tokens = params.row_tokens.As<int32_t>();
      kernel_params.row_requests = params.row_requests.As<int32_t>();
      kernel_params.row_positions = params.row_positions.As<int64_t>();
      rows_written = true;
    }
    for (; group < params.groups.size() && kernel_params.num_groups < kMostGroups; ++group) {
      const CacheGroup& from = params.groups[group];
      kernel_params.groups[kernel_params.num_groups++] = {MakeTable(from.block_table, from.rows_per_block), from.ratio,
                                                          from.slots.As<int64_t>()};
    }
    int64_t widest = 0;
    for (; visible < params.visible.size() && kernel_params.num_visible < kMostVisible; ++visible) {
      const VisibleRows& from = params.visible[visible];
      KernelVisible& to = kernel_params.visible[kernel_params.num_visible++];
      to.ratio = from.ratio;
      to.limit = from.limit;
      to.counts = from.counts.As<int32_t>();
      if (from.slots.empty()) continue;
      to.table = MakeTable(from.block_table, from.rows_per_block);
      to.slots = from.slots.As<int32_t>();
      to.slots_stride = from.slots.strides[0];
      to.width = from.slots.extents[1];
      widest = std::max(widest, to.width);
    }
    const int64_t column_blocks =
        std::max<int64_t>(1, (widest + FillMetadata::kColumns - 1) / FillMetadata::kColumns);
    DSV4_RETURN_IF_ERROR(
        Launch<FillMetadata>(stream, {.x = params.requests.extents[0], .y = column_blocks}, {}, kernel_params));
  }
  return absl::OkStatus();
}

}  // namespace dsv4::step_metadata
