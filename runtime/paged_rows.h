// A paged cache of rows: sliding-window rows, compressed entries or indexer keys. A slot is
// page * rows_per_page + row. The byte layouts are those of the specification, sections 5.6 and 5.7, so that
// pages can be exchanged with other engines.
//
//   PagedRows cache = {.pages = view, .format = RowFormat::kFp8, .rows_per_page = 64, .row_size = 512, .rope_size = 64};
//   EncodeRow(cache, slot, row);     // CPU: quantise and store one row
//   DecodeRow(cache, slot, row);     // CPU: read it back as fp32
#ifndef DSV4_RUNTIME_PAGED_ROWS_H_
#define DSV4_RUNTIME_PAGED_ROWS_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "runtime/tensor_view.h"

namespace dsv4 {

enum class RowFormat : uint8_t {
  kF32,       // row_size floats a row
  kBf16,      // row_size bf16 a row
  kFp8,       // "fp8_ds_mla": row_size - rope_size e4m3 with one E8M0 scale per 64, rope_size bf16; 584 bytes at 512
  kFp8Key,    // indexer key: row_size e4m3 and one fp32 power-of-two scale; 132 bytes at 128
  kMxfp4Key,  // indexer key: row_size e2m1 with one E8M0 scale per 32; 68 bytes at 128
};

std::string_view RowFormatName(RowFormat format);

struct PagedRows {
  TensorView pages;  // u8 [num_pages, page_bytes], the page stride is free
  RowFormat format = RowFormat::kF32;
  int64_t rows_per_page = 0;
  int64_t row_size = 0;   // channels
  int64_t rope_size = 0;  // the last rope_size channels are rotated; only kFp8 stores them differently

  int64_t num_slots() const { return pages.extents[0] * rows_per_page; }
};

// Bytes of one row's values and of its scales, which lie apart: a page holds the values of all its rows, then the scales
// of all its rows.
int64_t RowValueBytes(RowFormat format, int64_t row_size, int64_t rope_size);
int64_t RowScaleBytes(RowFormat format, int64_t row_size, int64_t rope_size);
// Bytes of one row, its scales included; of a page of rows; and of a page as this project allocates it
// (rounded up to a multiple of 576 for the three quantised formats).
int64_t RowBytes(RowFormat format, int64_t row_size, int64_t rope_size);
int64_t PagePayloadBytes(RowFormat format, int64_t rows_per_page, int64_t row_size, int64_t rope_size);
int64_t PageStrideBytes(RowFormat format, int64_t rows_per_page, int64_t row_size, int64_t rope_size);

// InvalidArgument, naming the cache, if the sizes do not suit the format (kFp8: row_size - rope_size a positive
// multiple of 64, rope_size even; kFp8Key: row_size a multiple of 4; kMxfp4Key: of 32), a page is too small, pages
// overlap, or alignment is off (a page must start on a multiple of 4 bytes in every format).
absl::Status CheckPagedRows(std::string_view name, const PagedRows& cache);

// CPU codecs of one row of row_size floats. The slot must be in range. Values are rounded to bf16 first in every
// format but kF32 (specification, section 11, item 7). The pad byte after the scales of kFp8 is written as 0.
void EncodeRow(const PagedRows& cache, int64_t slot, const float* row);
void DecodeRow(const PagedRows& cache, int64_t slot, float* row);

}  // namespace dsv4

#endif  // DSV4_RUNTIME_PAGED_ROWS_H_
