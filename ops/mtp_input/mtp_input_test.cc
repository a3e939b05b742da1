#include "ops/mtp_input/mtp_input.h"

#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/op_test.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class MtpInputTest : public OpTest {};

// A sum of two floats is rounded once, so that it is exact to the last bit.
std::vector<float> Expected(const TestTensor& e, const TestTensor& h) {
  const int64_t streams = h.view().extents[1], channels = h.view().extents[2];
  std::vector<float> sums = h.ToFloats();
  const std::vector<float> added = e.ToFloats();
  for (size_t i = 0; i < sums.size(); ++i) {
    const int64_t flat = static_cast<int64_t>(i);
    sums[i] += added[static_cast<size_t>(flat / (streams * channels) * channels + flat % channels)];
  }
  return sums;
}

TEST_F(MtpInputTest, AddsTheEmbeddingToEveryStream) {
  for (const int64_t rows : {1, 2, 3, 31, 32, 33}) {
    for (const int64_t streams : {1, 3, 4}) {
      for (const int64_t channels : {1, 7, 32, 33, 1032, 4096}) {
        for (const DType dtype : {DType::kF32, DType::kBf16}) {
          const TestTensor e(dtype, {rows, channels}, RandomFloats(rows * channels, 1));
          const TestTensor h(dtype, {rows, streams, channels}, RandomFloats(rows * streams * channels, 2));
          const TestTensor out(dtype, {rows, streams, channels}), wide(DType::kF32, {rows, streams, channels});
          const TestTensor expected(dtype, {rows, streams, channels}, Expected(e, h));
          DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = out.view()}));
          EXPECT_TRUE(BitwiseEqual(out.view(), expected.view())) << rows << ", " << streams << ", " << channels;
          DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = wide.view()}));
          EXPECT_EQ(wide.ToFloats(), Expected(e, h)) << rows << ", " << streams << ", " << channels;
          out.CheckGuards();
          wide.CheckGuards();
        }
      }
    }
  }
}

TEST_F(MtpInputTest, WorksInPlace) {
  for (const int64_t channels : {5, 64}) {
    const TestTensor e(DType::kBf16, {3, channels}, RandomFloats(3 * channels, 1));
    const TestTensor h(DType::kBf16, {3, 4, channels}, RandomFloats(12 * channels, 2));
    const TestTensor expected(DType::kBf16, {3, 4, channels}, Expected(e, h));
    DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = h.view()}));
    EXPECT_TRUE(BitwiseEqual(h.view(), expected.view()));
    h.CheckGuards();
  }
}

TEST_F(MtpInputTest, RowsDoNotDependOnEachOther) {
  const TestTensor e(DType::kF32, {4, 24}, RandomFloats(96, 1)), h(DType::kF32, {4, 2, 24}, RandomFloats(192, 2));
  const TestTensor before(DType::kF32, {4, 2, 24}), after(DType::kF32, {4, 2, 24});
  DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = before.view()}));
  SetFloats(e.view().Rows(2, 1), std::vector<float>(24, std::numeric_limits<float>::quiet_NaN()));
  DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = after.view()}));
  for (const int64_t row : {0, 1, 3}) {
    EXPECT_TRUE(BitwiseEqual(after.view().Rows(row, 1), before.view().Rows(row, 1)));
  }
  EXPECT_THAT(ToFloats(after.view().Rows(2, 1)), Each(testing::IsNan()));
}

TEST_F(MtpInputTest, FollowsTheStridesOfItsViews) {
  const TestTensor e(DType::kF32, {2, 6}, RandomFloats(12, 1)), h(DType::kF32, {2, 3, 5}, RandomFloats(30, 2));
  const TestTensor out(DType::kF32, {2, 4, 5});
  TensorView h_view = h.view(), out_view = out.view();  // two streams of four channels
  h_view.extents[1] = out_view.extents[1] = 2;
  h_view.extents[2] = out_view.extents[2] = 4;
  DSV4_ASSERT_OK(mtp_input::Record(stream(), {.e = e.view().Columns(2, 4), .h = h_view, .out = out_view}));
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t a = 0; a < 4; ++a) {
      for (int64_t c = 0; c < 5; ++c) {
        const float value = *out.view().At<float>(i, a, c);
        if (a < 2 && c < 4) {
          EXPECT_EQ(value, *e.view().At<float>(i, c + 2) + *h.view().At<float>(i, a, c));
        } else {
          EXPECT_THAT(value, testing::IsNan());
        }
      }
    }
  }
}

TEST_F(MtpInputTest, DeclaresWhatItTouches) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  const TestTensor e(DType::kBf16, {2, 3}), h(DType::kF32, {2, 4, 3}), out(DType::kBf16, {2, 4, 3});
  const std::vector<OpRecord> records =
      Capture([&] { return mtp_input::Record(stream(), {.e = e.view(), .h = h.view(), .out = out.view()}); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].op, "mtp_input");
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read e bf16 [2, 3]", "read h f32 [2, 4, 3]", "write out bf16 [2, 4, 3]"));
}

TEST_F(MtpInputTest, RefusesBadInputByName) {
  const TestTensor e(DType::kF32, {2, 3}, std::vector<float>(6, 1.0f));
  const TestTensor h(DType::kF32, {2, 4, 3}, std::vector<float>(24, 1.0f)), out(DType::kF32, {2, 4, 3});
  const mtp_input::Params good = {.e = e.view(), .h = h.view(), .out = out.view()};
  const auto refused = [&](const char* message, const auto& change) {
    mtp_input::Params params = good;
    change(params);
    EXPECT_THAT(mtp_input::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused("e: expected f32 or bf16 [any, any]", [](auto& p) { p.e = TensorView(); });
  refused("e: expected f32 or bf16 [any, any]", [](auto& p) { p.e.dtype = DType::kI32; });
  refused("h: expected f32 or bf16 [2, any, 3]", [](auto& p) { p.h = p.h.FirstRows(1); });
  refused("out: expected f32 or bf16 [2, 4, 3]", [](auto& p) { p.out.extents[1] = 3; });
  refused("out and e: ", [&](auto& p) { p.e = out.view().Index(0).FirstRows(2); });
  // In place is the very same view only.
  refused("out and h: ", [](auto& p) {
    p.out = p.h;
    p.out.dtype = DType::kBf16;
  });
  EXPECT_THAT(out.Bytes(), Each(0xFF));
}

}  // namespace
}  // namespace dsv4
