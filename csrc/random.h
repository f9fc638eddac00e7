// Random bits that depend only on a seed and on the position of a number, and stochastic rounding: the same results on
// every backend (`random_bits` and `stochastic_round` in proxsparse/reference). Bits may be a uint32_t or a vector.
#pragma once

#include "formats.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// A bijection after which every bit depends on all bits of x.
template <typename Bits>
PROXSPARSE_INLINE Bits mix(Bits x) {
  x = x ^ (x >> 16);
  x = x * Bits(0x7feb352d);
  x = x ^ (x >> 15);
  x = x * Bits(0x846ca68b);
  return x ^ (x >> 16);
}

// 32 random bits for the position 2^32 high + low; mix() of them gives 32 more.
template <typename Bits>
PROXSPARSE_INLINE Bits random_bits(Bits low, uint32_t high, uint64_t seed) {
  return mix(mix(low ^ Bits(static_cast<uint32_t>(seed))) ^ Bits(high ^ static_cast<uint32_t>(seed >> 32)));
}

// Rounds to bfloat16: the result is the upper half of (bits of value + random), 0 <= random < 2^16. The mean over all
// `random` is the value itself. A zero is +0, and a NaN stays a NaN.
template <typename V, typename Bits>
PROXSPARSE_INLINE Bits round_stochastically(V value, Bits random) {
  const Bits bits = bits_as<uint32_t>(value), exponent(0x7f800000), sum = bits + random;
  const Bits nonfinite = select(value == value, bits, Bits(BFloat16::kNaN));
  const Bits finite = select((sum & Bits(0x7fff0000)) == Bits(0), Bits(0), sum);
  return select((bits & exponent) == exponent, nonfinite, finite);
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
