// Codes of packed weights; proxsparse/reference/quantize.py describes the format.
#pragma once

#include <cstdint>

#include "inline.h"

namespace proxsparse {

// How the values of a packed weight are stored: as numbers, or as codes.
enum Codes { kPlain, kInt8, kInt4, kCodes };

constexpr int64_t kScaleColumns = 64;  // of the weight, with a common scale of 4 bits

// The number of a 4-bit code, whatever the other bits are.
PROXSPARSE_INLINE constexpr int signed_code(uint32_t code) { return static_cast<int>((code & 15) ^ 8) - 8; }

}  // namespace proxsparse
