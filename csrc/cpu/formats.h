// The number formats of a weight: how each is stored, which arithmetic it gets, and the conversions between the two.
// load is exact; store rounds a finite value to nearest, ties to even, and what becomes zero is +0.
// Conversions are free of branches and of library calls, so that loops over them become vector code on any CPU.
#pragma once

#include <bit>
#include <cstdint>

#include "../inline.h"

namespace proxsparse {

template <typename T>
struct Native {  // float32 and float64 are computed in as they are
  using Storage = T;
  using Arithmetic = T;
  static PROXSPARSE_INLINE T load(T stored) { return stored; }
  static PROXSPARSE_INLINE T store(T value) { return value + T(0); }  // -0 + 0 = +0
};
using Float32 = Native<float>;
using Float64 = Native<double>;

struct BFloat16 {  // the upper half of a float32
  using Storage = uint16_t;
  using Arithmetic = float;
  static PROXSPARSE_INLINE float load(uint16_t stored) { return std::bit_cast<float>(uint32_t{stored} << 16); }
  static PROXSPARSE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((rounded & 0x7fff) == 0 ? 0 : rounded);
  }
};

struct Float16 {  // IEEE half precision
  using Storage = uint16_t;
  using Arithmetic = float;
  static PROXSPARSE_INLINE float load(uint16_t stored) {
    const uint32_t sign = (uint32_t{stored} & 0x8000) << 16, magnitude = uint32_t{stored} & 0x7fff;
    // Moved into the place of a float32's, exponent and mantissa are 2^112 too small; inf and NaN get a full exponent.
    const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    return std::bit_cast<float>(sign | scaled | (magnitude >= 0x7c00 ? 0x7f800000u : 0u));
  }
  // Beyond the largest float16 follows infinity.
  static PROXSPARSE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 aligns a float16 subnormal with the last bits of the sum, rounded by the addition itself.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t rounded = finite < 0x7c00 ? finite : 0x7c00;
    return static_cast<uint16_t>(rounded == 0 ? 0 : sign | rounded);
  }
};

}  // namespace proxsparse
