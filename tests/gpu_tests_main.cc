// Runs the tests of both backends on a GPU: gpu_tests [--gtest_filter=...]. Without one they are skipped.
#include <cstdio>

#include "gtest/gtest.h"
#include "runtime/device.h"
#include "runtime/device_testing.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  dsv4::SetTestDevice(dsv4::DeviceKind::kCuda);
  const auto device = dsv4::CreateDevice(dsv4::DeviceKind::kCuda);
  if (device.ok()) {
    std::printf("on %s\n", (*device)->name().c_str());
  } else {
    std::printf("%s: everything that needs a gpu is skipped\n", device.status().ToString().c_str());
  }
  return RUN_ALL_TESTS();
}
