// Which weights of a block the packed format keeps; proxsparse/reference/pack.py describes the format.
#pragma once

#include <bit>
#include <cstdint>

#include "inline.h"

namespace proxsparse {

// The places of the two weights that are kept, ascending, two bits each: nonzeros first, then -0.0, then +0.0, and
// lower places before higher ones. nonzero, negative_zero: one bit for each weight of the block.
PROXSPARSE_INLINE constexpr uint32_t kept_places(uint32_t nonzero, uint32_t negative_zero) {
  uint32_t kept = 0, places = 0;
  const uint32_t ranks[] = {nonzero, negative_zero, 0xf & ~(nonzero | negative_zero)};
  PROXSPARSE_UNROLL
  for (uint32_t candidates : ranks) {
    PROXSPARSE_UNROLL
    for (int i = 0; i < 2; ++i, candidates &= candidates - 1) {
      if (std::popcount(kept) < 2) kept |= candidates & -candidates;
    }
  }
  PROXSPARSE_UNROLL
  for (int i = 0; i < 2; ++i, kept &= kept - 1) {
    // the lowest place that is kept; not std::countr_zero, which nvcc compiles to the constant 32 without a warning
    places |= static_cast<uint32_t>(std::popcount((kept & -kept) - 1)) << 2 * i;
  }
  return places;
}

}  // namespace proxsparse
