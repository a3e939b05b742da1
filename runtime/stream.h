// A stream: where a device's work is enqueued, in order. Ops are written against it; whether their work
// runs now or is recorded for later is the stream's business.
//
// An op enqueues an OpRecord: its name, the memory it touches, and how each backend does the work.
// On the CPU that is a closure. Without a sink it runs at once. With one (a capture) the record goes to the sink, and
// the closure runs at each replay; closures therefore hold views by value and read data only when run.
// On CUDA it is a function that launches kernels, called at once, also while the stream is being captured.
//
//   stream.Enqueue({.op = "rms_norm", .accesses = AccessList().Read("x", p.x).Write("out", p.out),
//                   .run = [p] { RunCpu(p); },
//                   .launch = DSV4_IF_CUDA([&] { return RecordCuda(stream, p); })});
#ifndef DSV4_RUNTIME_STREAM_H_
#define DSV4_RUNTIME_STREAM_H_

#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "runtime/tensor_view.h"
#include "runtime/weight_view.h"

namespace dsv4 {

class Device;

enum class AccessKind : uint8_t { kRead, kWrite, kReadBeforeWait };

// One tensor that an op touches. Names are string literals.
struct Access {
  std::string_view name;
  AccessKind kind;
  TensorView view;
};

// The declared accesses of one op; empty views (optional tensors that are absent) are left out.
class AccessList {
 public:
  AccessList& Read(std::string_view name, const TensorView& view) { return Add(name, AccessKind::kRead, view); }
  AccessList& Write(std::string_view name, const TensorView& view) { return Add(name, AccessKind::kWrite, view); }
  AccessList& ReadWrite(std::string_view name, const TensorView& view) { return Read(name, view).Write(name, view); }
  AccessList& Weight(std::string_view name, const WeightView& view) {
    return Add(name, AccessKind::kReadBeforeWait, view.view());
  }
  AccessList& Weight(std::string_view name, const QuantizedWeight& weight) {
    return Weight(name, weight.values).Weight(name, weight.scales);
  }

  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  AccessList& Add(std::string_view name, AccessKind kind, const TensorView& view) {
    if (!view.empty()) accesses_.push_back({name, kind, view});
    return *this;
  }
  std::vector<Access> accesses_;
};

struct OpRecord {
  std::string_view op;  // a string literal
  AccessList accesses;
  bool waits = true;  // what the op's kernels do under programmatic dependent launch
  std::function<void()> run;
  std::function<absl::Status()> launch = nullptr;  // null: the op has no kernel
};

// The argument in a build with CUDA, null elsewhere: an op that depends on its kernels' cuda_library needs no more to
// build without them.
#ifdef DSV4_HAVE_CUDA
#define DSV4_IF_CUDA(...) __VA_ARGS__
#else
#define DSV4_IF_CUDA(...) nullptr
#endif

// What a capture implements to receive records instead of their being run.
class RecordSink {
 public:
  virtual ~RecordSink() = default;
  virtual absl::Status Append(OpRecord record) = 0;
};

class Stream {
 public:
  explicit Stream(Device& device) : device_(device) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device& device() const { return device_; }

  // CPU: runs the record, or hands it to the sink. CUDA: launches its kernels.
  absl::Status Enqueue(OpRecord record);

  // Every Enqueue then waits for its work, so that an error is that op's. For tests and for finding faults.
  void set_blocking(bool blocking) { blocking_ = blocking; }

  // Borrowed; null ends the recording. CPU backend only.
  void set_sink(RecordSink* sink) { sink_ = sink; }
  RecordSink* sink() const { return sink_; }

  // Enqueue copies and fills; host memory must stay until Synchronize. Never recorded: FailedPrecondition while a
  // sink is set.
  virtual absl::Status CopyToDevice(void* destination, const void* source, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* destination, const void* source, int64_t bytes) = 0;
  virtual absl::Status Fill(void* destination, uint8_t value, int64_t bytes) = 0;
  // Waits for all work. Returns the error of what failed meanwhile, and in checked mode that of a bad slot.
  virtual absl::Status Synchronize() = 0;

 private:
  Device& device_;
  RecordSink* sink_ = nullptr;
  bool blocking_ = false;
};

}  // namespace dsv4

#endif  // DSV4_RUNTIME_STREAM_H_
