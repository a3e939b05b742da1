// Rotary embedding and the Hadamard rotation of one row on the CPU, shared by the ops that rotate.
#ifndef DSV4_OPS_ROPE_ROPE_CPU_H_
#define DSV4_OPS_ROPE_ROPE_CPU_H_

#include <cstdint>

namespace dsv4 {

// Rotates `channels` values in place, pairs (2i, 2i + 1), in fp32. `cos_sin` is the position's row: channels/2 cosines,
// then channels/2 sines. Specification, section 4.4.
void RotateCpu(float* values, int64_t channels, const float* cos_sin);
void RotateInverseCpu(float* values, int64_t channels, const float* cos_sin);

// Multiplies `channels` values (a power of two) by the Sylvester Hadamard matrix times channels^-1/2, in place.
// Specification, section 6.2.
void HadamardCpu(float* values, int64_t channels);

}  // namespace dsv4

#endif  // DSV4_OPS_ROPE_ROPE_CPU_H_
