// The CPU backend: memory is host memory, and everything has run when the call that enqueues it returns.
#ifndef DSV4_RUNTIME_CPU_DEVICE_H_
#define DSV4_RUNTIME_CPU_DEVICE_H_

#include <memory>

#include "runtime/device.h"

namespace dsv4 {

std::unique_ptr<Device> CreateCpuDevice();

}  // namespace dsv4

#endif  // DSV4_RUNTIME_CPU_DEVICE_H_
