#include "runtime/testing.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>

#include "runtime/dtype.h"

namespace dsv4 {
namespace {

constexpr uint8_t kGuardByte = 0xA5;
constexpr int64_t kAlignment = 256;

void* AllocateOnHeap(int64_t bytes) { return std::aligned_alloc(kAlignment, static_cast<size_t>(bytes)); }

TestMemory test_memory = {AllocateOnHeap, std::free};

// Calls visit(address, flat index) for every element of the view.
template <typename Visit>
void ForEachElement(const TensorView& view, const Visit& visit) {
  const int64_t count = view.num_elements();
  const int64_t element_bytes = DTypeBytes(view.dtype);
  for (int64_t flat = 0; flat < count; ++flat) {
    int64_t rest = flat;
    int64_t offset = 0;
    for (int i = view.rank - 1; i >= 0; --i) {
      offset += rest % view.extents[i] * view.strides[i];
      rest /= view.extents[i];
    }
    visit(static_cast<uint8_t*>(view.data) + offset * element_bytes, flat);
  }
}

template <typename T>
T Load(const uint8_t* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

template <typename T>
void Store(uint8_t* address, T value) {
  std::memcpy(address, &value, sizeof(value));
}

std::string IndexText(const TensorView& view, int64_t flat) {
  std::string text = "]";
  for (int i = view.rank - 1; i >= 0; --i) {
    text = std::to_string(flat % view.extents[i]) + (text == "]" ? "" : ", ") + text;
    flat /= view.extents[i];
  }
  return "[" + text;
}

double Ratio(double squared_difference, double squared_norm) {
  return squared_difference == 0 ? 0 : std::sqrt(squared_difference / squared_norm);  // x / 0 is infinity
}

double DifferenceOf(float actual, float expected) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return 0;
  const double difference = std::fabs(static_cast<double>(actual) - static_cast<double>(expected));
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

double SquareOfFinite(float value) {
  return std::isfinite(value) ? static_cast<double>(value) * static_cast<double>(value) : 0;
}

}  // namespace

std::vector<float> RandomFloats(int64_t count, uint64_t seed, float standard_deviation) {
  std::mt19937_64 engine(seed);
  auto uniform = [&] { return (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53; };
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    value = standard_deviation * static_cast<float>(radius * std::cos(2 * std::numbers::pi * uniform()));
  }
  return values;
}

std::vector<float> ToFloats(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  ForEachElement(view, [&](const uint8_t* address, int64_t flat) {
    float& value = values[static_cast<size_t>(flat)];
    switch (view.dtype) {
      case DType::kF32:
        value = Load<float>(address);
        break;
      case DType::kBf16:
        value = ToFloat(Load<Bf16>(address));
        break;
      case DType::kE4m3:
        value = ToFloat(Load<E4m3>(address));
        break;
      case DType::kE8m0:
        value = ToFloat(Load<E8m0>(address));
        break;
      case DType::kI64:
        value = static_cast<float>(Load<int64_t>(address));
        break;
      case DType::kI32:
        value = static_cast<float>(Load<int32_t>(address));
        break;
      case DType::kU8:
        value = static_cast<float>(*address);
        break;
      case DType::kE2m1x2:
        ADD_FAILURE() << "ToFloats does not take " << view.ToString();
        break;
    }
  });
  return values;
}

void SetFloats(const TensorView& view, const std::vector<float>& values) {
  ASSERT_EQ(static_cast<int64_t>(values.size()), view.num_elements()) << view.ToString();
  ASSERT_TRUE(view.dtype == DType::kF32 || view.dtype == DType::kBf16 || view.dtype == DType::kE4m3)
      << view.ToString();
  ForEachElement(view, [&](uint8_t* address, int64_t flat) {
    const float value = values[static_cast<size_t>(flat)];
    if (view.dtype == DType::kF32) {
      Store(address, value);
    } else if (view.dtype == DType::kBf16) {
      Store(address, Bf16FromFloat(value));
    } else {
      Store(address, E4m3FromFloat(value));
    }
  });
}

std::vector<int64_t> ToInts(const TensorView& view) {
  std::vector<int64_t> values(static_cast<size_t>(view.num_elements()));
  ForEachElement(view, [&](const uint8_t* address, int64_t flat) {
    int64_t& value = values[static_cast<size_t>(flat)];
    if (view.dtype == DType::kI64) {
      value = Load<int64_t>(address);
    } else if (view.dtype == DType::kI32) {
      value = Load<int32_t>(address);
    } else if (view.dtype == DType::kU8) {
      value = *address;
    } else {
      ADD_FAILURE() << "ToInts does not take " << view.ToString();
    }
  });
  return values;
}

void SetInts(const TensorView& view, const std::vector<int64_t>& values) {
  ASSERT_EQ(static_cast<int64_t>(values.size()), view.num_elements()) << view.ToString();
  ASSERT_TRUE(view.dtype == DType::kI64 || view.dtype == DType::kI32 || view.dtype == DType::kU8) << view.ToString();
  ForEachElement(view, [&](uint8_t* address, int64_t flat) {
    const int64_t value = values[static_cast<size_t>(flat)];
    if (view.dtype == DType::kI64) {
      Store(address, value);
    } else if (view.dtype == DType::kI32) {
      Store(address, static_cast<int32_t>(value));
    } else {
      Store(address, static_cast<uint8_t>(value));
    }
  });
}

void SetTestMemory(const TestMemory& memory) {
  test_memory = memory.allocate != nullptr ? memory : TestMemory{AllocateOnHeap, std::free};
}

TestTensor::TestTensor(DType dtype, std::initializer_list<int64_t> extents) {
  view_ = TensorView::Contiguous(nullptr, dtype, extents);
  const int64_t bytes = 2 * kGuardBytes + (view_.num_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  memory_ = {static_cast<uint8_t*>(test_memory.allocate(bytes)), test_memory.free};
  if (memory_ == nullptr) std::abort();  // a test that asks for this much is wrong
  std::memset(memory_.get(), kGuardByte, static_cast<size_t>(bytes));
  view_.data = memory_.get() + kGuardBytes;
  Poison();
}

TestTensor::TestTensor(DType dtype, std::initializer_list<int64_t> extents, const std::vector<float>& values)
    : TestTensor(dtype, extents) {
  Set(values);
}

TestTensor TestTensor::OfInts(DType dtype, std::initializer_list<int64_t> extents,
                              const std::vector<int64_t>& values) {
  TestTensor tensor(dtype, extents);
  SetInts(tensor.view_, values);
  return tensor;
}

void TestTensor::Poison(uint8_t byte) { std::memset(view_.data, byte, static_cast<size_t>(view_.num_bytes())); }

std::vector<uint8_t> TestTensor::Bytes() const {
  const uint8_t* begin = view_.As<uint8_t>();
  return std::vector<uint8_t>(begin, begin + view_.num_bytes());
}

testing::AssertionResult TestTensor::GuardsIntact() const {
  const int64_t size = view_.num_bytes();
  for (int64_t i = -kGuardBytes; i < size + kGuardBytes; ++i) {
    if (i == 0) i = size;
    const uint8_t byte = memory_[static_cast<size_t>(kGuardBytes + i)];
    if (byte == kGuardByte) continue;
    return testing::AssertionFailure() << view_.ToString() << " has " << size << " bytes, and byte " << i
                                       << " was written (" << static_cast<int>(byte) << ")";
  }
  return testing::AssertionSuccess();
}

double RelativeL2(const std::vector<float>& actual, const std::vector<float>& expected) {
  return Compare(actual, expected, static_cast<int64_t>(expected.size())).relative_l2;
}

std::ostream& operator<<(std::ostream& out, const Difference& difference) {
  return out << "relative L2 " << difference.relative_l2 << "; worst row " << difference.worst_row << " with "
             << difference.worst_row_relative_l2 << "; worst there column " << difference.worst_column << ": got "
             << difference.actual << ", expected " << difference.expected;
}

Difference Compare(const std::vector<float>& actual, const std::vector<float>& expected, int64_t row_size) {
  Difference worst;
  if (expected.empty() && actual.empty()) return worst;
  const bool fits = actual.size() == expected.size() && row_size > 0 &&
                    static_cast<int64_t>(expected.size()) % row_size == 0;
  if (!fits) {
    ADD_FAILURE() << "cannot compare " << actual.size() << " values with " << expected.size() << " in rows of "
                  << row_size;
    worst.relative_l2 = worst.worst_row_relative_l2 = std::numeric_limits<double>::infinity();
    return worst;
  }
  double all_difference = 0;
  double all_norm = 0;
  const int64_t rows = static_cast<int64_t>(expected.size()) / row_size;
  for (int64_t row = 0; row < rows; ++row) {
    double row_difference = 0;
    double row_norm = 0;
    double largest = -1;
    int64_t column_of_largest = 0;
    for (int64_t column = 0; column < row_size; ++column) {
      const size_t i = static_cast<size_t>(row * row_size + column);
      const double difference = DifferenceOf(actual[i], expected[i]);
      row_difference += difference * difference;
      row_norm += SquareOfFinite(expected[i]);
      if (difference > largest) {
        largest = difference;
        column_of_largest = column;
      }
    }
    all_difference += row_difference;
    all_norm += row_norm;
    const double ratio = Ratio(row_difference, row_norm);
    if (row == 0 || ratio > worst.worst_row_relative_l2) {
      const size_t i = static_cast<size_t>(row * row_size + column_of_largest);
      worst.worst_row = row;
      worst.worst_row_relative_l2 = ratio;
      worst.worst_column = column_of_largest;
      worst.actual = actual[i];
      worst.expected = expected[i];
    }
  }
  worst.relative_l2 = Ratio(all_difference, all_norm);
  return worst;
}

testing::AssertionResult IsClose(const std::vector<float>& actual, const std::vector<float>& expected,
                                 int64_t row_size, double tolerance) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure() << actual.size() << " values, expected " << expected.size();
  }
  const Difference difference = Compare(actual, expected, row_size);
  if (difference.worst_row_relative_l2 <= tolerance) return testing::AssertionSuccess() << difference;
  return testing::AssertionFailure() << difference << " (tolerance " << tolerance << ")";
}

testing::AssertionResult BitwiseEqual(const TensorView& actual, const TensorView& expected) {
  bool same_shape = actual.dtype == expected.dtype && actual.rank == expected.rank;
  for (int i = 0; same_shape && i < actual.rank; ++i) same_shape = actual.extents[i] == expected.extents[i];
  if (!same_shape) return testing::AssertionFailure() << actual.ToString() << ", expected " << expected.ToString();

  std::vector<const uint8_t*> addresses(static_cast<size_t>(expected.num_elements()));
  ForEachElement(expected, [&](const uint8_t* address, int64_t flat) { addresses[static_cast<size_t>(flat)] = address; });
  const size_t element_bytes = static_cast<size_t>(DTypeBytes(actual.dtype));
  int64_t first = -1;
  int64_t count = 0;
  ForEachElement(actual, [&](const uint8_t* address, int64_t flat) {
    if (std::memcmp(address, addresses[static_cast<size_t>(flat)], element_bytes) == 0) return;
    if (count++ == 0) first = flat;
  });
  if (count == 0) return testing::AssertionSuccess();
  testing::AssertionResult failure = testing::AssertionFailure();
  failure << count << " of " << actual.num_elements() << " elements of " << actual.ToString() << " differ, the first at "
          << IndexText(actual, first);
  if (actual.dtype != DType::kE2m1x2) {
    failure << ": got " << ToFloats(actual)[static_cast<size_t>(first)] << ", expected "
            << ToFloats(expected)[static_cast<size_t>(first)];
  }
  return failure;
}

}  // namespace dsv4
