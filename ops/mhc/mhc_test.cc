#include "ops/mhc/mhc.h"

#include <algorithm>
#include <cmath>
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

constexpr float kRmsEps = 1e-6f;
constexpr float kHcEps = 1e-6f;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The products of up to 1024 terms err by about 1e-6 of m, exp turns that into a relative error of as much, and the
// Sinkhorn steps shrink it again; the weighted sums add a few roundings of 2^-24.
constexpr double kTolerance = 5e-6;

class MhcTest : public OpTest {};

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Weights {
  Weights(int64_t mixes, int64_t scales, int64_t size)
      : fn(DType::kF32, {mixes, size}, RandomFloats(mixes * size, 21, 1.0f / std::sqrt(static_cast<float>(size)))),
        scale(DType::kF32, {scales}, RandomFloats(scales, 22, 1.5f)),
        base(DType::kF32, {mixes}, RandomFloats(mixes, 23)) {}
  TestTensor fn;
  TestTensor scale;
  TestTensor base;
};

struct Mixing {
  std::vector<float> in;    // [M], before mixing the streams
  std::vector<float> post;  // [M]
  std::vector<float> comb;  // [M, M]
};

// m of one row of flattened streams.
std::vector<double> Mixes(const float* v, const Weights& weights) {
  const int64_t mixes = weights.fn.view().extents[0];
  const int64_t size = weights.fn.view().extents[1];
  double squares = 0;
  for (int64_t k = 0; k < size; ++k) squares += static_cast<double>(v[k]) * v[k];
  std::vector<double> m(static_cast<size_t>(mixes));
  for (int64_t a = 0; a < mixes; ++a) {
    double sum = 0;
    for (int64_t k = 0; k < size; ++k) sum += static_cast<double>(weights.fn.data<float>()[a * size + k]) * v[k];
    m[static_cast<size_t>(a)] = sum / std::sqrt(squares / static_cast<double>(size) + kRmsEps);
  }
  return m;
}

// The specification, section 10.1, for one row.
Mixing ExpectedMixing(const float* v, int64_t streams, const Weights& weights, int64_t iterations, double hc_eps) {
  const size_t n = static_cast<size_t>(streams);
  const std::vector<double> m = Mixes(v, weights);
  const float* scale = weights.scale.data<float>();
  const float* base = weights.base.data<float>();
  Mixing mixing;
  for (size_t a = 0; a < n; ++a) {
    mixing.in.push_back(static_cast<float>(Sigmoid(m[a] * scale[0] + base[a]) + hc_eps));
    mixing.post.push_back(static_cast<float>(2 * Sigmoid(m[n + a] * scale[1] + base[n + a])));
  }
  std::vector<std::vector<double>> c(n, std::vector<double>(n));
  for (size_t a = 0; a < n; ++a) {
    double sum = 0;
    for (size_t b = 0; b < n; ++b) sum += c[a][b] = std::exp(m[2 * n + a * n + b] * scale[2] + base[2 * n + a * n + b]);
    for (size_t b = 0; b < n; ++b) c[a][b] = c[a][b] / sum + hc_eps;
  }
  const auto normalize_columns = [&] {
    for (size_t b = 0; b < n; ++b) {
      double sum = hc_eps;
      for (size_t a = 0; a < n; ++a) sum += c[a][b];
      for (size_t a = 0; a < n; ++a) c[a][b] /= sum;
    }
  };
  const auto normalize_rows = [&] {
    for (size_t a = 0; a < n; ++a) {
      double sum = hc_eps;
      for (size_t b = 0; b < n; ++b) sum += c[a][b];
      for (size_t b = 0; b < n; ++b) c[a][b] /= sum;
    }
  };
  normalize_columns();
  for (int64_t i = 1; i < iterations; ++i) {
    normalize_rows();
    normalize_columns();
  }
  for (const std::vector<double>& row : c) {
    for (const double value : row) mixing.comb.push_back(static_cast<float>(value));
  }
  return mixing;
}

struct Size {
  int64_t rows, streams, channels;
};
constexpr Size kSizes[] = {{1, 4, 256}, {2, 2, 33}, {3, 4, 7}, {31, 4, 32}, {32, 1, 5}, {33, 3, 31}, {2, 4, 1}};

TEST_F(MhcTest, PreMixesTheStreamsAndGivesTheSublayersCoefficients) {
  for (const Size size : kSizes) {
    for (const int64_t iterations : {1, 2, 20}) {
      // A large hc_eps shows everywhere that it is added; the published one is next to nothing.
      for (const float hc_eps : {kHcEps, 0.05f}) {
        const DType dtype = hc_eps == kHcEps ? DType::kF32 : DType::kBf16;
        const int64_t flat = size.streams * size.channels;
        const Weights weights(2 * size.streams + size.streams * size.streams, 3, flat);
        const TestTensor x(dtype, {size.rows, size.streams, size.channels},
                           RandomFloats(size.rows * flat, 1, hc_eps == kHcEps ? 2.0f : 1e-3f));
        const TestTensor out(DType::kF32, {size.rows, size.channels});
        const TestTensor post(DType::kF32, {size.rows, size.streams});
        const TestTensor comb(DType::kF32, {size.rows, size.streams, size.streams});
        DSV4_ASSERT_OK(mhc::Record(stream(), mhc::PreParams{.streams = x.view(),
                                                            .fn = weights.fn.weight(),
                                                            .scale = weights.scale.weight(),
                                                            .base = weights.base.weight(),
                                                            .rms_eps = kRmsEps,
                                                            .hc_eps = hc_eps,
                                                            .sinkhorn_iters = iterations,
                                                            .out = out.view(),
                                                            .post = post.view(),
                                                            .comb = comb.view()}));
        std::vector<float> expected_out, expected_post, expected_comb;
        const std::vector<float> values = x.ToFloats();
        for (int64_t i = 0; i < size.rows; ++i) {
          const float* v = values.data() + i * flat;
          const Mixing mixing = ExpectedMixing(v, size.streams, weights, iterations, hc_eps);
          expected_post.insert(expected_post.end(), mixing.post.begin(), mixing.post.end());
          expected_comb.insert(expected_comb.end(), mixing.comb.begin(), mixing.comb.end());
          for (int64_t k = 0; k < size.channels; ++k) {
            double sum = 0;
            for (int64_t a = 0; a < size.streams; ++a) {
              sum += static_cast<double>(mixing.in[static_cast<size_t>(a)]) * v[a * size.channels + k];
            }
            expected_out.push_back(static_cast<float>(sum));
          }
        }
        EXPECT_TRUE(IsClose(out.ToFloats(), expected_out, size.channels, kTolerance));
        EXPECT_TRUE(IsClose(post.ToFloats(), expected_post, size.streams, kTolerance));
        EXPECT_TRUE(IsClose(comb.ToFloats(), expected_comb, size.streams * size.streams, kTolerance));
        out.CheckGuards();
        post.CheckGuards();
        comb.CheckGuards();
      }
    }
  }
}

TEST_F(MhcTest, PostSumsOverTheFirstIndexOfTheMixingMatrix) {
  for (const Size size : kSizes) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const TestTensor x(dtype, {size.rows, size.streams, size.channels},
                         RandomFloats(size.rows * size.streams * size.channels, 1));
      const TestTensor y(dtype, {size.rows, size.channels}, RandomFloats(size.rows * size.channels, 2));
      const TestTensor post(DType::kF32, {size.rows, size.streams}, RandomFloats(size.rows * size.streams, 3));
      const TestTensor comb(DType::kF32, {size.rows, size.streams, size.streams},
                            RandomFloats(size.rows * size.streams * size.streams, 4));
      const TestTensor out(DType::kF32, {size.rows, size.streams, size.channels});
      DSV4_ASSERT_OK(mhc::Record(
          stream(),
          mhc::PostParams{
              .streams = x.view(), .y = y.view(), .post = post.view(), .comb = comb.view(), .out = out.view()}));
      const std::vector<float> xs = x.ToFloats(), ys = y.ToFloats(), posts = post.ToFloats(), combs = comb.ToFloats();
      std::vector<float> expected;
      for (int64_t i = 0; i < size.rows; ++i) {
        for (int64_t b = 0; b < size.streams; ++b) {
          for (int64_t k = 0; k < size.channels; ++k) {
            double sum = static_cast<double>(posts[static_cast<size_t>(i * size.streams + b)]) *
                         ys[static_cast<size_t>(i * size.channels + k)];
            for (int64_t a = 0; a < size.streams; ++a) {
              sum += static_cast<double>(combs[static_cast<size_t>((i * size.streams + a) * size.streams + b)]) *
                     xs[static_cast<size_t>((i * size.streams + a) * size.channels + k)];
            }
            expected.push_back(static_cast<float>(sum));
          }
        }
      }
      EXPECT_TRUE(IsClose(out.ToFloats(), expected, size.streams * size.channels, kTolerance));
      out.CheckGuards();
    }
  }
}

TEST_F(MhcTest, PostWorksInPlaceAndRoundsOnce) {
  const TestTensor x(DType::kBf16, {5, 4, 33}, RandomFloats(5 * 4 * 33, 1));
  const TestTensor y(DType::kBf16, {5, 33}, RandomFloats(5 * 33, 2));
  const TestTensor post(DType::kF32, {5, 4}, RandomFloats(20, 3));
  const TestTensor comb(DType::kF32, {5, 4, 4}, RandomFloats(80, 4));
  const TestTensor exact(DType::kF32, {5, 4, 33});
  const auto params = [&](const TensorView& out) {
    return mhc::PostParams{.streams = x.view(), .y = y.view(), .post = post.view(), .comb = comb.view(), .out = out};
  };
  DSV4_ASSERT_OK(mhc::Record(stream(), params(exact.view())));
  const TestTensor rounded(DType::kBf16, {5, 4, 33}, exact.ToFloats());
  DSV4_ASSERT_OK(mhc::Record(stream(), params(x.view())));
  EXPECT_TRUE(BitwiseEqual(x.view(), rounded.view()));
  x.CheckGuards();
}

TEST_F(MhcTest, PreRoundsOnceToBf16) {
  const Weights weights(24, 3, 4 * 20);
  const TestTensor x(DType::kBf16, {3, 4, 20}, RandomFloats(240, 1));
  const TestTensor exact(DType::kF32, {3, 20});
  const TestTensor out(DType::kBf16, {3, 20});
  const TestTensor post(DType::kF32, {3, 4});
  const TestTensor comb(DType::kF32, {3, 4, 4});
  mhc::PreParams params = {.streams = x.view(),
                           .fn = weights.fn.weight(),
                           .scale = weights.scale.weight(),
                           .base = weights.base.weight(),
                           .rms_eps = kRmsEps,
                           .hc_eps = kHcEps,
                           .sinkhorn_iters = 20,
                           .out = exact.view(),
                           .post = post.view(),
                           .comb = comb.view()};
  DSV4_ASSERT_OK(mhc::Record(stream(), params));
  params.out = out.view();
  DSV4_ASSERT_OK(mhc::Record(stream(), params));
  const TestTensor rounded(DType::kBf16, {3, 20}, exact.ToFloats());
  EXPECT_TRUE(BitwiseEqual(out.view(), rounded.view()));
}

TEST_F(MhcTest, HeadMixesTheRowsThatAreNamed) {
  for (const Size size : kSizes) {
    const int64_t flat = size.streams * size.channels;
    const Weights weights(size.streams, 1, flat);
    const TestTensor x(DType::kF32, {size.rows, size.streams, size.channels}, RandomFloats(size.rows * flat, 1));
    const std::vector<float> values = x.ToFloats();
    std::vector<float> expected;
    for (int64_t i = 0; i < size.rows; ++i) {
      const float* v = values.data() + i * flat;
      const std::vector<double> m = Mixes(v, weights);
      for (int64_t k = 0; k < size.channels; ++k) {
        double sum = 0;
        for (int64_t a = 0; a < size.streams; ++a) {
          sum += (Sigmoid(m[static_cast<size_t>(a)] * weights.scale.data<float>()[0] + weights.base.data<float>()[a]) +
                  kHcEps) *
                 v[a * size.channels + k];
        }
        expected.push_back(static_cast<float>(sum));
      }
    }
    mhc::HeadParams params = {.streams = x.view(),
                              .fn = weights.fn.weight(),
                              .scale = weights.scale.weight(),
                              .base = weights.base.weight(),
                              .rms_eps = kRmsEps,
                              .hc_eps = kHcEps};
    const TestTensor all(DType::kF32, {size.rows, size.channels});
    params.out = all.view();
    DSV4_ASSERT_OK(mhc::Record(stream(), params));
    EXPECT_TRUE(IsClose(all.ToFloats(), expected, size.channels, kTolerance));
    all.CheckGuards();

    // The last row, nothing, the first, the last again.
    const TestTensor rows = TestTensor::OfInts(DType::kI32, {4}, {size.rows - 1, -5, 0, size.rows - 1});
    const TestTensor out(DType::kF32, {4, size.channels});
    params.rows = rows.view();
    params.out = out.view();
    DSV4_ASSERT_OK(mhc::Record(stream(), params));
    EXPECT_TRUE(BitwiseEqual(out.view().Rows(0, 1), all.view().Rows(size.rows - 1, 1)));
    EXPECT_THAT(ToFloats(out.view().Rows(1, 1)), Each(testing::IsNan()));
    EXPECT_TRUE(BitwiseEqual(out.view().Rows(2, 1), all.view().Rows(0, 1)));
    EXPECT_TRUE(BitwiseEqual(out.view().Rows(3, 1), all.view().Rows(size.rows - 1, 1)));
    out.CheckGuards();
  }
}

TEST_F(MhcTest, GivesARowTheSameBitsInAnyCompany) {
  const Weights weights(24, 3, 4 * 19);
  const TestTensor x(DType::kF32, {33, 4, 19}, RandomFloats(33 * 76, 1));
  struct Outputs {
    explicit Outputs(int64_t n)
        : out(DType::kF32, {n, 19}),
          post(DType::kF32, {n, 4}),
          comb(DType::kF32, {n, 4, 4}),
          streams(DType::kF32, {n, 4, 19}) {}
    TestTensor out, post, comb, streams;
  };
  const auto run = [&](const TensorView& rows, const Outputs& outputs) {
    DSV4_ASSERT_OK(mhc::Record(stream(), mhc::PreParams{.streams = rows,
                                                        .fn = weights.fn.weight(),
                                                        .scale = weights.scale.weight(),
                                                        .base = weights.base.weight(),
                                                        .rms_eps = kRmsEps,
                                                        .hc_eps = kHcEps,
                                                        .sinkhorn_iters = 20,
                                                        .out = outputs.out.view(),
                                                        .post = outputs.post.view(),
                                                        .comb = outputs.comb.view()}));
    DSV4_ASSERT_OK(mhc::Record(stream(), mhc::PostParams{.streams = rows,
                                                         .y = outputs.out.view(),
                                                         .post = outputs.post.view(),
                                                         .comb = outputs.comb.view(),
                                                         .out = outputs.streams.view()}));
  };
  const Outputs all(33);
  run(x.view(), all);
  std::fill_n(x.data<float>() + 5 * 76, 20 * 76, kNan);  // rows 5 to 24, as pads may
  for (const int64_t begin : {0, 1, 3, 4}) {
    const int64_t count = 32 - begin;
    const Outputs some(count);
    run(x.view().Rows(begin, count), some);
    for (const int64_t row : {begin, int64_t{4}, int64_t{25}, int64_t{31}}) {
      EXPECT_TRUE(BitwiseEqual(some.out.view().Rows(row - begin, 1), all.out.view().Rows(row, 1)));
      EXPECT_TRUE(BitwiseEqual(some.post.view().Rows(row - begin, 1), all.post.view().Rows(row, 1)));
      EXPECT_TRUE(BitwiseEqual(some.comb.view().Rows(row - begin, 1), all.comb.view().Rows(row, 1)));
      EXPECT_TRUE(BitwiseEqual(some.streams.view().Rows(row - begin, 1), all.streams.view().Rows(row, 1)));
    }
  }
}

TEST_F(MhcTest, SinkhornSurvivesLargeLogits) {
  const TestTensor fn(DType::kF32, {8, 6}, std::vector<float>(48, 0.0f));
  const TestTensor scale(DType::kF32, {3}, {1, 1, 1});
  const TestTensor base(DType::kF32, {8}, {200, -200, 200, -200, 300, 0, 0, 300});
  const TestTensor x(DType::kF32, {1, 2, 3}, {1, 2, 3, 4, 5, 6});
  const TestTensor out(DType::kF32, {1, 3});
  const TestTensor post(DType::kF32, {1, 2});
  const TestTensor comb(DType::kF32, {1, 2, 2});
  DSV4_ASSERT_OK(mhc::Record(stream(), mhc::PreParams{.streams = x.view(),
                                                      .fn = fn.weight(),
                                                      .scale = scale.weight(),
                                                      .base = base.weight(),
                                                      .rms_eps = kRmsEps,
                                                      .hc_eps = kHcEps,
                                                      .sinkhorn_iters = 20,
                                                      .out = out.view(),
                                                      .post = post.view(),
                                                      .comb = comb.view()}));
  EXPECT_THAT(out.ToFloats(),
              ElementsAre(testing::FloatNear(1, 1e-5f), testing::FloatNear(2, 1e-5f), testing::FloatNear(3, 2e-5f)));
  EXPECT_THAT(post.ToFloats(), ElementsAre(2, 0));
  EXPECT_THAT(comb.ToFloats(), ElementsAre(testing::FloatNear(1, 1e-5f), testing::FloatNear(0, 1e-5f),
                                           testing::FloatNear(0, 1e-5f), testing::FloatNear(1, 1e-5f)));
}

struct Tensors {
  Weights weights{8, 3, 6};
  Weights head_weights{2, 1, 6};
  TestTensor x{DType::kF32, {2, 2, 3}, RandomFloats(12, 1)};
  TestTensor y{DType::kBf16, {2, 3}, RandomFloats(6, 2)};
  TestTensor rows = TestTensor::OfInts(DType::kI32, {1}, {1});
  TestTensor out{DType::kF32, {2, 3}};
  TestTensor out_streams{DType::kBf16, {2, 2, 3}};
  TestTensor head_out{DType::kF32, {1, 3}};
  TestTensor post{DType::kF32, {2, 2}};
  TestTensor comb{DType::kF32, {2, 2, 2}};

  mhc::PreParams Pre() const {
    return {.streams = x.view(),
            .fn = weights.fn.weight(),
            .scale = weights.scale.weight(),
            .base = weights.base.weight(),
            .rms_eps = kRmsEps,
            .hc_eps = kHcEps,
            .sinkhorn_iters = 20,
            .out = out.view(),
            .post = post.view(),
            .comb = comb.view()};
  }
  mhc::PostParams Post() const {
    return {.streams = x.view(), .y = y.view(), .post = post.view(), .comb = comb.view(), .out = out_streams.view()};
  }
  mhc::HeadParams Head() const {
    return {.streams = x.view(),
            .rows = rows.view(),
            .fn = head_weights.fn.weight(),
            .scale = head_weights.scale.weight(),
            .base = head_weights.base.weight(),
            .rms_eps = kRmsEps,
            .hc_eps = kHcEps,
            .out = head_out.view()};
  }
};

TEST_F(MhcTest, DeclaresWhatItTouches) {
  const Tensors t;
  const std::vector<OpRecord> pre = Capture([&] { return mhc::Record(stream(), t.Pre()); });
  ASSERT_EQ(pre.size(), 1u);
  EXPECT_EQ(pre[0].op, "mhc_pre");
  EXPECT_THAT(Declared(pre[0]),
              ElementsAre("read streams f32 [2, 2, 3]", "before wait fn f32 [8, 6]", "before wait scale f32 [3]",
                          "before wait base f32 [8]", "write out f32 [2, 3]", "write post f32 [2, 2]",
                          "write comb f32 [2, 2, 2]"));
  const std::vector<OpRecord> post = Capture([&] { return mhc::Record(stream(), t.Post()); });
  ASSERT_EQ(post.size(), 1u);
  EXPECT_EQ(post[0].op, "mhc_post");
  EXPECT_THAT(Declared(post[0]), ElementsAre("read streams f32 [2, 2, 3]", "read y bf16 [2, 3]", "read post f32 [2, 2]",
                                             "read comb f32 [2, 2, 2]", "write out bf16 [2, 2, 3]"));
  const std::vector<OpRecord> head = Capture([&] { return mhc::Record(stream(), t.Head()); });
  ASSERT_EQ(head.size(), 1u);
  EXPECT_EQ(head[0].op, "mhc_head");
  EXPECT_THAT(Declared(head[0]),
              ElementsAre("read streams f32 [2, 2, 3]", "read rows i32 [1]", "before wait fn f32 [2, 6]",
                          "before wait scale f32 [1]", "before wait base f32 [2]", "write out f32 [1, 3]"));
  // Which rows the head is of is read when the record runs.
  *t.rows.data<int32_t>() = -1;
  head[0].run();
  EXPECT_THAT(t.head_out.Bytes(), Each(0xFF));
}

TEST_F(MhcTest, RefusesBadInputByName) {
  const Tensors t;
  const auto refused = [&](auto params, const char* message, const auto& change) {
    change(params);
    EXPECT_THAT(mhc::Record(stream(), params), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused(t.Pre(), "streams: expected f32 or bf16 [any, any, any]", [](auto& p) { p.streams = TensorView(); });
  refused(t.Pre(), "streams of a row: expected at least 1", [](auto& p) { p.streams.extents[1] = 0; });
  refused(t.Pre(), "fn: expected f32 [8, 6]", [&](auto& p) { p.fn = t.head_weights.fn.weight(); });
  refused(t.Pre(), "scale: expected f32 [3]", [&](auto& p) { p.scale = t.head_weights.scale.weight(); });
  refused(t.Pre(), "base: expected f32 [8]", [](auto& p) { p.base = WeightView(); });
  refused(t.Pre(), "sinkhorn_iters: expected at least 1, got 0", [](auto& p) { p.sinkhorn_iters = 0; });
  refused(t.Pre(), "out: expected f32 or bf16 [2, 3]", [](auto& p) { p.out = p.out.FirstRows(1); });
  refused(t.Pre(), "post: expected f32 [2, 2]", [](auto& p) { p.post.dtype = DType::kBf16; });
  refused(t.Pre(), "comb: expected f32 [2, 2, 2]", [](auto& p) { p.comb = p.post; });
  refused(t.Pre(), "out and streams: ", [&](auto& p) { p.out = t.x.view().Reshape({4, 3}).FirstRows(2); });
  refused(t.Pre(), "post and comb: ", [&](auto& p) { p.post = t.comb.view().Reshape({4, 2}).FirstRows(2); });

  refused(t.Post(), "y: expected f32 or bf16 [2, 3]", [](auto& p) { p.y = p.y.FirstRows(1); });
  refused(t.Post(), "post: expected f32 [2, 2]", [](auto& p) { p.post = TensorView(); });
  refused(t.Post(), "comb: expected f32 [2, 2, 2]", [](auto& p) {
    p.comb.data = nullptr;
    p.comb.rank = 0;
  });
  refused(t.Post(), "out: expected f32 or bf16 [2, 2, 3]", [&](auto& p) { p.out = t.out.view(); });
  // In place is the very same view only.
  refused(t.Post(), "out and streams: ", [](auto& p) {
    p.out = p.streams;
    p.out.dtype = DType::kBf16;
  });
  refused(t.Post(), "out and post: ", [](auto& p) {
    p.out = p.streams;
    p.post = p.streams.Index(0).Columns(0, 2);
  });

  refused(t.Head(), "rows: expected i32 [any]", [](auto& p) { p.rows.dtype = DType::kI64; });
  refused(t.Head(), "fn: expected f32 [2, 6]", [&](auto& p) { p.fn = t.weights.fn.weight(); });
  refused(t.Head(), "scale: expected f32 [1]", [&](auto& p) { p.scale = t.weights.scale.weight(); });
  refused(t.Head(), "base: expected f32 [2]", [](auto& p) { p.base = WeightView(); });
  refused(t.Head(), "out: expected f32 or bf16 [1, 3]", [&](auto& p) { p.out = t.out.view(); });
  refused(t.Head(), "out: expected f32 or bf16 [2, 3]", [](auto& p) { p.rows = TensorView(); });
  refused(t.Head(), "out and streams: ", [](auto& p) { p.out = p.streams.Index(0).FirstRows(1); });
  for (const TestTensor* out : {&t.out, &t.out_streams, &t.head_out, &t.post, &t.comb}) {
    EXPECT_THAT(out->Bytes(), Each(0xFF));
  }
}

}  // namespace
}  // namespace dsv4
