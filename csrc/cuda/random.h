// Random bits that depend on a seed and on the position of a number alone, and rounding with them: the same results on
// every backend (`random_bits` and `stochastic_round` of proxsparse/reference/).
#pragma once

#include <bit>
#include <cstdint>

#include "number.h"

namespace proxsparse::gpu {

__device__ inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// 32 random bits of a position; mix() of them are the next 32.
__device__ inline uint32_t random_bits(uint64_t position, uint64_t seed) {
  const uint32_t low = static_cast<uint32_t>(position) ^ static_cast<uint32_t>(seed);
  const uint32_t high = static_cast<uint32_t>(position >> 32) ^ static_cast<uint32_t>(seed >> 32);
  return mix(mix(low) ^ high);
}

// The upper half of (bits of value + bits), bits < 2^16: the mean over the bits is the value itself. Zeros are +0.
__device__ inline uint16_t stochastic_bfloat16(float value, uint32_t bits) {
  const bool finite = value * 0 == 0;
  const uint32_t upper = finite ? (std::bit_cast<uint32_t>(value) + bits) >> 16 : BFloat16::store(value);
  return static_cast<uint16_t>((upper & 0x7fff) == 0 ? 0 : upper);
}

}  // namespace proxsparse::gpu
