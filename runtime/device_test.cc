#include "runtime/device.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/stream.h"
#include "runtime/testing.h"

namespace dsv4 {
namespace {

using ::testing::ElementsAre;

class RecordList final : public RecordSink {
 public:
  absl::Status Append(OpRecord record) override {
    if (refuse) return absl::ResourceExhaustedError("the list is full");
    records.push_back(std::move(record));
    return absl::OkStatus();
  }
  std::vector<OpRecord> records;
  bool refuse = false;
};

class CpuDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    DSV4_ASSERT_OK_AND_ASSIGN(device_, CreateDevice(DeviceKind::kCpu));
    DSV4_ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream());
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(CpuDeviceTest, SaysWhatItIs) {
  EXPECT_EQ(device_->kind(), DeviceKind::kCpu);
  EXPECT_EQ(device_->name(), "cpu");
  EXPECT_EQ(&stream_->device(), device_.get());
}

TEST_F(CpuDeviceTest, AllocatesAlignedMemory) {
  for (int64_t bytes : {0, 1, 255, 256, 257, 100000}) {
    DSV4_ASSERT_OK_AND_ASSIGN(void* memory, device_->Allocate(bytes));
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
    std::memset(memory, 1, static_cast<size_t>(bytes));
    device_->Free(memory);
  }
  device_->Free(nullptr);
}

TEST_F(CpuDeviceTest, NamesTheSizeThatDoesNotFit) {
  EXPECT_THAT(device_->Allocate(int64_t{1} << 60),
              StatusIs(absl::StatusCode::kResourceExhausted, "1152921504606846976 bytes"));
  EXPECT_THAT(device_->Allocate(INT64_MAX), StatusIs(absl::StatusCode::kResourceExhausted, "9223372036854775807"));
  EXPECT_THAT(device_->Allocate(-1), StatusIs(absl::StatusCode::kInvalidArgument, "got -1"));
}

TEST_F(CpuDeviceTest, StreamCopiesAndFills) {
  uint8_t source[4] = {1, 2, 3, 4};
  uint8_t device_bytes[4] = {};
  uint8_t back[4] = {};
  DSV4_ASSERT_OK(stream_->CopyToDevice(device_bytes, source, 4));
  DSV4_ASSERT_OK(stream_->Fill(device_bytes + 1, 9, 2));
  DSV4_ASSERT_OK(stream_->CopyToHost(back, device_bytes, 3));
  DSV4_ASSERT_OK(stream_->Synchronize());
  EXPECT_THAT(back, ElementsAre(1, 9, 9, 0));
  DSV4_EXPECT_OK(stream_->CopyToDevice(nullptr, nullptr, 0));
}

TEST_F(CpuDeviceTest, StreamRefusesBadCopies) {
  uint8_t byte = 0;
  EXPECT_THAT(stream_->CopyToDevice(&byte, &byte, -1), StatusIs(absl::StatusCode::kInvalidArgument, "copy to device"));
  EXPECT_THAT(stream_->CopyToHost(&byte, nullptr, 1), StatusIs(absl::StatusCode::kInvalidArgument, "copy to host"));
  EXPECT_THAT(stream_->CopyToHost(nullptr, &byte, 1), StatusIs(absl::StatusCode::kInvalidArgument, "null pointer"));
  EXPECT_THAT(stream_->Fill(nullptr, 0, 1), StatusIs(absl::StatusCode::kInvalidArgument, "fill"));
}

TEST_F(CpuDeviceTest, RecordRunsAtOnceWithoutASink) {
  int runs = 0;
  DSV4_ASSERT_OK(stream_->Enqueue({.op = "count", .accesses = {}, .run = [&] { ++runs; }}));
  EXPECT_EQ(runs, 1);
}

TEST_F(CpuDeviceTest, RecordGoesToTheSinkAndRunsAtReplay) {
  RecordList list;
  TestTensor in(DType::kF32, {4}), out(DType::kF32, {4}), norm(DType::kF32, {4});
  int runs = 0;
  stream_->set_sink(&list);
  DSV4_ASSERT_OK(stream_->Enqueue({.op = "first",
                                   .accesses = AccessList()
                                                   .Weight("norm", norm.weight())
                                                   .Read("in", in.view())
                                                   .Read("absent", TensorView())
                                                   .ReadWrite("out", out.view()),
                                   .waits = false,
                                   .run = [&] { ++runs; }}));
  DSV4_ASSERT_OK(stream_->Enqueue({.op = "second", .accesses = {}, .run = [&] { runs += 10; }}));
  EXPECT_EQ(runs, 0);
  stream_->set_sink(nullptr);
  DSV4_ASSERT_OK(stream_->Enqueue({.op = "third", .accesses = {}, .run = [&] { runs += 100; }}));
  EXPECT_EQ(runs, 100);

  ASSERT_EQ(list.records.size(), 2u);
  EXPECT_EQ(list.records[0].op, "first");
  EXPECT_FALSE(list.records[0].waits);
  EXPECT_TRUE(list.records[1].waits);
  const std::vector<Access>& accesses = list.records[0].accesses.accesses();
  ASSERT_EQ(accesses.size(), 4u);
  EXPECT_EQ(accesses[0].name, "norm");
  EXPECT_EQ(accesses[0].kind, AccessKind::kReadBeforeWait);
  EXPECT_EQ(accesses[1].name, "in");
  EXPECT_EQ(accesses[1].kind, AccessKind::kRead);
  EXPECT_EQ(accesses[2].kind, AccessKind::kRead);
  EXPECT_EQ(accesses[3].kind, AccessKind::kWrite);
  EXPECT_EQ(accesses[3].view.data, out.view().data);
  for (int replay = 0; replay < 2; ++replay) {
    for (const OpRecord& record : list.records) record.run();
  }
  EXPECT_EQ(runs, 122);
}

TEST_F(CpuDeviceTest, SinkErrorReachesTheOp) {
  RecordList list;
  list.refuse = true;
  stream_->set_sink(&list);
  EXPECT_THAT(stream_->Enqueue({.op = "op", .accesses = {}, .run = [] { FAIL(); }}),
              StatusIs(absl::StatusCode::kResourceExhausted, "full"));
}

TEST_F(CpuDeviceTest, RecordWithoutWorkIsRefusedByName) {
  EXPECT_THAT(stream_->Enqueue({.op = "rms_norm", .accesses = {}, .run = nullptr}),
              StatusIs(absl::StatusCode::kInvalidArgument, "rms_norm"));
}

TEST_F(CpuDeviceTest, CopiesFillsAndSynchronisationAreNeverRecorded) {
  RecordList list;
  uint8_t byte = 5;
  stream_->set_sink(&list);
  EXPECT_THAT(stream_->Fill(&byte, 0, 1), StatusIs(absl::StatusCode::kFailedPrecondition, "fill"));
  EXPECT_THAT(stream_->CopyToDevice(&byte, &byte, 1), StatusIs(absl::StatusCode::kFailedPrecondition, "copy"));
  EXPECT_THAT(stream_->CopyToHost(&byte, &byte, 1), StatusIs(absl::StatusCode::kFailedPrecondition, "copy"));
  EXPECT_THAT(stream_->Synchronize(), StatusIs(absl::StatusCode::kFailedPrecondition, "synchronize"));
  EXPECT_EQ(byte, 5);
  EXPECT_TRUE(list.records.empty());
}

// A device that is not the CPU's.
class OtherDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return "other"; }
  absl::StatusOr<void*> Allocate(int64_t) override { return absl::UnimplementedError("other"); }
  void Free(void*) override {}
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream() override { return absl::UnimplementedError("other"); }
};
class OtherStream final : public Stream {
 public:
  using Stream::Stream;
  absl::Status CopyToDevice(void*, const void*, int64_t) override { return absl::OkStatus(); }
  absl::Status CopyToHost(void*, const void*, int64_t) override { return absl::OkStatus(); }
  absl::Status Fill(void*, uint8_t, int64_t) override { return absl::OkStatus(); }
  absl::Status Synchronize() override { return synchronize_status; }
  absl::Status synchronize_status;
};

TEST(Stream, LaunchesOnCudaInsteadOfRunning) {
  OtherDevice device;
  OtherStream stream(device);
  int launches = 0;
  const auto enqueue = [&](absl::Status result) {
    return stream.Enqueue({.op = "op", .accesses = {}, .run = [] { FAIL(); }, .launch = [&launches, result] {
                             ++launches;
                             return result;
                           }});
  };
  DSV4_EXPECT_OK(enqueue(absl::OkStatus()));
  EXPECT_EQ(launches, 1);
  EXPECT_THAT(enqueue(absl::InternalError("launch failed")), StatusIs(absl::StatusCode::kInternal, "launch failed"));
}

TEST(Stream, NamesAnOpWithoutACudaKernel) {
  OtherDevice device;
  OtherStream stream(device);
  EXPECT_THAT(stream.Enqueue({.op = "rms_norm", .accesses = {}, .run = [] { FAIL(); }}),
              StatusIs(absl::StatusCode::kInternal, "rms_norm: no cuda kernel"));
}

TEST(Stream, WaitsForEachRecordWhenBlocking) {
  OtherDevice device;
  OtherStream stream(device);
  const auto enqueue = [&] {
    return stream.Enqueue({.op = "op", .accesses = {}, .run = nullptr, .launch = [] { return absl::OkStatus(); }});
  };
  stream.synchronize_status = absl::OutOfRangeError("bad slot");
  DSV4_EXPECT_OK(enqueue());
  stream.set_blocking(true);
  EXPECT_THAT(enqueue(), StatusIs(absl::StatusCode::kOutOfRange, "bad slot"));
}

}  // namespace
}  // namespace dsv4
