#include "runtime/arena.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

// Counts what is allocated and freed, and can have no room.
class CountingDevice final : public Device {
 public:
  CountingDevice() : cpu_(*CreateDevice(DeviceKind::kCpu)) {}

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override { return "counting"; }
  absl::StatusOr<void*> Allocate(int64_t bytes) override {
    ++allocations;
    if (full) return absl::ResourceExhaustedError("full");
    return cpu_->Allocate(bytes);
  }
  void Free(void* memory) override {
    ++frees;
    cpu_->Free(memory);
  }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override { return cpu_->CreateStream(); }

  int allocations = 0;
  int frees = 0;
  bool full = false;

 private:
  std::unique_ptr<Device> cpu_;
};

TEST(Arena, PlacesTensorsAlignedAndDisjointInOneAllocation) {
  CountingDevice device;
  TensorView a, b, c;
  {
    DSV4_ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(device, [&](Arena& arena) {
                                a = arena.Add(DType::kU8, {1});
                                b = arena.Add(DType::kBf16, {3, 129});
                                c = arena.Add(DType::kF32, {2, 2, 2, 2});
                              }));
    EXPECT_EQ(device.allocations, 1);
    char* base = static_cast<char*>(arena.data());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % 256, 0u);
    EXPECT_EQ(a.data, base);
    EXPECT_EQ(b.data, base + 256);
    EXPECT_EQ(c.data, base + 256 + 1024);
    EXPECT_EQ(arena.size_bytes(), 256 + 1024 + 256);
    EXPECT_EQ(b.ToString(), "bf16 [3, 129]");
    EXPECT_TRUE(b.is_contiguous());
    std::memset(arena.data(), 1, static_cast<size_t>(arena.size_bytes()));
  }
  EXPECT_EQ(device.frees, 1);
}

TEST(Arena, TwoPassesSeeTheSameOffsets) {
  CountingDevice device;
  std::vector<std::vector<TensorView>> passes;
  DSV4_ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(device, [&](Arena& arena) {
                              auto& views = passes.emplace_back();
                              for (int64_t rows : {1, 2, 3, 31, 32, 33}) views.push_back(arena.Add(DType::kBf16, {rows, 7}));
                            }));
  ASSERT_EQ(passes.size(), 2u);
  for (size_t i = 0; i < passes[0].size(); ++i) {
    EXPECT_FALSE(passes[0][i].empty());
    EXPECT_EQ(passes[0][i].As<char>() - passes[0][0].As<char>(), passes[1][i].As<char>() - passes[1][0].As<char>());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(passes[1][i].data) % Arena::kAlignment, 0u);
  }
}

TEST(Arena, EmptyTensorTakesNoBytes) {
  CountingDevice device;
  TensorView none, one;
  DSV4_ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(device, [&](Arena& arena) {
                              none = arena.Add(DType::kF32, {0, 64});
                              one = arena.Add(DType::kF32, {1});
                            }));
  EXPECT_EQ(arena.size_bytes(), 256);
  EXPECT_EQ(none.num_elements(), 0);
  EXPECT_EQ(one.data, arena.data());
}

TEST(Arena, EmptyLayoutAllocatesNothing) {
  CountingDevice device;
  DSV4_ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(device, [](Arena&) {}));
  EXPECT_EQ(device.allocations, 0);
  EXPECT_EQ(arena.size_bytes(), 0);
}

TEST(Arena, MoveKeepsAddressesAndFreesOnce) {
  CountingDevice device;
  TensorView view;
  {
    DSV4_ASSERT_OK_AND_ASSIGN(Arena first,
                              Arena::Create(device, [&](Arena& arena) { view = arena.Add(DType::kI64, {4}); }));
    Arena second = std::move(first);
    EXPECT_EQ(second.data(), view.data);
    EXPECT_EQ(first.data(), nullptr);
    DSV4_ASSERT_OK_AND_ASSIGN(Arena third, Arena::Create(device, [](Arena& arena) { arena.Add(DType::kI64, {4}); }));
    third = std::move(second);
    EXPECT_EQ(device.frees, 1);
    EXPECT_EQ(third.data(), view.data);
    EXPECT_EQ(third.size_bytes(), 256);
  }
  EXPECT_EQ(device.frees, 2);
}

TEST(Arena, RefusesALayoutThatChangesBetweenPasses) {
  CountingDevice device;
  int pass = 0;
  EXPECT_THAT(Arena::Create(device,
                            [&](Arena& arena) {
                              const TensorView view = arena.Add(DType::kU8, {pass++ == 0 ? 256 : 257});
                              if (pass == 2) {
                                EXPECT_TRUE(view.empty());
                              }
                            }),
              StatusIs(absl::StatusCode::kInternal, "u8 [257] is past the measured size of 256 bytes"));
  pass = 0;
  EXPECT_THAT(Arena::Create(device, [&](Arena& arena) { arena.Add(DType::kU8, {pass++ == 0 ? 257 : 256}); }),
              StatusIs(absl::StatusCode::kInternal, "measured as 512 bytes and placed as 256"));
  EXPECT_EQ(device.frees, device.allocations);
}

TEST(Arena, RefusesNegativeAndUncountableSizes) {
  CountingDevice device;
  EXPECT_THAT(Arena::Create(device, [](Arena& arena) { arena.Add(DType::kF32, {2, -1}); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "f32 [2, -1]"));
  EXPECT_THAT(Arena::Create(device, [](Arena& arena) { arena.Add(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}); }),
              StatusIs(absl::StatusCode::kInvalidArgument, "f32 [1099511627776, 1099511627776]"));
  EXPECT_THAT(Arena::Create(device,
                            [](Arena& arena) {
                              arena.Add(DType::kU8, {int64_t{1} << 62});
                              arena.Add(DType::kU8, {int64_t{1} << 62});
                            }),
              StatusIs(absl::StatusCode::kInvalidArgument, "u8 [4611686018427387904]"));
  EXPECT_EQ(device.allocations, 0);
}

TEST(Arena, ReportsAFullDevice) {
  CountingDevice device;
  device.full = true;
  EXPECT_THAT(Arena::Create(device, [](Arena& arena) { arena.Add(DType::kF32, {1}); }),
              StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_EQ(device.frees, 0);
}

TEST(Arena, NothingCanBeAddedAfterwards) {
  CountingDevice device;
  DSV4_ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(device, [](Arena& arena) { arena.Add(DType::kF32, {1}); }));
  EXPECT_TRUE(arena.Add(DType::kF32, {1}).empty());
  EXPECT_TRUE(Arena().Add(DType::kF32, {1}).empty());
}

}  // namespace
}  // namespace dsv4
