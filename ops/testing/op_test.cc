#include "ops/testing/op_test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

class ListSink : public RecordSink {
 public:
  absl::Status Append(OpRecord record) override {
    records.push_back(std::move(record));
    return absl::OkStatus();
  }
  std::vector<OpRecord> records;
};

int64_t Blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// The code in [0, codes) whose value is nearest to a magnitude; of two equally near the even one. Values ascend.
uint8_t NearestCode(double magnitude, int codes, double (*value)(uint8_t)) {
  int best = 0;
  for (int code = 1; code < codes; ++code) {
    const double distance = std::abs(value(static_cast<uint8_t>(code)) - magnitude);
    const double best_distance = std::abs(value(static_cast<uint8_t>(best)) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

}  // namespace

std::vector<OpRecord> OpTest::Capture(const std::function<absl::Status()>& record) {
  ListSink sink;
  stream().set_sink(&sink);
  DSV4_EXPECT_OK(record());
  stream().set_sink(nullptr);
  return sink.records;
}

Stream& OpTest::cpu_stream() {
  if (cpu_stream_ == nullptr) {
    cpu_device_ = *CreateDevice(DeviceKind::kCpu);
    cpu_stream_ = *cpu_device_->CreateStream();
  }
  return *cpu_stream_;
}

std::vector<std::string> Declared(const OpRecord& record) {
  std::vector<std::string> declared;
  for (const Access& access : record.accesses.accesses()) {
    const char* kind = access.kind == AccessKind::kRead    ? "read "
                       : access.kind == AccessKind::kWrite ? "write "
                                                           : "before wait ";
    declared.push_back(StrCat(kind, access.name, " ", access.view.ToString()));
  }
  return declared;
}

TestWeight::TestWeight(const TestWeightOptions& options) : options_(options) {
  const int64_t matrices = std::max<int64_t>(options.stack, 1);
  const int64_t rows = options.rows;
  const int64_t cols = options.cols;
  const bool packed = options.dtype == DType::kE2m1x2;
  const bool scaled = packed || options.dtype == DType::kE4m3;
  const int64_t stored_cols = packed ? cols / 2 : cols;
  const int64_t scale_rows = Blocks(rows, options.block_rows);
  const int64_t scale_cols = Blocks(cols, options.block_cols);
  if (options.stack > 0) {
    values_ = std::make_unique<TestTensor>(options.dtype, std::initializer_list<int64_t>{matrices, rows, stored_cols});
    scales_ = std::make_unique<TestTensor>(options.scale_dtype,
                                           std::initializer_list<int64_t>{matrices, scale_rows, scale_cols});
  } else {
    values_ = std::make_unique<TestTensor>(options.dtype, std::initializer_list<int64_t>{rows, stored_cols});
    scales_ = std::make_unique<TestTensor>(options.scale_dtype, std::initializer_list<int64_t>{scale_rows, scale_cols});
  }
  view_.values = values_->weight();
  if (scaled) {
    view_.scales = scales_->weight();
    view_.block_rows = options.block_rows;
    view_.block_cols = options.block_cols;
  }

  // Scales of a few different sizes about 2^-1; stored values of about twice the deviation.
  std::vector<double> scale_values(static_cast<size_t>(matrices * scale_rows * scale_cols), 1.0);
  if (scaled) {
    const std::vector<float> random =
        RandomFloats(static_cast<int64_t>(scale_values.size()), options.seed * 1000003 + 17);
    for (size_t i = 0; i < scale_values.size(); ++i) {
      if (options.scale_dtype == DType::kE8m0) {
        const int exponent = std::clamp(static_cast<int>(std::lround(random[i])), -2, 2) - 1;
        scales_->data<uint8_t>()[i] = static_cast<uint8_t>(127 + exponent);
        scale_values[i] = std::ldexp(1.0, exponent);
      } else {
        const float scale = 0.5f + 0.1f * random[i];
        scales_->data<float>()[i] = scale;
        scale_values[i] = scale;
      }
    }
  }
  const std::vector<float> random = RandomFloats(matrices * rows * cols, options.seed * 1000003);
  exact_.resize(random.size());
  for (int64_t flat = 0; flat < static_cast<int64_t>(random.size()); ++flat) {
    const int64_t col = flat % cols;
    const int64_t row = flat / cols % rows;
    const int64_t matrix = flat / cols / rows;
    const double scale = scale_values[static_cast<size_t>(
        scaled ? (matrix * scale_rows + row / options.block_rows) * scale_cols + col / options.block_cols : 0)];
    const double wanted = static_cast<double>(random[static_cast<size_t>(flat)]) * options.standard_deviation;
    double stored = 0;
    switch (options.dtype) {
      case DType::kBf16: {
        stored = NearestBf16(wanted);
        const float value = static_cast<float>(stored);
        uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof(bits));
        values_->data<uint16_t>()[flat] = static_cast<uint16_t>(bits >> 16);
        break;
      }
      case DType::kE4m3: {
        const uint8_t code = NearestE4m3(2 * wanted);
        values_->data<uint8_t>()[flat] = code;
        stored = E4m3Value(code);
        break;
      }
      case DType::kE2m1x2: {
        const uint8_t code = NearestE2m1(2 * wanted);
        uint8_t& pair = values_->data<uint8_t>()[flat / 2];
        pair = static_cast<uint8_t>(col % 2 == 0 ? code : pair | (code << 4));
        stored = E2m1Value(code);
        break;
      }
      default:
        values_->data<float>()[flat] = static_cast<float>(wanted);
        stored = static_cast<float>(wanted);
    }
    exact_[static_cast<size_t>(flat)] = stored * scale;
  }
}

TestTensor RandomRotations(int64_t positions, int64_t channels, uint64_t seed) {
  TestTensor table(DType::kF32, {positions, channels});
  const std::vector<float> angles = RandomFloats(positions * channels / 2, seed, 3.0f);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < channels / 2; ++i) {
      const float angle = angles[static_cast<size_t>(p * channels / 2 + i)];
      table.data<float>()[p * channels + i] = std::cos(angle);
      table.data<float>()[p * channels + channels / 2 + i] = std::sin(angle);
    }
  }
  return table;
}

double E4m3Value(uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

double E2m1Value(uint8_t code) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
}

uint8_t NearestE4m3(double x) {
  return static_cast<uint8_t>(NearestCode(std::abs(x), 0x7f, E4m3Value) | (std::signbit(x) ? 0x80 : 0));
}

uint8_t NearestE2m1(double x) {
  return static_cast<uint8_t>(NearestCode(std::abs(x), 8, E2m1Value) | (std::signbit(x) ? 8 : 0));
}

double NearestBf16(double x) {
  if (x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, exponent - 8);
  return std::nearbyint(x / unit) * unit;  // ties to even
}

int ScaleExponent(double largest, double floor, double top) {
  const double wanted = std::max(largest, floor) / top;
  int exponent = std::ilogb(wanted);
  if (std::ldexp(1.0, exponent) < wanted) ++exponent;
  return exponent;
}

std::vector<double> QuantizedActivations(const std::vector<double>& row, int64_t block) {
  std::vector<double> out(row.size());
  const int64_t size = static_cast<int64_t>(row.size());
  for (int64_t begin = 0; begin < size; begin += block) {
    const int64_t end = std::min(begin + block, size);
    double largest = 0;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(row[static_cast<size_t>(k)]));
    const int exponent = ScaleExponent(largest, 1e-4, 448);
    for (int64_t k = begin; k < end; ++k) {
      const size_t i = static_cast<size_t>(k);
      out[i] = std::ldexp(E4m3Value(NearestE4m3(std::ldexp(row[i], -exponent))), exponent);
    }
  }
  return out;
}

}  // namespace dsv4
