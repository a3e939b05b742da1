// The counter-based random number generator Philox4x32-10, on both backends.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#ifndef DSV4_OPS_SAMPLE_PHILOX_H_
#define DSV4_OPS_SAMPLE_PHILOX_H_

#include <array>
#include <cstdint>

#include "runtime/host_device.h"

namespace dsv4::sample {

DSV4_HOST_DEVICE inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                                           std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

// The number in [0, 1) that decides the token at `position` of a request: a multiple of 2^-24.
DSV4_HOST_DEVICE inline float UniformAt(int64_t seed, int64_t request_id, int64_t position) {
  const auto s = static_cast<uint64_t>(seed), r = static_cast<uint64_t>(request_id), p = static_cast<uint64_t>(position);
  const uint32_t word = Philox4x32({static_cast<uint32_t>(r), static_cast<uint32_t>(r >> 32), static_cast<uint32_t>(p),
                                    static_cast<uint32_t>(p >> 32)},
                                   {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32)})[0];
  return static_cast<float>(word >> 8) * 0x1p-24f;
}

}  // namespace dsv4::sample

#endif  // DSV4_OPS_SAMPLE_PHILOX_H_
