#include "runtime/paged_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/dtype.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr uint8_t kPoison = 0xEE;

// A cache of poisoned pages between guard bytes.
struct TestCache {
  TestCache(RowFormat format, int64_t pages, int64_t page_bytes, int64_t rows_per_page, int64_t row_size,
            int64_t rope_size)
      : memory(DType::kU8, {pages, page_bytes}),
        rows{.pages = memory.view(),
             .format = format,
             .rows_per_page = rows_per_page,
             .row_size = row_size,
             .rope_size = rope_size} {
    memory.Poison(kPoison);
  }
  uint8_t* bytes() const { return memory.data<uint8_t>(); }

  TestTensor memory;
  PagedRows rows;
};

float BFloat16At(const uint8_t* bytes) {
  return std::bit_cast<float>((static_cast<uint32_t>(bytes[0]) << 16) | (static_cast<uint32_t>(bytes[1]) << 24));
}

// Offsets of the bytes that are no longer poison, as ranges "[begin, end)".
std::string WrittenRanges(const TestCache& cache) {
  std::string text;
  const int64_t size = cache.memory.view().num_bytes();
  for (int64_t i = 0; i < size; ++i) {
    if (cache.bytes()[i] == kPoison) continue;
    int64_t end = i;
    while (end < size && cache.bytes()[end] != kPoison) ++end;
    text += "[" + std::to_string(i) + ", " + std::to_string(end) + ")";
    i = end;
  }
  return text;
}

TEST(PagedRows, SizesAreThoseOfTheSpecification) {
  EXPECT_EQ(RowBytes(RowFormat::kFp8, 512, 64), 584);
  EXPECT_EQ(PagePayloadBytes(RowFormat::kFp8, 64, 512, 64), 37376);
  EXPECT_EQ(PageStrideBytes(RowFormat::kFp8, 64, 512, 64), 37440);
  EXPECT_EQ(PagePayloadBytes(RowFormat::kFp8, 2, 512, 64), 1168);
  EXPECT_EQ(PageStrideBytes(RowFormat::kFp8, 2, 512, 64), 1728);
  EXPECT_EQ(RowBytes(RowFormat::kFp8Key, 128, 64), 132);
  EXPECT_EQ(PagePayloadBytes(RowFormat::kFp8Key, 64, 128, 64), 8448);
  EXPECT_EQ(PageStrideBytes(RowFormat::kFp8Key, 64, 128, 64), 8640);
  EXPECT_EQ(RowBytes(RowFormat::kMxfp4Key, 128, 64), 68);
  EXPECT_EQ(PagePayloadBytes(RowFormat::kMxfp4Key, 64, 128, 64), 4352);
  EXPECT_EQ(PageStrideBytes(RowFormat::kMxfp4Key, 64, 128, 64), 4608);
  // 64 e4m3, 128 bytes of bf16, 1 scale padded to 8.
  EXPECT_EQ(RowBytes(RowFormat::kFp8, 128, 64), 200);
  // 9 scales padded to 16.
  EXPECT_EQ(RowBytes(RowFormat::kFp8, 640, 64), 576 + 128 + 16);
  EXPECT_EQ(RowBytes(RowFormat::kF32, 2048, 0), 8192);
  EXPECT_EQ(PageStrideBytes(RowFormat::kF32, 4, 2048, 0), 32768);
  EXPECT_EQ(RowBytes(RowFormat::kBf16, 512, 64), 1024);
  EXPECT_EQ(PageStrideBytes(RowFormat::kBf16, 64, 512, 64), 65536);
}

TEST(PagedRows, Fp8RowsAreWhereTheSpecificationPutsThem) {
  // Page 1 of 3; rows 0 and 63 of 64; the pages are longer than their rows.
  TestCache cache(RowFormat::kFp8, 3, 37440, 64, 512, 64);
  DSV4_ASSERT_OK(CheckPagedRows("window", cache.rows));
  EXPECT_EQ(cache.rows.num_slots(), 192);
  std::vector<float> row(512);
  for (int i = 0; i < 448; ++i) row[static_cast<size_t>(i)] = static_cast<float>(1 << (i / 64));  // scale 2^(g - 8)
  for (int i = 448; i < 512; ++i) row[static_cast<size_t>(i)] = static_cast<float>(i - 447);
  EncodeRow(cache.rows, 64, row.data());
  EncodeRow(cache.rows, 127, row.data());

  // Values of row t at 37440 + 576 t, its scales at 37440 + 576 * 64 + 8 t; row 63's values end where the scales begin.
  EXPECT_EQ(WrittenRanges(cache), "[37440, 38016)[73728, 74312)[74808, 74816)");
  for (int64_t values : {37440, 73728}) {
    for (int64_t i = 0; i < 448; ++i) ASSERT_EQ(cache.bytes()[values + i], 0x78) << i;  // 256
    for (int64_t i = 0; i < 64; ++i) {
      ASSERT_EQ(BFloat16At(cache.bytes() + values + 448 + 2 * i), static_cast<float>(1 + i)) << i;
    }
  }
  for (int64_t scales : {74304, 74808}) {
    for (int64_t g = 0; g < 7; ++g) EXPECT_EQ(cache.bytes()[scales + g], 119 + g);
    EXPECT_EQ(cache.bytes()[scales + 7], 0);
  }
  cache.memory.CheckGuards();
}

TEST(PagedRows, GeneralFp8RowsAreWhereTheSpecificationPutsThem) {
  // 128 channels, 64 of them rotated, 4 rows a page: 192 bytes of values, then 8 of scales.
  TestCache cache(RowFormat::kFp8, 2, 1152, 4, 128, 64);
  DSV4_ASSERT_OK(CheckPagedRows("window", cache.rows));
  std::vector<float> row(128, 448.0f);
  EncodeRow(cache.rows, 4 + 2, row.data());
  EXPECT_EQ(WrittenRanges(cache), "[1536, 1728)[1936, 1944)");  // 1152 + 192 * 2; 1152 + 192 * 4 + 8 * 2
  for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(cache.bytes()[1536 + i], 0x7E);
  EXPECT_EQ(BFloat16At(cache.bytes() + 1600), 448.0f);
  EXPECT_EQ(BFloat16At(cache.bytes() + 1726), 448.0f);
  EXPECT_EQ(cache.bytes()[1936], 127);
  for (int64_t i = 1; i < 8; ++i) EXPECT_EQ(cache.bytes()[1936 + i], 0) << i;
}

TEST(PagedRows, NineScalesArePaddedToSixteenBytes) {
  TestCache cache(RowFormat::kFp8, 1, 1728, 2, 640, 64);
  DSV4_ASSERT_OK(CheckPagedRows("window", cache.rows));
  EncodeRow(cache.rows, 1, std::vector<float>(640, 1.0f).data());
  EXPECT_EQ(WrittenRanges(cache), "[704, 1408)[1424, 1440)");
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(cache.bytes()[1424 + i], i < 9 ? 119 : 0) << i;
}

TEST(PagedRows, Fp8KeysAreWhereTheSpecificationPutsThem) {
  TestCache cache(RowFormat::kFp8Key, 2, 8640, 64, 128, 64);
  DSV4_ASSERT_OK(CheckPagedRows("keys", cache.rows));
  std::vector<float> row(128, 1.0f);
  row[127] = -1.0f;
  EncodeRow(cache.rows, 64 + 3, row.data());
  EXPECT_EQ(WrittenRanges(cache), "[9024, 9152)[16844, 16848)");  // 8640 + 128 * 3; 8640 + 128 * 64 + 4 * 3
  for (int64_t i = 0; i < 127; ++i) ASSERT_EQ(cache.bytes()[9024 + i], 0x78);
  EXPECT_EQ(cache.bytes()[9151], 0xF8);
  float scale = 0;
  std::memcpy(&scale, cache.bytes() + 16844, 4);
  EXPECT_EQ(scale, 0x1p-8f);
}

TEST(PagedRows, Mxfp4KeysAreWhereTheSpecificationPutsThem) {
  TestCache cache(RowFormat::kMxfp4Key, 2, 4608, 64, 128, 64);
  DSV4_ASSERT_OK(CheckPagedRows("keys", cache.rows));
  std::vector<float> row(128);
  for (size_t i = 0; i < 128; ++i) {
    row[i] = std::ldexp(i % 2 == 0 ? 1.0f : -6.0f, static_cast<int>(i / 32));  // codes 2 and 15, scale 2^group
  }
  EncodeRow(cache.rows, 64 + 5, row.data());
  EXPECT_EQ(WrittenRanges(cache), "[4928, 4992)[8724, 8728)");  // 4608 + 64 * 5; 4608 + 64 * 64 + 4 * 5
  for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(cache.bytes()[4928 + i], 0xF2) << i;  // even channel in the low nibble
  for (int64_t g = 0; g < 4; ++g) EXPECT_EQ(cache.bytes()[8724 + g], 127 + g);
}

TEST(PagedRows, UnquantisedRowsFollowEachOther) {
  TestCache f32(RowFormat::kF32, 2, 256, 4, 16, 0);
  DSV4_ASSERT_OK(CheckPagedRows("state", f32.rows));
  const std::vector<float> row(16, 0.1f);
  EncodeRow(f32.rows, 4 + 1, row.data());
  EXPECT_EQ(WrittenRanges(f32), "[320, 384)");
  EXPECT_EQ(std::memcmp(f32.bytes() + 320, row.data(), 64), 0);

  TestCache bf16(RowFormat::kBf16, 2, 128, 4, 16, 0);
  DSV4_ASSERT_OK(CheckPagedRows("state", bf16.rows));
  EncodeRow(bf16.rows, 4 + 3, row.data());
  EXPECT_EQ(WrittenRanges(bf16), "[224, 256)");
  EXPECT_EQ(BFloat16At(bf16.bytes() + 254), RoundToBf16(0.1f));
}

TEST(PagedRows, PageStrideIsFree) {
  // Pages of 1168 bytes that are 2000 apart: a strided view of a larger buffer.
  TestTensor memory(DType::kU8, {3, 2000});
  memory.Poison(kPoison);
  const PagedRows rows = {.pages = memory.view().Columns(400, 1168),
                          .format = RowFormat::kFp8,
                          .rows_per_page = 2,
                          .row_size = 512,
                          .rope_size = 64};
  DSV4_ASSERT_OK(CheckPagedRows("entries", rows));
  EncodeRow(rows, 5, std::vector<float>(512, 448.0f).data());
  const uint8_t* page = memory.data<uint8_t>() + 2 * 2000 + 400;
  EXPECT_EQ(page[576], 0x7E);
  EXPECT_EQ(page[576 + 447], 0x7E);
  EXPECT_EQ(page[1152 + 8], 127);
  EXPECT_EQ(page[575], kPoison);
  EXPECT_EQ(page[1168], kPoison);
}

// Each value must be within half a step of its group; and encoding what was decoded must keep every value (the bytes may
// change: a largest magnitude that was rounded down to half its range gets half the scale).
class PagedRowsRoundTrip : public testing::TestWithParam<RowFormat> {};

TEST_P(PagedRowsRoundTrip, IsWithinHalfAStepAndIdempotent) {
  const RowFormat format = GetParam();
  constexpr int64_t kRowSize = 512;
  TestCache cache(format, 3, PageStrideBytes(format, 5, kRowSize, 64), 5, kRowSize, 64);
  DSV4_ASSERT_OK(CheckPagedRows("cache", cache.rows));
  const std::vector<float> values = RandomFloats(cache.rows.num_slots() * kRowSize, 7, 3.0f);
  for (int64_t slot = 0; slot < cache.rows.num_slots(); ++slot) {
    EncodeRow(cache.rows, slot, values.data() + slot * kRowSize);
  }
  for (int64_t slot = 0; slot < cache.rows.num_slots(); ++slot) {
    std::vector<float> row(kRowSize);
    DecodeRow(cache.rows, slot, row.data());
    const float* original = values.data() + slot * kRowSize;
    const int64_t group = format == RowFormat::kMxfp4Key ? 32 : format == RowFormat::kFp8 ? 64 : kRowSize;
    for (int64_t i = 0; i < kRowSize; ++i) {
      const size_t at = static_cast<size_t>(i);
      const bool is_rotated_bf16 = format == RowFormat::kFp8 && i >= kRowSize - 64;
      if (format == RowFormat::kF32) {
        ASSERT_EQ(row[at], original[i]);
      } else if (format == RowFormat::kBf16 || is_rotated_bf16) {
        ASSERT_EQ(row[at], RoundToBf16(original[i]));
      } else {
        float largest = 0;
        for (int64_t k = i / group * group; k < i / group * group + group; ++k) {
          largest = std::max(largest, std::fabs(original[k]));
        }
        // Half a step: 2^-4 of an e4m3 value, 2^-10 of the scale for its subnormals, which is at most 2^-17 of the
        // largest; 1 of the scale for e2m1, with the largest above 3. The bf16 step adds a little.
        const double tolerance = format == RowFormat::kMxfp4Key
                                     ? static_cast<double>(largest) / 3
                                     : std::max(std::fabs(static_cast<double>(original[i])) * 0x1p-4 * 1.01,
                                                static_cast<double>(largest) * 0x1p-17);
        ASSERT_NEAR(static_cast<double>(row[at]), static_cast<double>(original[i]), tolerance) << slot << " " << i;
      }
    }
    EncodeRow(cache.rows, slot, row.data());
    std::vector<float> again(kRowSize);
    DecodeRow(cache.rows, slot, again.data());
    ASSERT_EQ(again, row);
  }
  cache.memory.CheckGuards();
}

INSTANTIATE_TEST_SUITE_P(Formats, PagedRowsRoundTrip,
                         testing::Values(RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8, RowFormat::kFp8Key,
                                         RowFormat::kMxfp4Key),
                         [](const testing::TestParamInfo<RowFormat>& info) {
                           return std::string(RowFormatName(info.param));
                         });

TEST(PagedRows, ValuesAreRoundedToBf16First) {
  // With 448 beside it the scale is 1. Between the e4m3 values 16 and 18, 17.0001 rounds up at once, but bf16 makes it
  // 17, a tie that goes to 16.
  TestCache cache(RowFormat::kFp8, 1, 1728, 2, 512, 64);
  std::vector<float> row(512, 448.0f);
  row[1] = 17.0001f;
  EncodeRow(cache.rows, 0, row.data());
  DecodeRow(cache.rows, 0, row.data());
  EXPECT_EQ(row[1], 16.0f);
  TestCache keys(RowFormat::kFp8Key, 1, 576, 1, 128, 64);
  std::vector<float> key(128, 448.0f);
  key[1] = 17.0001f;
  EncodeRow(keys.rows, 0, key.data());
  DecodeRow(keys.rows, 0, key.data());
  EXPECT_EQ(key[1], 16.0f);
  TestCache mxfp4(RowFormat::kMxfp4Key, 1, 576, 1, 128, 64);
  std::vector<float> small(128, 6.0f);
  small[1] = 2.50001f;  // the midpoint of 2 and 3
  EncodeRow(mxfp4.rows, 0, small.data());
  DecodeRow(mxfp4.rows, 0, small.data());
  EXPECT_EQ(small[1], 2.0f);
}

TEST(PagedRows, ScaleOfTheLargestMagnitudeIsTakenAfterRounding) {
  // Rounded to bf16, 448.5 is 448: scale 1. Not rounded, it would ask for 2.
  TestCache cache(RowFormat::kFp8, 1, 1728, 2, 512, 64);
  EncodeRow(cache.rows, 0, std::vector<float>(512, 448.5f).data());
  EXPECT_EQ(cache.bytes()[1152], 127);
}

TEST(PagedRows, ZerosHaveTheFloorsScale) {
  TestCache cache(RowFormat::kFp8, 1, 1728, 2, 512, 64);
  EncodeRow(cache.rows, 0, std::vector<float>(512, 0.0f).data());
  EXPECT_EQ(cache.bytes()[1152], 105);
  TestCache mxfp4(RowFormat::kMxfp4Key, 1, 576, 1, 128, 64);
  EncodeRow(mxfp4.rows, 0, std::vector<float>(128, 0.0f).data());
  EXPECT_EQ(mxfp4.bytes()[64], 1);
}

TEST(PagedRows, NaNStaysInItsElement) {
  TestCache cache(RowFormat::kFp8, 1, 1728, 2, 512, 64);
  std::vector<float> row(512, 1.0f);
  row[3] = std::nanf("");
  EncodeRow(cache.rows, 0, row.data());
  DecodeRow(cache.rows, 0, row.data());
  EXPECT_TRUE(std::isnan(row[3]));
  for (size_t i = 0; i < 512; ++i) {
    if (i != 3) {
      ASSERT_EQ(row[i], 1.0f) << i;
    }
  }
}

TEST(CheckPagedRows, NamesCacheFormatAndFault) {
  const TestCache good(RowFormat::kFp8, 3, 37440, 64, 512, 64);
  auto check = [&](auto change) {
    PagedRows rows = good.rows;
    change(rows);
    return CheckPagedRows("window", rows);
  };
  DSV4_EXPECT_OK(check([](PagedRows&) {}));
  EXPECT_EQ(check([](PagedRows& r) { r.row_size = 500; }).message(),
            "window (fp8): expected an even rope_size and row_size - rope_size a positive multiple of 64, got rope_size "
            "64 and row_size 500");
  EXPECT_THAT(check([](PagedRows& r) { r.row_size = 64; }), StatusIs(kInvalid, "positive multiple of 64"));
  EXPECT_THAT(check([](PagedRows& r) { r.row_size = 513, r.rope_size = 65; }), StatusIs(kInvalid, "even rope_size"));
  EXPECT_THAT(check([](PagedRows& r) { r.rope_size = 513; }), StatusIs(kInvalid, "expected rope_size of 0 to 512, got 513"));
  EXPECT_THAT(check([](PagedRows& r) { r.rope_size = -2; }), StatusIs(kInvalid, "rope_size"));
  EXPECT_THAT(check([](PagedRows& r) { r.rows_per_page = 0; }), StatusIs(kInvalid, "rows_per_page"));
  EXPECT_THAT(check([](PagedRows& r) { r.rows_per_page = INT64_MAX; }), StatusIs(kInvalid, "rows_per_page"));
  EXPECT_THAT(check([](PagedRows& r) { r.row_size = INT64_MAX; }), StatusIs(kInvalid, "row_size"));
  EXPECT_THAT(check([](PagedRows& r) { r.row_size = 0, r.rope_size = 0; }), StatusIs(kInvalid, "row_size"));
  EXPECT_THAT(check([](PagedRows& r) { r.rows_per_page = 65; }),
              StatusIs(kInvalid, "window (fp8): expected pages of at least 37960 bytes, got 37440"));
  EXPECT_THAT(check([](PagedRows& r) { r.pages.data = r.pages.As<char>() + 2; }),
              StatusIs(kInvalid, "start on a multiple of 4 bytes"));
  EXPECT_THAT(check([](PagedRows& r) { r.pages.strides[0] = 37442; }), StatusIs(kInvalid, "a multiple of 4, got 37442"));
  EXPECT_THAT(check([](PagedRows& r) { r.pages.strides[0] = 37372; }),
              StatusIs(kInvalid, "page stride of at least 37376 bytes"));
  EXPECT_THAT(check([](PagedRows& r) { r.pages = TensorView(); }), StatusIs(kInvalid, "window: expected u8 [any, any]"));
  EXPECT_THAT(check([](PagedRows& r) { r.pages.dtype = DType::kF32; }), StatusIs(kInvalid, "window: expected u8"));
  EXPECT_THAT(check([](PagedRows& r) { r.format = static_cast<RowFormat>(77); }), StatusIs(kInvalid, "known row formats"));
  DSV4_EXPECT_OK(check([](PagedRows& r) { r.pages.extents[0] = 1, r.pages.strides[0] = 1; }));

  EXPECT_THAT(check([](PagedRows& r) { r.format = RowFormat::kMxfp4Key, r.row_size = 100; }),
              StatusIs(kInvalid, "window (mxfp4_key): expected row_size a multiple of 32, got 100"));
  EXPECT_THAT(check([](PagedRows& r) { r.format = RowFormat::kFp8Key, r.row_size = 130; }),
              StatusIs(kInvalid, "window (fp8_key): expected row_size a multiple of 4, got 130"));
  EXPECT_THAT(check([](PagedRows& r) { r.format = RowFormat::kF32; }),
              StatusIs(kInvalid, "window (f32): expected pages of at least 131072 bytes"));
}

}  // namespace
}  // namespace dsv4
