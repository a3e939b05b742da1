// The cosines and sines of every position: one table for layers without compression, one (other base, YaRN frequencies,
// no amplitude factor) for compressed layers. Source: specification, section 4.
#ifndef DSV4_MODEL_ROPE_TABLES_H_
#define DSV4_MODEL_ROPE_TABLES_H_

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace dsv4 {

// inv_freq[i] of pair i, computed in fp64 and rounded once to fp32.
std::vector<float> RopeFrequencies(const ModelConfig& config, bool compressed);

// The row of one position: the cosines of all pairs, then their sines.
void FillRopeRow(const std::vector<float>& frequencies, int64_t position, float* row);

// [positions, rope size] row-major: per position the cosines of all pairs, then their sines. The angle is the fp32
// product of position and frequency; cosine and sine of that fp32 angle are accurate.
std::vector<float> RopeTable(const ModelConfig& config, bool compressed, int64_t positions);

}  // namespace dsv4

#endif  // DSV4_MODEL_ROPE_TABLES_H_
