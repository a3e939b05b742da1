// DSV4_HOST_DEVICE marks small inline functions that a kernel may call too.
#ifndef DSV4_RUNTIME_HOST_DEVICE_H_
#define DSV4_RUNTIME_HOST_DEVICE_H_

#ifdef __CUDACC__
#define DSV4_HOST_DEVICE __host__ __device__
#else
#define DSV4_HOST_DEVICE
#endif

#endif  // DSV4_RUNTIME_HOST_DEVICE_H_
