// The CUDA device, stream and launch layer. On a GPU only, but for the message without one.
#include "runtime/cuda_device.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/cuda_status.h"
#include "runtime/device_testing.h"
#include "runtime/launch.h"
#include "runtime/testing.h"
#include "runtime/warmup.h"

namespace dsv4 {
namespace {

class CudaDeviceTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (on_cpu()) GTEST_SKIP() << "of a gpu";
    stream().set_blocking(false);
  }
};

TEST(CudaDevice, SaysWhyThereIsNone) {
  const absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice(DeviceKind::kCuda);
  if (device.ok()) GTEST_SKIP() << "there is one";
  EXPECT_THAT(device, StatusIs(absl::StatusCode::kUnavailable, "cuda device: "));
}

TEST(CudaStatus, MapsErrorsAndNamesTheCall) {
  DSV4_EXPECT_OK(CudaStatus("op", cudaSuccess));
  EXPECT_THAT(CudaStatus("op", cudaErrorMemoryAllocation),
              StatusIs(absl::StatusCode::kResourceExhausted, "op: cudaErrorMemoryAllocation: "));
  EXPECT_THAT(CudaStatus("op", cudaErrorNoDevice), StatusIs(absl::StatusCode::kUnavailable, "op: cudaErrorNoDevice: "));
  EXPECT_THAT(CudaStatus("op", cudaErrorIllegalAddress),
              StatusIs(absl::StatusCode::kInternal, "op: cudaErrorIllegalAddress: "));
}

TEST(LaunchLayer, RefusesAStreamOfTheCpu) {
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device, CreateDevice(DeviceKind::kCpu));
  DSV4_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, device->CreateStream());
  EXPECT_THAT(LaunchKernel("rms_norm", *stream, nullptr, {}, 1, 0, nullptr),
              StatusIs(absl::StatusCode::kInternal, "rms_norm: a kernel cannot be launched on cpu"));
}

TEST_F(CudaDeviceTest, SaysWhatItIs) {
  EXPECT_EQ(device().kind(), DeviceKind::kCuda);
  EXPECT_FALSE(device().name().empty());
  EXPECT_EQ(&stream().device(), &device());
}

TEST_F(CudaDeviceTest, AllocatesAlignedMemory) {
  for (const int64_t bytes : {0, 1, 255, 257, 100000}) {
    DSV4_ASSERT_OK_AND_ASSIGN(void* memory, device().Allocate(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    device().Free(memory);
    DSV4_ASSERT_OK_AND_ASSIGN(void* host, device().AllocateHost(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(host) % 256, 0u);
    std::memset(host, 1, static_cast<size_t>(bytes));
    device().FreeHost(host);
  }
  device().Free(nullptr);
}

TEST_F(CudaDeviceTest, NamesTheSizeThatDoesNotFit) {
  EXPECT_THAT(device().Allocate(int64_t{1} << 50),
              StatusIs(absl::StatusCode::kResourceExhausted, "1125899906842624 bytes"));
  EXPECT_THAT(device().Allocate(-1), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
  DSV4_ASSERT_OK_AND_ASSIGN(void* memory, device().Allocate(16));  // and goes on
  device().Free(memory);
}

TEST_F(CudaDeviceTest, CopiesAndFills) {
  DSV4_ASSERT_OK_AND_ASSIGN(void* memory, device().Allocate(4));
  const uint8_t source[4] = {1, 2, 3, 4};
  uint8_t back[4] = {};
  DSV4_ASSERT_OK(stream().CopyToDevice(memory, source, 4));
  DSV4_ASSERT_OK(stream().Fill(static_cast<uint8_t*>(memory) + 1, 9, 2));
  DSV4_ASSERT_OK(stream().CopyToHost(back, memory, 4));
  DSV4_ASSERT_OK(stream().Synchronize());
  EXPECT_THAT(back, testing::ElementsAre(1, 9, 9, 4));
  EXPECT_THAT(stream().CopyToHost(back, nullptr, 1), StatusIs(absl::StatusCode::kInvalidArgument, "null pointer"));
  EXPECT_THAT(stream().Fill(memory, 0, -1), StatusIs(absl::StatusCode::kInvalidArgument, "fill"));
  device().Free(memory);
}

TEST_F(CudaDeviceTest, CopiesAndSynchronisationAreRefusedDuringACapture) {
  DSV4_ASSERT_OK_AND_ASSIGN(void* memory, device().Allocate(4));
  const cudaStream_t cuda_stream = CudaStreamOf(stream());
  ASSERT_EQ(cudaStreamBeginCapture(cuda_stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  uint8_t byte = 0;
  EXPECT_THAT(stream().CopyToHost(&byte, memory, 1), StatusIs(absl::StatusCode::kFailedPrecondition, "copy to host"));
  EXPECT_THAT(stream().Fill(memory, 0, 1), StatusIs(absl::StatusCode::kFailedPrecondition, "fill"));
  EXPECT_THAT(stream().Synchronize(), StatusIs(absl::StatusCode::kFailedPrecondition, "synchronize"));
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(cuda_stream, &graph), cudaSuccess);  // the capture survived
  cudaGraphDestroy(graph);
  device().Free(memory);
}

TEST_F(CudaDeviceTest, LaunchErrorsNameTheOp) {
  EXPECT_THAT(LaunchKernel("rms_norm", stream(), nullptr, {.x = int64_t{1} << 31}, 1, 0, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, "rms_norm: a grid of 2147483648 x 1 x 1 blocks"));
  EXPECT_THAT(LaunchKernel("rms_norm", stream(), nullptr, {.x = 1}, 1, 0, nullptr),
              StatusIs(absl::StatusCode::kInternal, "rms_norm: cudaError"));
  EXPECT_THAT(LoadKernel("rms_norm", nullptr), StatusIs(absl::StatusCode::kInternal, "rms_norm: cudaError"));
  DSV4_EXPECT_OK(LaunchKernel("rms_norm", stream(), nullptr, {.x = 0}, 1, 0, nullptr));  // nothing to do
  DSV4_EXPECT_OK(stream().Synchronize());
}

TEST_F(CudaDeviceTest, WarmUpRunsAndMayBeRepeated) {
  DSV4_EXPECT_OK(WarmUp(device()));
  DSV4_EXPECT_OK(WarmUp(device()));
}

}  // namespace
}  // namespace dsv4
