#include "runtime/tensor_view.h"

#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/testing.h"
#include "runtime/weight_view.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;

static_assert(std::is_trivially_copyable_v<TensorView>);
static_assert(std::is_trivially_copyable_v<WeightView>);
static_assert(std::is_trivially_copyable_v<QuantizedWeight>);

class TensorViewTest : public testing::Test {
 protected:
  TensorViewTest() : data_(24) { std::iota(data_.begin(), data_.end(), 0.0f); }
  TensorView View(std::initializer_list<int64_t> extents) {
    return TensorView::Contiguous(data_.data(), DType::kF32, extents);
  }
  std::vector<float> data_;
};

TEST_F(TensorViewTest, ContiguousStridesCountElements) {
  const TensorView x = View({2, 3, 4});
  EXPECT_EQ(x.rank, 3);
  EXPECT_THAT(x.strides, ElementsAre(12, 4, 1, 0));
  EXPECT_EQ(x.num_elements(), 24);
  EXPECT_EQ(x.num_bytes(), 96);
  EXPECT_EQ(*x.At<float>(1, 2, 3), 23.0f);
  EXPECT_EQ(*x.At<float>(1), 12.0f);
  EXPECT_EQ(x.Row<float>(1), data_.data() + 12);
  EXPECT_TRUE(x.is_contiguous());
}

TEST_F(TensorViewTest, DefaultViewIsEmpty) {
  const TensorView none;
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(none.num_elements(), 0);
  EXPECT_EQ(none.num_bytes(), 0);
}

TEST_F(TensorViewTest, RowsKeepStrides) {
  const TensorView x = View({6, 4});
  const TensorView rows = x.Rows(2, 3);
  EXPECT_EQ(rows.ToString(), "f32 [3, 4]");
  EXPECT_EQ(*rows.At<float>(0, 1), 9.0f);
  EXPECT_EQ(x.FirstRows(2).data, x.data);
  EXPECT_EQ(x.FirstRows(2).extents[0], 2);
  EXPECT_EQ(x.FirstRows(0).num_elements(), 0);
  EXPECT_EQ(x.Rows(6, 0).num_elements(), 0);
}

TEST_F(TensorViewTest, ColumnsShareRows) {
  const TensorView x = View({6, 4});
  const TensorView right = x.Columns(2, 2);
  EXPECT_EQ(ToFloats(right.FirstRows(2)), (std::vector<float>{2, 3, 6, 7}));
  EXPECT_FALSE(right.is_contiguous());
  EXPECT_TRUE(right.FirstRows(1).is_contiguous());
  EXPECT_TRUE(right.FirstRows(0).is_contiguous());
}

TEST_F(TensorViewTest, IndexDropsTheOutermostDimension) {
  const TensorView x = View({2, 3, 4});
  const TensorView matrix = x.Index(1);
  EXPECT_EQ(matrix.ToString(), "f32 [3, 4]");
  EXPECT_THAT(matrix.strides, ElementsAre(4, 1, 0, 0));
  EXPECT_EQ(*matrix.Index(2).At<float>(3), 23.0f);
}

TEST_F(TensorViewTest, ReshapeKeepsElements) {
  const TensorView x = View({6, 4}).Reshape({2, 3, 2, 2});
  EXPECT_EQ(x.ToString(), "f32 [2, 3, 2, 2]");
  EXPECT_EQ(*x.At<float>(1, 2, 1, 1), 23.0f);
}

TEST_F(TensorViewTest, NullStaysNull) {
  const TensorView x = TensorView::Contiguous(nullptr, DType::kBf16, {4, 8});
  EXPECT_TRUE(x.Rows(1, 2).empty());
  EXPECT_TRUE(x.Columns(1, 2).empty());
  EXPECT_TRUE(x.Index(3).empty());
}

TEST_F(TensorViewTest, OffsetsAreInElementsOfTheDType) {
  std::vector<int64_t> data(4);
  const TensorView x = TensorView::Contiguous(data.data(), DType::kI64, {4});
  EXPECT_EQ(x.Rows(3, 1).data, data.data() + 3);
  const TensorView bytes = TensorView::Contiguous(data.data(), DType::kE2m1x2, {4, 8});
  EXPECT_EQ(bytes.Rows(3, 1).data, data.data() + 3);
  EXPECT_EQ(bytes.num_bytes(), 32);
}

TEST_F(TensorViewTest, OffsetsPast32BitsAreExact) {
  TensorView x = View({1, 1});
  x.extents[0] = int64_t{1} << 33;
  x.strides[0] = int64_t{1} << 20;
  x.data = reinterpret_cast<void*>(uintptr_t{4096});
  EXPECT_EQ(x.num_elements(), int64_t{1} << 33);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.Rows(int64_t{1} << 32, 1).data), 4096 + (uint64_t{1} << 54));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.Row<float>(int64_t{1} << 32)), 4096 + (uint64_t{1} << 54));
}

TEST_F(TensorViewTest, TextNamesDTypeAndExtents) {
  EXPECT_EQ(View({3, 8}).ToString(), "f32 [3, 8]");
  EXPECT_EQ(TensorView::Contiguous(nullptr, DType::kE2m1x2, {0}).ToString(), "e2m1x2 [0]");
}

TEST_F(TensorViewTest, QuantizedWeightCountsColumnsOfPairs) {
  QuantizedWeight weight;
  weight.values = WeightView(TensorView::Contiguous(data_.data(), DType::kE2m1x2, {2, 3, 8}));
  weight.scales = WeightView(TensorView::Contiguous(data_.data(), DType::kE8m0, {2, 3, 1}));
  EXPECT_EQ(weight.rows(), 3);
  EXPECT_EQ(weight.cols(), 16);
  EXPECT_TRUE(weight.is_low_precision());
  const QuantizedWeight second = weight.Index(1);
  EXPECT_EQ(second.values.ToString(), "e2m1x2 [3, 8]");
  EXPECT_EQ(static_cast<const char*>(second.scales.data()), reinterpret_cast<const char*>(data_.data()) + 3);
  weight.values = WeightView(View({4, 6}));
  EXPECT_EQ(weight.cols(), 6);
  EXPECT_FALSE(weight.is_low_precision());
}

}  // namespace
}  // namespace dsv4
