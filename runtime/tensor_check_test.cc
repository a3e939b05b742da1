#include "runtime/tensor_check.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Views of these tests are only looked at, so that any aligned address will do.
void* const kAddress = reinterpret_cast<void*>(uintptr_t{1} << 20);

TensorView View(DType dtype, std::initializer_list<int64_t> extents, std::initializer_list<int64_t> strides = {}) {
  TensorView view = TensorView::Contiguous(kAddress, dtype, extents);
  std::copy(strides.begin(), strides.end(), view.strides);
  return view;
}

TensorView Shifted(TensorView view, int64_t bytes) {
  view.data = static_cast<char*>(view.data) + bytes;
  return view;
}

TEST(CheckTensor, AcceptsWhatItAsksFor) {
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kF32, {8, 128}), {DType::kF32}, {8, 128}));
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kBf16, {8, 128}), {DType::kF32, DType::kBf16}, {kAnyExtent, 128}));
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kF32, {8, 128}, {256, 1}), {DType::kF32}, {8, 128}));
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kF32, {8, 128}, {0, 1}), {DType::kF32}, {8, 128}));
  DSV4_EXPECT_OK(CheckTensor("x", WeightView(View(DType::kF32, {128})), {DType::kF32}, {128}));
}

TEST(CheckTensor, NamesWhatWasExpectedAndWhatCame) {
  const TensorView x = View(DType::kF32, {8, 64});
  EXPECT_EQ(CheckTensor("kv", x, {DType::kF32, DType::kBf16}, {8, 128}).message(),
            "kv: expected f32 or bf16 [8, 128], got f32 [8, 64]");
  EXPECT_EQ(CheckTensor("kv", x, {DType::kI32, DType::kI64, DType::kU8}, {8, kAnyExtent}).message(),
            "kv: expected i32, i64 or u8 [8, any], got f32 [8, 64]");
  EXPECT_EQ(CheckTensor("kv", x, {DType::kF32}, {8}).message(), "kv: expected f32 [8], got f32 [8, 64]");
  EXPECT_EQ(CheckTensor("kv", TensorView(), {DType::kF32}, {8}).message(), "kv: expected f32 [8], got no tensor");
  EXPECT_EQ(CheckTensor("norm", WeightView(x), {DType::kF32}, {64}).message(),
            "norm: expected f32 [64], got f32 [8, 64]");
  EXPECT_THAT(CheckTensor("kv", x, {DType::kF32}, {8, 128}), StatusIs(kInvalid, "kv"));
}

TEST(CheckTensor, RefusesNegativeExtents) {
  EXPECT_THAT(CheckTensor("x", View(DType::kF32, {-1, 64}), {DType::kF32}, {kAnyExtent, 64}),
              StatusIs(kInvalid, "x: expected f32 [any, 64], got f32 [-1, 64]"));
}

TEST(CheckTensor, NullPointerNeedsAnExtentOfZero) {
  TensorView x = TensorView::Contiguous(nullptr, DType::kF32, {0, 64});
  DSV4_EXPECT_OK(CheckTensor("x", x, {DType::kF32}, {kAnyExtent, 64}));
  x.extents[0] = 1;
  EXPECT_THAT(CheckTensor("x", x, {DType::kF32}, {kAnyExtent, 64}),
              StatusIs(kInvalid, "x: expected data, got f32 [1, 64] with a null pointer"));
}

TEST(CheckTensor, RefusesStridesThatKernelsCannotTake) {
  EXPECT_THAT(CheckTensor("x", View(DType::kF32, {8, 64}, {-64, 1}), {DType::kF32}, {8, 64}),
              StatusIs(kInvalid, "x: expected a stride of at least 0 in dimension 0 of f32 [8, 64], got -64"));
  EXPECT_THAT(CheckTensor("x", View(DType::kF32, {8, 64}, {128, 2}), {DType::kF32}, {8, 64}),
              StatusIs(kInvalid, "x: expected a stride of 1 in the last dimension of f32 [8, 64], got 2"));
  EXPECT_THAT(CheckTensor("x", View(DType::kF32, {8, 64}, {128, -1}), {DType::kF32}, {8, 64}),
              StatusIs(kInvalid, "got -1"));
}

TEST(CheckTensor, StrideOfAnExtentOfOneIsFree) {
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kF32, {1, 64}, {-5, 1}), {DType::kF32}, {1, 64}));
  DSV4_EXPECT_OK(CheckTensor("x", View(DType::kF32, {64, 1}, {8, 8}), {DType::kF32}, {64, 1}));
}

TEST(CheckTensor, RefusesMisalignedData) {
  EXPECT_THAT(CheckTensor("x", Shifted(View(DType::kF32, {8}), 2), {DType::kF32}, {8}),
              StatusIs(kInvalid, "x: expected f32 [8] on a multiple of 4 bytes, got 2 past one"));
  DSV4_EXPECT_OK(CheckTensor("x", Shifted(View(DType::kBf16, {8}), 2), {DType::kBf16}, {8}));
}

TEST(CheckTensor, RefusesMoreBytesThan64BitsCount) {
  const int64_t large = int64_t{1} << 40;
  EXPECT_THAT(CheckTensor("x", View(DType::kF32, {large, 8}, {large, 1}), {DType::kF32}, {kAnyExtent, 8}),
              StatusIs(kInvalid, "x: the bytes of f32 [1099511627776, 8] are too many"));
}

TEST(CheckWeight, AcceptsEachStoredType) {
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    QuantizedWeight weight{.values = WeightView(View(dtype, {300, 200})), .scales = {}};
    DSV4_EXPECT_OK(CheckWeight("w", weight, 300, 200));
    DSV4_EXPECT_OK(CheckWeight("w", weight, kAnyExtent, 200));
  }
  QuantizedWeight fp8{.values = WeightView(View(DType::kE4m3, {300, 200})),
                      .scales = WeightView(View(DType::kE8m0, {3, 2})),
                      .block_rows = 128,
                      .block_cols = 128};
  DSV4_EXPECT_OK(CheckWeight("w", fp8, 300, 200));
  fp8.scales = WeightView(View(DType::kF32, {3, 2}));
  DSV4_EXPECT_OK(CheckWeight("w", fp8, kAnyExtent, kAnyExtent));
  QuantizedWeight fp4{.values = WeightView(View(DType::kE2m1x2, {300, 100})),
                      .scales = WeightView(View(DType::kE8m0, {300, 7})),
                      .block_rows = 1,
                      .block_cols = 32};
  DSV4_EXPECT_OK(CheckWeight("w", fp4, 300, 200));
}

TEST(CheckWeight, AcceptsStacks) {
  QuantizedWeight stack{.values = WeightView(View(DType::kE4m3, {5, 300, 200})),
                        .scales = WeightView(View(DType::kE8m0, {5, 3, 2})),
                        .block_rows = 128,
                        .block_cols = 128};
  DSV4_EXPECT_OK(CheckWeight("w", stack, 300, 200));
  DSV4_EXPECT_OK(CheckWeight("w", stack.Index(4), 300, 200));
  stack.scales = WeightView(View(DType::kE8m0, {4, 3, 2}));
  EXPECT_EQ(CheckWeight("w", stack, 300, 200).message(),
            "w.scales: expected e8m0 or f32 [5, 3, 2], got e8m0 [4, 3, 2]");
}

TEST(CheckWeight, NamesWhatDoesNotFit) {
  QuantizedWeight weight{.values = WeightView(View(DType::kE4m3, {300, 200})),
                         .scales = WeightView(View(DType::kE8m0, {3, 1})),
                         .block_rows = 128,
                         .block_cols = 128};
  EXPECT_EQ(CheckWeight("w", weight, 300, 200).message(), "w.scales: expected e8m0 or f32 [3, 2], got e8m0 [3, 1]");
  EXPECT_EQ(CheckWeight("w", weight, 301, 200).message(),
            "w: expected f32, bf16, e4m3 or e2m1x2 [301, 200], got e4m3 [300, 200]");
  weight.scales = WeightView();
  EXPECT_EQ(CheckWeight("w", weight, 300, 200).message(), "w.scales: expected e8m0 or f32 [3, 2], got no tensor");
  weight.block_cols = 0;
  EXPECT_THAT(CheckWeight("w", weight, 300, 200), StatusIs(kInvalid, "w: expected blocks of at least 1 x 1, got 128 x 0"));

  weight = {.values = WeightView(View(DType::kF32, {4, 4})), .scales = WeightView(View(DType::kF32, {4, 4}))};
  EXPECT_EQ(CheckWeight("w", weight, 4, 4).message(), "w.scales: expected none for f32, got f32 [4, 4]");
  weight = {.values = WeightView(View(DType::kI32, {4, 4})), .scales = {}};
  EXPECT_THAT(CheckWeight("w", weight, 4, 4), StatusIs(kInvalid, "got i32 [4, 4]"));
  EXPECT_THAT(CheckWeight("w", QuantizedWeight(), 4, 4), StatusIs(kInvalid, "w: expected"));

  weight = {.values = WeightView(View(DType::kE2m1x2, {4, 16})),
            .scales = WeightView(View(DType::kE8m0, {4, 1})),
            .block_rows = 1,
            .block_cols = 31};
  EXPECT_THAT(CheckWeight("w", weight, 4, 32), StatusIs(kInvalid, "an even number of columns, got 1 x 31"));
  EXPECT_THAT(CheckWeight("w", weight, 4, 33), StatusIs(kInvalid, "an even number of columns in e2m1x2, got 33"));
}

TEST(CheckNoSelfOverlap, AcceptsOneAddressPerElement) {
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {8, 64})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {8, 64}, {65, 1})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {8, 64}, {1, 8})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {1, 64}, {0, 1})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {0, 64}, {0, 1})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", TensorView()));
  // Rows that reach into each other and still share nothing: 2 i + 3 j for i < 3, j < 2.
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {3, 2}, {2, 3})));
  DSV4_EXPECT_OK(CheckNoSelfOverlap("x", View(DType::kF32, {1000000, 1000, 64, 2}, {128000, 128, 2, 1})));
}

TEST(CheckNoSelfOverlap, RefusesSharedElements) {
  EXPECT_EQ(CheckNoSelfOverlap("out", View(DType::kF32, {8, 64}, {0, 1})).message(),
            "out: expected every element of the output at its own address, got f32 [8, 64] with strides [0, 1]");
  EXPECT_THAT(CheckNoSelfOverlap("out", View(DType::kF32, {8, 64}, {63, 1})), StatusIs(kInvalid, "out"));
  EXPECT_THAT(CheckNoSelfOverlap("out", View(DType::kF32, {8, 64}, {1, 1})), StatusIs(kInvalid, "out"));
  EXPECT_THAT(CheckNoSelfOverlap("out", View(DType::kF32, {4, 3}, {2, 3})), StatusIs(kInvalid, "out"));
  EXPECT_THAT(CheckNoSelfOverlap("out", View(DType::kF32, {8, 64}, {-63, 1})), StatusIs(kInvalid, "out"));
}

TEST(CheckDisjoint, ColumnHalvesOfOneBufferAreDisjoint) {
  const TensorView x = View(DType::kF32, {1000, 256});
  DSV4_EXPECT_OK(CheckDisjoint("kv", x.Columns(0, 128), "score", x.Columns(128, 128)));
  DSV4_EXPECT_OK(CheckDisjoint("score", x.Columns(128, 128), "kv", x.Columns(0, 128)));
  DSV4_EXPECT_OK(CheckDisjoint("a", x.Columns(0, 128).FirstRows(999), "b", x.Columns(200, 56)));
  EXPECT_THAT(CheckDisjoint("kv", x.Columns(0, 129), "score", x.Columns(128, 128)), StatusIs(kInvalid, "kv and score"));
}

TEST(CheckDisjoint, NamesBothAndTheirDistance) {
  const TensorView x = View(DType::kF32, {8, 256});
  EXPECT_EQ(CheckDisjoint("kv", x.Columns(0, 129), "score", x.Columns(128, 128)).message(),
            "kv and score: expected tensors without a common byte, got f32 [8, 129] and f32 [8, 128], whose data is 512 "
            "bytes after the first's");
}

TEST(CheckDisjoint, NeighboursTouchWithoutOverlap) {
  const TensorView x = View(DType::kBf16, {16, 64});
  DSV4_EXPECT_OK(CheckDisjoint("a", x.Rows(0, 8), "b", x.Rows(8, 8)));
  EXPECT_THAT(CheckDisjoint("a", x.Rows(0, 9), "b", x.Rows(8, 8)), StatusIs(kInvalid, "a and b"));
  const TensorView byte = Shifted(View(DType::kU8, {1}), 16 * 64 * 2 - 1);
  EXPECT_THAT(CheckDisjoint("a", x, "b", byte), StatusIs(kInvalid, "a and b"));
  DSV4_EXPECT_OK(CheckDisjoint("a", x, "b", Shifted(byte, 1)));
}

TEST(CheckDisjoint, AbsentAndEmptyTensorsOverlapNothing) {
  const TensorView x = View(DType::kF32, {8, 64});
  DSV4_EXPECT_OK(CheckDisjoint("a", x, "b", TensorView()));
  DSV4_EXPECT_OK(CheckDisjoint("a", x, "b", x.FirstRows(0)));
}

TEST(CheckDisjoint, RowsOfDifferentTypesAndStridesAreTold) {
  // Pages of 64 bytes: 48 bytes of rows, then 4 scales of 4 bytes.
  const TensorView rows = View(DType::kU8, {100, 48}, {64, 1});
  const TensorView scales = Shifted(View(DType::kF32, {100, 4}, {16, 1}), 48);
  DSV4_EXPECT_OK(CheckDisjoint("rows", rows, "scales", scales));
  EXPECT_THAT(CheckDisjoint("rows", rows, "scales", Shifted(scales, -4)), StatusIs(kInvalid, "rows and scales"));
  // Every second page.
  DSV4_EXPECT_OK(CheckDisjoint("rows", rows, "scales", Shifted(View(DType::kF32, {50, 4}, {32, 1}), 64 + 48)));
}

// All bytes of a view, the plain way.
std::multiset<int64_t> Elements(const TensorView& view) {
  std::multiset<int64_t> offsets;
  for (int64_t flat = 0; flat < view.num_elements(); ++flat) {
    int64_t rest = flat;
    int64_t offset = 0;
    for (int i = view.rank - 1; i >= 0; --i) {
      offset += rest % view.extents[i] * view.strides[i];
      rest /= view.extents[i];
    }
    offsets.insert(reinterpret_cast<int64_t>(view.data) + offset * DTypeBytes(view.dtype));
  }
  return offsets;
}

std::set<int64_t> Bytes(const TensorView& view) {
  std::set<int64_t> bytes;
  for (int64_t offset : Elements(view)) {
    for (int64_t i = 0; i < DTypeBytes(view.dtype); ++i) bytes.insert(offset + i);
  }
  return bytes;
}

TensorView RandomView(std::mt19937& engine) {
  const DType dtypes[] = {DType::kU8, DType::kBf16, DType::kF32, DType::kI64};
  TensorView view;
  view.dtype = dtypes[engine() % 4];
  view.rank = 1 + static_cast<int>(engine() % 4);
  view.data = Shifted(View(DType::kU8, {1}), static_cast<int64_t>(engine() % 200)).data;
  for (int i = 0; i < view.rank; ++i) {
    view.extents[i] = 1 + static_cast<int64_t>(engine() % 4);
    view.strides[i] = static_cast<int64_t>(engine() % 23) - 4;
  }
  return view;
}

TEST(CheckDisjoint, AgreesWithEnumeratingEveryByte) {
  std::mt19937 engine(1);
  int disjoint = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = RandomView(engine);
    const TensorView b = RandomView(engine);
    const std::set<int64_t> bytes = Bytes(a);
    const std::set<int64_t> others = Bytes(b);
    const bool expected =
        std::none_of(others.begin(), others.end(), [&](int64_t byte) { return bytes.count(byte) != 0; });
    ASSERT_EQ(CheckDisjoint("a", a, "b", b).ok(), expected) << i << ": " << CheckDisjoint("a", a, "b", b);
    disjoint += expected ? 1 : 0;
  }
  EXPECT_GT(disjoint, 2000);
  EXPECT_LT(disjoint, 18000);
}

TEST(CheckNoSelfOverlap, AgreesWithEnumeratingEveryElement) {
  std::mt19937 engine(2);
  int unique = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView view = RandomView(engine);
    const std::multiset<int64_t> elements = Elements(view);
    const bool expected = std::set<int64_t>(elements.begin(), elements.end()).size() == elements.size();
    ASSERT_EQ(CheckNoSelfOverlap("x", view).ok(), expected) << i << ": " << CheckNoSelfOverlap("x", view);
    unique += expected ? 1 : 0;
  }
  EXPECT_GT(unique, 2000);
  EXPECT_LT(unique, 18000);
}

TEST(CheckDisjoint, ViewsThatTakeTooLongToTellApartAreRefused) {
  // Coprime strides that cross everywhere, in two views of one parity each: never equal, but hard to see.
  const TensorView a = View(DType::kU8, {1000, 1000, 1000}, {2002, 2006, 2010});
  const TensorView b = Shifted(View(DType::kU8, {1000, 1000, 1000}, {2014, 2018, 2022}), 1);
  EXPECT_THAT(CheckDisjoint("a", a, "b", b), StatusIs(kInvalid, "cannot rule one out"));
}

TEST(CheckAtLeast, NamesValueAndMinimum) {
  DSV4_EXPECT_OK(CheckAtLeast("ratio", 1, 1));
  EXPECT_EQ(CheckAtLeast("ratio", 0, 1).message(), "ratio: expected at least 1, got 0");
  EXPECT_THAT(CheckAtLeast("ratio", INT64_MIN, 1), StatusIs(kInvalid, "got -9223372036854775808"));
}

}  // namespace
}  // namespace dsv4
