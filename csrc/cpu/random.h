// The random bits of stochastic rounding: a function of the seed and the position of a weight, the same on every
// backend.
#pragma once

#include "lanes.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

template <typename B>
PROXSPARSE_INLINE B mix(B x) {
  x = x ^ (x >> 16);
  x = x * B(0x7feb352d);
  x = x ^ (x >> 15);
  x = x * B(0x846ca68b);
  return x ^ (x >> 16);
}

// 32 bits for each weight of N blocks, the first of which is number `first` of its tensor; zeros unless they are
// needed.
template <int N>
PROXSPARSE_INLINE auto random_of_blocks(uint64_t seed, int64_t first, bool needed) {
  using B = Vec<uint32_t, N>;
  if (!needed) return Block<B>{B(0), B(0), B(0), B(0)};
  uint32_t counted[N];
  for (int lane = 0; lane < N; ++lane) counted[lane] = static_cast<uint32_t>(first) + 4 * lane;
  const B low(static_cast<uint32_t>(seed)),
      high(static_cast<uint32_t>(first >> 32) ^ static_cast<uint32_t>(seed >> 32));
  const auto bits = [=](B index) { return mix(mix(index ^ low) ^ high); };  // 2^32 is no number within a chunk
  const B index = B::load(counted);
  return Block<B>{bits(index), bits(index + B(1)), bits(index + B(2)), bits(index + B(3))};
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
