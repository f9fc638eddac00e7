// The number formats of a tensor: how a number is stored, the type it is computed in, and the conversions between them.
// A 16-bit number is held in the upper half of 32 bits, whose lower half is ignored. decode is exact; encode rounds a
// magnitude to nearest, ties to even, and adds the sign bit unless the result is zero. No branches, so that the
// functions also serve vectors.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "prox24_block.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

template <typename To, typename From>
PROXSPARSE_INLINE To bits_as(From value)
  requires std::is_arithmetic_v<From>
{
  return std::bit_cast<To>(value);
}

template <typename T>
struct Native {  // float32 and float64 are computed in their own type
  using Storage = T;
  using Arithmetic = T;
  static constexpr int Sweeps::* kSweepsNeeded = sizeof(T) == 8 ? &Sweeps::float64 : &Sweeps::float32;
  static PROXSPARSE_INLINE T load(T stored) { return stored; }
};
using Float32 = Native<float>;
using Float64 = Native<double>;

struct BFloat16 {  // the upper half of a float32
  using Storage = uint16_t;
  using Arithmetic = float;
  static constexpr uint32_t kNaN = 0x7fc00000;
  static constexpr int Sweeps::* kSweepsNeeded = &Sweeps::rounded;

  static PROXSPARSE_INLINE float load(uint16_t stored) { return decode<float>(uint32_t{stored} << 16); }
  template <typename Value, typename Bits>
  static PROXSPARSE_INLINE Value decode(Bits upper) {
    return bits_as<float>(upper & Bits(0xffff0000));
  }
  // The bits of a float32, rounded to nearest, ties to even; the result is in the upper half. Not for a NaN.
  template <typename Bits>
  static PROXSPARSE_INLINE Bits round(Bits float32) {
    return float32 + Bits(0x7fff) + ((float32 >> 16) & Bits(1));
  }
  template <typename Bits, typename Value>
  static PROXSPARSE_INLINE Bits encode(Value magnitude, Bits sign) {
    const Bits rounded = round(Bits(bits_as<uint32_t>(magnitude)));
    return select((rounded & Bits(0x7fff0000)) != Bits(0), rounded | sign, Bits(0));
  }
};

struct Float16 {  // IEEE half precision
  using Storage = uint16_t;
  using Arithmetic = float;
  static constexpr uint32_t kNaN = 0x7e000000;
  static constexpr int Sweeps::* kSweepsNeeded = &Sweeps::rounded;

  static PROXSPARSE_INLINE float load(uint16_t stored) { return decode<float>(uint32_t{stored} << 16); }
  template <typename Value, typename Bits>
  static PROXSPARSE_INLINE Value decode(Bits upper) {
    const Bits sign = upper & Bits(0x80000000), magnitude = (upper >> 16) & Bits(0x7fff);
    // In the position of a float32's, exponent and mantissa are 2^112 too small; inf and NaN get a full exponent.
    const Value scaled = bits_as<float>(magnitude << 13) * Value(0x1p112f);
    const Bits full = select(magnitude >= Bits(0x7c00), Bits(0x7f800000), Bits(0));
    return bits_as<float>(sign | bits_as<uint32_t>(scaled) | full);
  }
  // Numbers above the largest float16 become infinity.
  template <typename Bits, typename Value>
  static PROXSPARSE_INLINE Bits encode(Value magnitude, Bits sign) {
    const Bits bits = bits_as<uint32_t>(magnitude);
    const Bits normal = (bits - Bits(0x38000000) + Bits(0xfff) + ((bits >> 13) & Bits(1))) >> 13;
    // Adding 0.5 aligns a float16 subnormal with the last bits of the sum; the addition itself rounds it.
    const Bits subnormal = Bits(bits_as<uint32_t>(magnitude + Value(0.5f))) - Bits(0x3f000000);
    const Bits rounded = smaller(select(bits < Bits(0x38800000), subnormal, normal), Bits(0x7c00));
    return select(rounded != Bits(0), sign | (rounded << 16), Bits(0));
  }
};

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
