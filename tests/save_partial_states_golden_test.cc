// The save on either backend against what vLLM's kernel wrote, bit for bit.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "ops/save_partial_states/compile_key.h"
#include "ops/save_partial_states/save_partial_states.h"
#include "runtime/data_files.h"
#include "runtime/device_testing.h"
#include "runtime/safetensors.h"
#include "runtime/testing.h"
#include "tests/ops_golden_case.h"

namespace dsv4 {
namespace {

class SaveGolden : public DeviceTest {};

std::vector<uint32_t> Bits(const std::vector<float>& floats) {
  std::vector<uint32_t> bits(floats.size());
  std::memcpy(bits.data(), floats.data(), floats.size() * sizeof(float));
  return bits;
}

TEST_F(SaveGolden, WritesTheBitsOfVllmsKernelAndNoOthers) {
  DSV4_ASSERT_OK_AND_ASSIGN(const std::string path, FindDataFile("tests/data/ops_golden.safetensors"));
  DSV4_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
  DSV4_ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, FindOpsGoldenCases(file));
  ASSERT_EQ(names.size(), 3u);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    DSV4_ASSERT_OK_AND_ASSIGN(const OpsGoldenCase golden, LoadOpsGoldenCase(file, name));
    const int64_t width = golden.state_width;
    const TestTensor projection(DType::kF32, {golden.tokens, 2 * width}, golden.kv_score);
    const TestTensor ape(DType::kF32, {golden.ratio, width}, golden.ape);
    const TestTensor positions = TestTensor::OfInts(DType::kI64, {golden.tokens}, golden.positions);
    const TestTensor slots = TestTensor::OfInts(DType::kI64, {golden.tokens}, golden.slot_mapping);
    TestTensor cache(DType::kF32, {golden.num_blocks, golden.block_size, 2 * width});
    std::memcpy(cache.data<float>(), golden.state_cache_before.data(), golden.state_cache_before.size() * sizeof(float));
    const save_partial_states::Params params = {.kv = projection.view().Columns(0, width),
                                                .score = projection.view().Columns(width, width),
                                                .ape = ape.weight(),
                                                .positions = positions.view(),
                                                .slots = slots.view(),
                                                .state_cache = cache.view()};
    EXPECT_GE(FindSpecialised(Dispatch(params)), 0);  // the model's own sizes
    DSV4_ASSERT_OK(Record(stream(), params));

    std::vector<uint32_t> expected = Bits(golden.state_cache_before);
    const std::vector<uint32_t> rows = Bits(golden.state_rows_after);
    int64_t live = 0;
    for (int64_t i = 0; i < golden.tokens; ++i) {
      if (!golden.IsLive(i)) continue;
      std::copy_n(rows.begin() + live * 2 * width, 2 * width, expected.begin() + golden.slot_mapping[i] * 2 * width);
      ++live;
    }
    EXPECT_EQ(live, golden.tokens - 2);
    std::vector<float> floats(expected.size());
    std::memcpy(floats.data(), cache.data<float>(), floats.size() * sizeof(float));
    EXPECT_TRUE(Bits(floats) == expected);
    cache.CheckGuards();
  }
}

}  // namespace
}  // namespace dsv4
