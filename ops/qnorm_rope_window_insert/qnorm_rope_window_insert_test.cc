#include "ops/qnorm_rope_window_insert/qnorm_rope_window_insert.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/testing/large_buffer.h"
#include "ops/testing/op_test.h"
#include "ops/testing/row_encoding.h"
#include "runtime/dtype.h"
#include "runtime/paged_rows.h"
#include "runtime/testing.h"

namespace dsv4::qnorm_rope_window_insert {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kFarPad = std::numeric_limits<int64_t>::min();

// A mean of up to 512 squares in one fp32 chain errs like a random walk, sqrt(512) * 2^-24 = 1.3e-6, and half of that
// reaches the row; the rotation's roundings are smaller.
constexpr double kTolerance = 2e-6;

struct Options {
  int64_t tokens = 3;
  int64_t heads = 2;
  int64_t head_size = 8;
  int64_t rope_size = 4;
  DType q_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  RowFormat format = RowFormat::kF32;
  int64_t rows_per_page = 4;
  bool strided = false;  // q's heads and tokens, and kv's rows, have space between them
  float eps = 1e-6f;
};

class Step {
 public:
  static constexpr int64_t kPositions = 50;

  explicit Step(const Options& options, uint64_t seed = 1)
      : options_(options),
        num_pages_((options.tokens + options.rows_per_page - 1) / options.rows_per_page + 1),
        q_(options.q_dtype, {options.tokens, options.heads + 1, options.head_size + 3}),
        kv_(options.kv_dtype, {options.tokens, options.head_size + 5}),
        slots_(DType::kI64, {options.tokens}),
        positions_(DType::kI64, {options.tokens}),
        cos_sin_(RandomRotations(kPositions, options.rope_size, seed)),
        pages_(DType::kU8, {num_pages_, PageBytes(options)}) {
    const int64_t n = options.tokens, d = options.head_size;
    params_.q = TensorView::Contiguous(q_.view().data, options.q_dtype, {n, options.heads, d});
    params_.kv = TensorView::Contiguous(kv_.view().data, options.kv_dtype, {n, d});
    if (options.strided) {
      params_.q = q_.view();
      params_.q.extents[1] = options.heads;
      params_.q.extents[2] = d;
      params_.kv = kv_.view().Columns(3, d);
    }
    SetFloats(params_.q, RandomFloats(n * options.heads * d, seed + 1, 3.0f));
    SetFloats(params_.kv, RandomFloats(n * d, seed + 2));
    std::mt19937_64 random(seed + 3);
    std::vector<int64_t> slots(num_pages_ * options.rows_per_page);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    slots.resize(n);
    SetInts(slots_.view(), slots);
    for (int64_t i = 0; i < n; ++i) positions_.data<int64_t>()[i] = random() % kPositions;
    params_.slots = slots_.view();
    params_.positions = positions_.view();
    params_.cos_sin = cos_sin_.weight();
    params_.eps = options.eps;
    params_.window = {.pages = pages_.view(),
                      .format = options.format,
                      .rows_per_page = options.rows_per_page,
                      .row_size = d,
                      .rope_size = options.rope_size};
  }

  static int64_t PageBytes(const Options& options) {
    return PageStrideBytes(options.format, options.rows_per_page, options.head_size, options.rope_size) + 12;
  }

  // Garbage in all that row i owns.
  void MakePad(int64_t i, int64_t slot) {
    slots_.data<int64_t>()[i] = slot;
    positions_.data<int64_t>()[i] = i % 2 == 0 ? kFarPad : std::numeric_limits<int64_t>::max();
    SetFloats(params_.q.Rows(i, 1), std::vector<float>(options_.heads * options_.head_size, NAN));
    SetFloats(params_.kv.Rows(i, 1), std::vector<float>(options_.head_size, NAN));
  }
  bool IsPad(int64_t i) const { return slot(i) < 0; }
  int64_t slot(int64_t i) const { return slots_.data<int64_t>()[i]; }
  int64_t& position(int64_t i) { return positions_.data<int64_t>()[i]; }

  // The row with its last channels rotated by token i's position, in double.
  std::vector<double> Rotated(std::vector<double> row, int64_t i) const {
    const int64_t d = options_.head_size, dr = options_.rope_size;
    const float* rotation = cos_sin_.data<float>() + positions_.data<int64_t>()[i] * dr;
    for (int64_t k = 0; k < dr / 2; ++k) {
      const double a = row[d - dr + 2 * k], b = row[d - dr + 2 * k + 1];
      row[d - dr + 2 * k] = a * rotation[k] - b * rotation[dr / 2 + k];
      row[d - dr + 2 * k + 1] = a * rotation[dr / 2 + k] + b * rotation[k];
    }
    return row;
  }
  std::vector<double> ExpectedQ(int64_t i, int64_t head) const {
    const std::vector<float> q = ToFloats(params_.q.Index(i).Rows(head, 1));
    std::vector<double> row(q.begin(), q.end());
    double squares = 0;
    for (const double x : row) squares += x * x;
    for (double& x : row) x /= std::sqrt(squares / options_.head_size + static_cast<double>(options_.eps));
    return Rotated(row, i);
  }
  std::vector<double> ExpectedKv(int64_t i) const {
    const std::vector<float> kv = ToFloats(params_.kv.Rows(i, 1));
    return Rotated({kv.begin(), kv.end()}, i);
  }
  std::vector<float> WindowRow(int64_t slot) const {
    std::vector<float> row(options_.head_size);
    DecodeRow(params_.window, slot, row.data());
    return row;
  }

  Params& params() { return params_; }
  const TestTensor& q() const { return q_; }
  const TestTensor& kv() const { return kv_; }
  const TestTensor& pages() const { return pages_; }
  const TestTensor& cos_sin() const { return cos_sin_; }
  void CheckGuards() const {
    for (const TestTensor* tensor : {&q_, &kv_, &slots_, &positions_, &cos_sin_, &pages_}) tensor->CheckGuards();
  }

 private:
  Options options_;
  int64_t num_pages_;
  TestTensor q_, kv_, slots_, positions_, cos_sin_, pages_;
  Params params_;
};

std::vector<float> Floats(const std::vector<double>& row) { return {row.begin(), row.end()}; }

class QnormRopeWindowInsert : public OpTest {
 protected:
  void Run(Step& step) {
    DSV4_ASSERT_OK(Record(stream(), step.params()));
    DSV4_ASSERT_OK(stream().Synchronize());
    step.CheckGuards();
  }
};

TEST_F(QnormRopeWindowInsert, NormsAndRotatesEachHeadAndInsertsTheRow) {
  // Mean squares 12.5 and 4 of two heads; a quarter turn makes (a, b) to (-b, a). The window row is not normed.
  const TestTensor q(DType::kF32, {1, 2, 2}, {3, 4, 2, -2});
  const TestTensor kv(DType::kF32, {1, 2}, {5, 6});
  const TestTensor slots = TestTensor::OfInts(DType::kI64, {1}, {2});
  const TestTensor positions = TestTensor::OfInts(DType::kI64, {1}, {1});
  const TestTensor cos_sin(DType::kF32, {2, 2}, {NAN, NAN, 0, 1});
  const TestTensor pages(DType::kU8, {2, 16});
  const PagedRows window = {
      .pages = pages.view(), .format = RowFormat::kF32, .rows_per_page = 2, .row_size = 2, .rope_size = 2};
  DSV4_ASSERT_OK(Record(stream(), {.q = q.view(),
                                   .kv = kv.view(),
                                   .slots = slots.view(),
                                   .positions = positions.view(),
                                   .cos_sin = cos_sin.weight(),
                                   .window = window}));
  const std::vector<float> result = q.ToFloats();
  EXPECT_NEAR(result[0], -4 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(result[1], 3 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(result[2], 1, 1e-6);
  EXPECT_NEAR(result[3], 1, 1e-6);
  std::vector<float> row(2);
  DecodeRow(window, 2, row.data());
  EXPECT_THAT(row, ElementsAre(-6, 5));
  EXPECT_THAT(kv.ToFloats(), ElementsAre(5, 6));
}

TEST_F(QnormRopeWindowInsert, MatchesTheSpecificationForEveryShape) {
  uint64_t seed = 0;
  for (const int64_t tokens : {1, 2, 3, 31, 32, 33, 64, 65}) {
    for (const int64_t heads : {1, 4, 7}) {
      for (const int64_t head_size : {2, 6, 128, 512}) {
        seed += 1;
        const Options options = {.tokens = tokens,
                                 .heads = heads,
                                 .head_size = head_size,
                                 .rope_size = std::min<int64_t>(head_size == 6 ? 4 : 64, head_size),
                                 .kv_dtype = seed % 2 == 0 ? DType::kF32 : DType::kBf16,
                                 .rows_per_page = 1 + static_cast<int64_t>(seed % 5),
                                 .strided = seed % 3 == 0};
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << heads << " heads of " << head_size);
        Step step(options, seed);
        for (int64_t i = 0; i < tokens; ++i) {
          if ((i + static_cast<int64_t>(seed)) % 5 == 0) step.MakePad(i, i % 2 == 0 ? -1 : kFarPad);
        }
        // Everything that is to change is overwritten with what is expected there; then nothing may differ.
        std::vector<std::vector<float>> expected_q, expected_kv;
        for (int64_t i = 0; i < tokens; ++i) {
          if (step.IsPad(i)) continue;
          for (int64_t h = 0; h < heads; ++h) expected_q.push_back(Floats(step.ExpectedQ(i, h)));
          expected_kv.push_back(Floats(step.ExpectedKv(i)));
        }
        const std::vector<uint8_t> q_before = step.q().Bytes(), kv_before = step.kv().Bytes();
        Run(step);
        EXPECT_EQ(step.kv().Bytes(), kv_before);

        std::vector<uint8_t> pages = step.pages().Bytes();
        std::vector<uint8_t> q_after = step.q().Bytes();
        size_t head_row = 0, kv_row = 0;
        for (int64_t i = 0; i < tokens; ++i) {
          if (step.IsPad(i)) continue;
          for (int64_t h = 0; h < heads; ++h) {
            const TensorView head = step.params().q.Index(i).Rows(h, 1);
            EXPECT_TRUE(IsClose(ToFloats(head), expected_q[head_row++], head_size, kTolerance)) << i << ", " << h;
            const int64_t offset = head.As<uint8_t>() - step.q().view().As<uint8_t>();
            std::copy_n(q_before.begin() + offset, 4 * head_size, q_after.begin() + offset);
          }
          EXPECT_TRUE(IsClose(step.WindowRow(step.slot(i)), expected_kv[kv_row++], head_size, kTolerance)) << i;
          std::fill_n(pages.begin() + step.slot(i) / options.rows_per_page * Step::PageBytes(options) +
                          step.slot(i) % options.rows_per_page * 4 * head_size,
                      4 * head_size, 0xff);
        }
        EXPECT_EQ(q_after, q_before);  // pads, and what lies between strided rows
        EXPECT_EQ(std::count(pages.begin(), pages.end(), 0xff), static_cast<int64_t>(pages.size()));
        if (HasFailure()) return;
      }
    }
  }
}

// From the norm through the rotation in fp32, with one rounding: half a unit in the last place of bf16, which is at
// most 2^-8 of the value, and the fp32 error of a value that the rotation may have made small.
TEST_F(QnormRopeWindowInsert, RoundsABf16QueryOnce) {
  Step step({.tokens = 33, .heads = 4, .head_size = 128, .rope_size = 64, .q_dtype = DType::kBf16});
  std::vector<std::vector<double>> expected;
  for (int64_t i = 0; i < 33; ++i) {
    for (int64_t h = 0; h < 4; ++h) expected.push_back(step.ExpectedQ(i, h));
  }
  Run(step);
  const std::vector<float> actual = ToFloats(step.params().q);
  int64_t exactly_rounded = 0;
  for (size_t k = 0; k < actual.size(); ++k) {
    const double exact = expected[k / 128][k % 128];
    EXPECT_NEAR(actual[k], exact, std::abs(exact) * 0x1p-8 + 4e-6) << k;
    exactly_rounded += actual[k] == static_cast<float>(NearestBf16(exact));
  }
  EXPECT_GT(exactly_rounded, static_cast<int64_t>(actual.size()) * 999 / 1000);  // the rest lies next to a tie
}

TEST_F(QnormRopeWindowInsert, StoresEveryFormatByteForByte) {
  for (const RowFormat format : {RowFormat::kBf16, RowFormat::kFp8, RowFormat::kFp8Key, RowFormat::kMxfp4Key}) {
    for (const int64_t head_size : {128, 192, 512}) {
      SCOPED_TRACE(testing::Message() << RowFormatName(format) << " " << head_size);
      Options options = {.tokens = 9, .head_size = head_size, .rope_size = 64, .kv_dtype = DType::kBf16};
      Step exact(options);
      options.format = format;
      Step stored(options);
      Run(exact);
      Run(stored);
      const TestTensor expected(DType::kU8, {stored.pages().view().extents[0], Step::PageBytes(options)});
      for (int64_t i = 0; i < 9; ++i) {
        const EncodedRow encoded = EncodeByDefinition(format, exact.WindowRow(exact.slot(i)), 64);
        const int64_t page = stored.slot(i) / 4 * Step::PageBytes(options), row = stored.slot(i) % 4;
        const int64_t value_bytes = static_cast<int64_t>(encoded.values.size());
        uint8_t* const begin = expected.data<uint8_t>() + page;
        std::copy(encoded.values.begin(), encoded.values.end(), begin + row * value_bytes);
        std::copy(encoded.scales.begin(), encoded.scales.end(),
                  begin + 4 * value_bytes + row * static_cast<int64_t>(encoded.scales.size()));
      }
      EXPECT_TRUE(BitwiseEqual(stored.pages().view(), expected.view()));
    }
  }
}

// The window row has no sum in it, so that its bytes are the same on every device; a query row's sum of squares may be
// in another order.
TEST_F(QnormRopeWindowInsert, AgreesWithTheCpuOnThePublishedLayer) {
  for (const int64_t heads : {64, 128}) {
    for (const RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8}) {
      SCOPED_TRACE(testing::Message() << heads << " heads, " << RowFormatName(format));
      const DType dtype = format == RowFormat::kF32 ? DType::kF32 : DType::kBf16;
      const Options options = {.tokens = 5,
                               .heads = heads,
                               .head_size = 512,
                               .rope_size = 64,
                               .q_dtype = dtype,
                               .kv_dtype = dtype,
                               .format = format,
                               .rows_per_page = 64};
      Step expected(options), actual(options);
      for (Step* step : {&expected, &actual}) {
        step->MakePad(1, -1);
        // A group of zeros, one below the floor of the scale, and the format's largest values.
        const TensorView row = step->params().kv.Rows(2, 1);
        SetFloats(row.Columns(0, 64), std::vector<float>(64, 0.0f));
        SetFloats(row.Columns(64, 64), std::vector<float>(64, 1e-6f));
        SetFloats(row.Columns(128, 64), std::vector<float>(64, -449.0f));
      }
      DSV4_ASSERT_OK(Record(cpu_stream(), expected.params()));
      Run(actual);
      EXPECT_TRUE(BitwiseEqual(actual.pages().view(), expected.pages().view()));
      // A value next to a tie of bf16 may fall the other way: 2^-8 of at most about 4, in a row of norm sqrt(512), and
      // few of those in a row.
      EXPECT_TRUE(IsClose(actual.q().ToFloats(), expected.q().ToFloats(), 515,
                          dtype == DType::kF32 ? kTolerance : 2 * 4 * 0x1p-8 / std::sqrt(512.0)));
    }
  }
}

TEST_F(QnormRopeWindowInsert, PadsAreNeitherReadNorWritten) {
  for (const int64_t pad_slot : {int64_t{-1}, int64_t{-4}, int64_t{-5}, kFarPad}) {
    Step step({.tokens = 5, .q_dtype = DType::kBf16, .format = RowFormat::kBf16});
    for (int64_t i = 0; i < 5; ++i) step.MakePad(i, pad_slot);
    const std::vector<uint8_t> q = step.q().Bytes(), pages = step.pages().Bytes();
    Run(step);
    EXPECT_EQ(step.q().Bytes(), q);
    EXPECT_EQ(step.pages().Bytes(), pages);
  }
}

TEST_F(QnormRopeWindowInsert, RowsDoNotDependOnEachOther) {
  for (const int64_t head_size : {128, 512}) {
    const Options options = {.tokens = 33,
                             .heads = 3,
                             .head_size = head_size,
                             .rope_size = 64,
                             .q_dtype = DType::kBf16,
                             .kv_dtype = DType::kBf16,
                             .format = RowFormat::kFp8};
    Step together(options), among_pads(options), alone(options);
    Run(together);
    for (int64_t i = 32; i >= 0; --i) {
      Params row = alone.params();
      for (TensorView* view : {&row.q, &row.kv, &row.slots, &row.positions}) *view = view->Rows(i, 1);
      DSV4_ASSERT_OK(Record(stream(), row));
    }
    EXPECT_TRUE(BitwiseEqual(alone.params().q, together.params().q));
    EXPECT_TRUE(BitwiseEqual(alone.pages().view(), together.pages().view()));

    for (int64_t i = 0; i < 33; i += 2) among_pads.MakePad(i, -1);
    Run(among_pads);
    for (int64_t i = 1; i < 33; i += 2) {
      EXPECT_TRUE(BitwiseEqual(among_pads.params().q.Rows(i, 1), together.params().q.Rows(i, 1))) << i;
      EXPECT_EQ(among_pads.WindowRow(among_pads.slot(i)), together.WindowRow(together.slot(i))) << i;
    }
  }
}

TEST_F(QnormRopeWindowInsert, AQueryOfZerosStaysZero) {
  Step step({.tokens = 1, .heads = 1, .q_dtype = DType::kBf16});
  SetFloats(step.params().q, std::vector<float>(8, 0));
  Run(step);
  for (const float x : ToFloats(step.params().q)) EXPECT_EQ(x, 0.0f);
}

TEST_F(QnormRopeWindowInsert, AddressesPagesPastTwoToTheThirtyTwo) {
  constexpr int64_t kPages = int64_t{1} << 29;  // of 64 bytes and eight rows
  const LargeBuffer memory(device(), stream(), kPages * 64);
  if (memory.data() == nullptr) GTEST_SKIP() << "no room for the cache";
  Step step({.tokens = 3, .heads = 1, .head_size = 2, .rope_size = 2});
  step.params().window.pages = TensorView::Contiguous(memory.data(), DType::kU8, {kPages, 64});
  step.params().window.rows_per_page = 8;
  const int64_t slots[] = {kPages * 8 - 1, int64_t{1} << 31, 7};
  for (int64_t i = 0; i < 3; ++i) *step.params().slots.At<int64_t>(i) = slots[i];
  Run(step);
  const auto row = [&](int64_t slot) {
    return std::vector<float>{memory.Get<float>(2 * slot), memory.Get<float>(2 * slot + 1)};
  };
  for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(IsClose(row(slots[i]), Floats(step.ExpectedKv(i)), 2, kTolerance));
  for (int64_t slot = 0; slot < 7; ++slot) EXPECT_EQ(row(slot), std::vector<float>(2, 0.0f));
}

TEST_F(QnormRopeWindowInsert, TakesAStepWithoutTokens) {
  Step step({});
  Params& params = step.params();
  for (TensorView* view : {&params.q, &params.kv, &params.slots, &params.positions}) *view = view->FirstRows(0);
  const std::vector<uint8_t> q = step.q().Bytes(), pages = step.pages().Bytes();
  Run(step);
  EXPECT_EQ(step.q().Bytes(), q);
  EXPECT_EQ(step.pages().Bytes(), pages);
}

TEST_F(QnormRopeWindowInsert, DeclaresWhatItTouchesAndRunsWhenReplayed) {
  if (!on_cpu()) GTEST_SKIP() << "records are replayed on the cpu only";
  Step step({.tokens = 2});
  const std::vector<uint8_t> q = step.q().Bytes();
  const std::vector<OpRecord> records = Capture([&] { return Record(stream(), step.params()); });
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(step.q().Bytes(), q);
  EXPECT_EQ(records[0].op, "qnorm_rope_window_insert");
  EXPECT_TRUE(records[0].waits);
  EXPECT_THAT(Declared(records[0]),
              ElementsAre("read q f32 [2, 2, 8]", "write q f32 [2, 2, 8]", "read kv f32 [2, 8]", "read slots i64 [2]",
                          "read positions i64 [2]", "before wait cos_sin f32 [50, 4]", "write window u8 [2, 140]"));
  step.position(1) = 49;
  const std::vector<double> expected = step.ExpectedQ(1, 1);
  records[0].run();
  EXPECT_TRUE(IsClose(ToFloats(step.params().q.Index(1).Rows(1, 1)), Floats(expected), 8, kTolerance));
}

TEST_F(QnormRopeWindowInsert, RefusesBadInputByNameAndWritesNothing) {
  const struct {
    std::function<void(Params&)> spoil;
    const char* message;
  } cases[] = {
      {[](Params& p) { p.q.data = nullptr; }, "q: "},
      {[](Params& p) { p.q.dtype = DType::kI32; }, "q: expected f32 or bf16"},
      {[](Params& p) { p.q.extents[2] = 7; }, "q: expected f32 or bf16 [any, any, 8]"},
      {[](Params& p) { p.q = p.q.Index(0); }, "q: "},
      {[](Params& p) { p.q.strides[1] = 4; }, "q"},
      {[](Params& p) { p.kv.data = nullptr; }, "kv: "},
      {[](Params& p) { p.kv.extents[0] = 2; }, "kv: expected f32 or bf16 [3, 8]"},
      {[](Params& p) { p.kv.extents[1] = 7; }, "kv: expected f32 or bf16 [3, 8]"},
      {[](Params& p) { p.slots.dtype = DType::kI32; }, "slots: expected i64"},
      {[](Params& p) { p.slots.extents[0] = 2; }, "slots: expected i64 [3]"},
      {[](Params& p) { p.positions.data = nullptr; }, "positions: "},
      {[](Params& p) { p.positions.dtype = DType::kI32; }, "positions: expected i64"},
      {[](Params& p) { p.cos_sin = WeightView(); }, "cos_sin: "},
      {[](Params& p) { p.cos_sin = WeightView(p.cos_sin.view().Columns(0, 2)); }, "cos_sin: expected f32 [any, 4]"},
      {[](Params& p) { p.eps = -1; }, "eps: expected at least 0"},
      {[](Params& p) { p.eps = NAN; }, "eps: expected at least 0"},
      {[](Params& p) { p.window.pages.data = nullptr; }, "window"},
      {[](Params& p) { p.window.pages.dtype = DType::kF32; }, "window"},
      {[](Params& p) { p.window.rows_per_page = 5; }, "window"},
      {[](Params& p) { p.window.row_size = 6; }, "q: expected f32 or bf16 [any, any, 6]"},
      {[](Params& p) { p.window.rope_size = 3; }, "window: expected an even number of rotary channels"},
      {[](Params& p) { p.window.rope_size = 0; }, "window: expected an even number of rotary channels"},
      {[](Params& p) { p.window.format = RowFormat::kFp8; }, "window (fp8)"},
      {[](Params& p) { p.window.pages.strides[0] = 0; }, "window"},
      {[](Params& p) { p.window.pages.extents[1] += 1; }, "window"},  // into the next page
      {[](Params& p) { p.window.pages.data = p.q.data; }, "window"},
      {[](Params& p) { p.kv.data = p.q.data; }, "kv"},
      {[](Params& p) { p.slots.data = p.q.data; }, "slots"},
      {[](Params& p) { p.positions.data = p.q.data; }, "positions"},
      {[](Params& p) {
         p.cos_sin = WeightView(TensorView::Contiguous(p.q.data, DType::kF32, {2, 4}));
       },
       "cos_sin"},
      {[](Params& p) { p.kv.data = p.window.pages.data; }, "kv"},
      {[](Params& p) { p.slots.data = p.window.pages.data; }, "slots"},
      {[](Params& p) { p.positions.data = p.window.pages.data; }, "positions"},
      {[](Params& p) {
         p.cos_sin = WeightView(TensorView::Contiguous(p.window.pages.data, DType::kF32, {2, 4}));
       },
       "cos_sin"},
  };
  for (const auto& test : cases) {
    Step step({});
    const std::vector<uint8_t> q = step.q().Bytes(), pages = step.pages().Bytes();
    DSV4_EXPECT_OK(Validate(step.params()));
    test.spoil(step.params());
    EXPECT_THAT(Validate(step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_THAT(Record(stream(), step.params()), StatusIs(absl::StatusCode::kInvalidArgument, test.message));
    EXPECT_EQ(step.q().Bytes(), q) << test.message;
    EXPECT_EQ(step.pages().Bytes(), pages) << test.message;
  }
}

}  // namespace
}  // namespace dsv4::qnorm_rope_window_insert
