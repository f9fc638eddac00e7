// The number formats of a weight: how each is stored, which arithmetic it gets, and the conversions between the two.
// Conversions are free of branches and of library calls, so that loops over them become vector code on any CPU.
#pragma once

#include <bit>
#include <cstdint>

namespace proxsparse {

#define PROXSPARSE_INLINE inline __attribute__((always_inline))

template <typename T>
struct Native {  // float32 and float64 are computed in as they are
  using Storage = T;
  using Arithmetic = T;
  static PROXSPARSE_INLINE T load(T stored) { return stored; }
  static PROXSPARSE_INLINE T store(T value) { return value; }
};
using Float32 = Native<float>;
using Float64 = Native<double>;

struct BFloat16 {  // the upper half of a float32
  using Storage = uint16_t;
  using Arithmetic = float;
  static PROXSPARSE_INLINE float load(uint16_t stored) { return std::bit_cast<float>(uint32_t{stored} << 16); }
  // To nearest, ties to even; finite values only.
  static PROXSPARSE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {  // IEEE half precision
  using Storage = uint16_t;
  using Arithmetic = float;
  static PROXSPARSE_INLINE float load(uint16_t stored) {
    const uint32_t sign = (uint32_t{stored} & 0x8000) << 16, magnitude = uint32_t{stored} & 0x7fff;
    // Exponent and mantissa moved into place are 2^112 too small, subnormals included; inf and NaN need all exponent bits.
    const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    return std::bit_cast<float>(sign | scaled | (magnitude >= 0x7c00 ? 0x7f800000u : 0u));
  }
  // To nearest, ties to even; finite values only, those beyond the largest float16 become infinite.
  static PROXSPARSE_INLINE uint16_t store(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 aligns a float16 subnormal with the last bits of the sum, rounded by the addition itself.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return static_cast<uint16_t>(sign | (finite < 0x7c00 ? finite : 0x7c00));
  }
};

}  // namespace proxsparse
