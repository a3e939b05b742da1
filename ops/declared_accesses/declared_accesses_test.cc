#include "ops/declared_accesses/declared_accesses.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

TEST(CheckWritesDisjoint, AdmitsTensorsApartAndReadsOfOneTensorTwice) {
  const TestTensor a(DType::kF32, {4, 8});
  const TestTensor b(DType::kF32, {4, 8});
  DSV4_EXPECT_OK(CheckWritesDisjoint(AccessList()
                                         .Read("x", a.view())
                                         .Read("y", a.view())
                                         .Write("out", b.view().Columns(0, 4))
                                         .Write("out2", b.view().Columns(4, 4))));
}

TEST(CheckWritesDisjoint, AdmitsATensorThatIsReadAndWritten) {
  const TestTensor a(DType::kF32, {4, 8});
  DSV4_EXPECT_OK(CheckWritesDisjoint(AccessList().ReadWrite("x", a.view())));
}

TEST(CheckWritesDisjoint, RefusesAWriteOverAnyOtherTensor) {
  const TestTensor a(DType::kF32, {4, 8});
  const auto refused = [](const AccessList& accesses, const char* message) {
    EXPECT_THAT(CheckWritesDisjoint(accesses), StatusIs(absl::StatusCode::kInvalidArgument, message));
  };
  refused(AccessList().Read("x", a.view()).Write("out", a.view().Rows(3, 1)), "out and x: ");
  refused(AccessList().Weight("weight", WeightView(a.view())).Write("out", a.view()), "out and weight: ");
  refused(AccessList().Write("out", a.view().Columns(0, 5)).Write("lse", a.view().Columns(4, 4)), "out and lse: ");
  // Also one that is declared after it.
  refused(AccessList().Write("out", a.view()).Read("x", a.view()), "out and x: ");
}

TEST(CheckWritesDisjoint, RefusesAWriteOverItself) {
  const TestTensor a(DType::kF32, {4, 8});
  TensorView crossed = a.view().Columns(0, 4);
  crossed.strides[0] = 3;
  EXPECT_THAT(CheckWritesDisjoint(AccessList().Write("out", crossed)),
              StatusIs(absl::StatusCode::kInvalidArgument, "out: expected every element of the output"));
}

TEST(IsSameView, ComparesPointerTypeExtentsAndStrides) {
  const TestTensor a(DType::kF32, {4, 8});
  EXPECT_TRUE(IsSameView(a.view(), a.view()));
  EXPECT_FALSE(IsSameView(a.view(), a.view().FirstRows(3)));
  EXPECT_FALSE(IsSameView(a.view(), a.view().Reshape({8, 4})));
  EXPECT_FALSE(IsSameView(a.view().Rows(0, 1), a.view().Rows(1, 1)));
  TensorView other = a.view();
  other.dtype = DType::kI32;
  EXPECT_FALSE(IsSameView(a.view(), other));
  other = a.view();
  other.strides[0] = 4;
  EXPECT_FALSE(IsSameView(a.view(), other));
  // The stride of a dimension of extent 1 means nothing.
  TensorView row = a.view().FirstRows(1);
  row.strides[0] = 100;
  EXPECT_TRUE(IsSameView(a.view().FirstRows(1), row));
}

}  // namespace
}  // namespace dsv4
