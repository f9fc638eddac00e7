// The arithmetic of a dot product with 2:4 weights. In each step, one vector of kept values is multiplied by the
// numbers of x at their places, which are gathered from two vectors of x. The other numbers of x have no effect, even
// if they are infinite or NaN. Codes are multiplied by their scale and rounded to what the arithmetic multiplies.
#pragma once

#include "../codes.h"
#include "../formats.h"
#include "kernels.h"
#include "vec.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// For lane j: the shift to the two bits of the place of value j, and the first weight of its block, j / 2 of `blocks`.
template <typename Lane, int N>
struct GatherTable {
  alignas(64) Lane shift[N], block[N];
};
template <typename Lane, int N, int blocks>
constexpr GatherTable<Lane, N> kGatherTable = [] {
  GatherTable<Lane, N> table;
  for (int j = 0; j < N; ++j) {
    table.shift[j] = 2 * j;
    table.block[j] = j / 2 % blocks * 4;
  }
  return table;
}();

template <typename Bits>
PROXSPARSE_INLINE Bits load_bits(const uint8_t* indices) {
  Bits bits;
  std::memcpy(&bits, indices, sizeof(bits));
  return bits;
}

// The numbers of the 16 codes of 4 bits.
struct NumberOfCode {
  alignas(64) float of[16];
};
constexpr NumberOfCode kNumberOfCode = [] {
  NumberOfCode numbers;
  for (uint32_t code = 0; code < 16; ++code) numbers.of[code] = signed_code(code);
  return numbers;
}();

// Bytes of `count` values of a packed weight.
template <typename Format, Codes codes>
constexpr int64_t value_bytes(int64_t count) {
  return codes == kInt4 ? count / 2 : codes == kInt8 ? count : count * sizeof(typename Format::Storage);
}

// x in float32; values in float32, or converted to it.
template <typename Format, Codes codes>
struct InFloat32 {
  using X = float;
  static constexpr int kValues = PROXSPARSE_VECTOR_BYTES / 4;  // of a step, which reads twice as many numbers of x
  using Numbers = Vec<float, kValues>;
  using Sums = Numbers;

  // scale: of the codes, in all lanes.
  static PROXSPARSE_INLINE Numbers load_values(const uint8_t* values, const Sums& scale) {
    if constexpr (codes == kInt8) {
#if PROXSPARSE_VECTOR_BYTES == 64
      return scale * numbers(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bits<__m128i>(values))));
#elif PROXSPARSE_VECTOR_BYTES == 32
      const auto bytes = _mm_cvtsi64_si128(load_bits<int64_t>(values));
      return scale * numbers(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
      Numbers numbers;
      for (int i = 0; i < kValues; ++i) numbers.lanes.raw[i] = static_cast<int8_t>(values[i]);
      return scale * numbers;
#endif
    } else if constexpr (codes == kInt4) {
#if PROXSPARSE_VECTOR_BYTES == 64
      const auto pairs = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(load_bits<int64_t>(values)));
      const auto each = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));  // a code in the low bits of each lane
      return scale * numbers(_mm512_permutexvar_ps(each, _mm512_load_ps(kNumberOfCode.of)));
#elif PROXSPARSE_VECTOR_BYTES == 32
      const auto pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_bits<int32_t>(values)));
      const auto each = _mm256_or_si256(pairs, _mm256_slli_epi64(pairs, 28));
      const auto integers = _mm256_srai_epi32(_mm256_slli_epi32(each, 28), 28);
      return scale * numbers(_mm256_cvtepi32_ps(integers));
#else
      Numbers numbers;
      for (int i = 0; i < kValues; ++i) {
        numbers.lanes.raw[i] = signed_code(values[i / 2] >> i % 2 * 4);
      }
      return scale * numbers;
#endif
    } else if constexpr (sizeof(typename Format::Storage) == 4) {
      return Numbers::load(values);
    } else {
      Vec<uint32_t, kValues> bits;
#if PROXSPARSE_VECTOR_BYTES == 64
      bits.lanes.raw = as_raw(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))));
#elif PROXSPARSE_VECTOR_BYTES == 32
      bits.lanes.raw = as_raw(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
#else
      for (int i = 0; i < kValues; ++i) bits.lanes.raw[i] = load_bits<uint16_t>(values + 2 * i);
#endif
      return Format::template decode<Numbers>(bits << 16);
    }
  }
  static PROXSPARSE_INLINE Sums multiply_add(Sums sums, Numbers values, Numbers x) { return sums + values * x; }
  static PROXSPARSE_INLINE Numbers load_units(const uint32_t* units) { return Numbers::load(units); }
  static PROXSPARSE_INLINE Numbers broadcast_unit(uint32_t unit) { return Numbers(std::bit_cast<float>(unit)); }

#if PROXSPARSE_VECTOR_BYTES == 64
  using Places = __m512i;
  static PROXSPARSE_INLINE Places load_places(const uint8_t* indices) {
    const auto& table = kGatherTable<uint32_t, 16, 8>;
    const auto bits =
        _mm512_srlv_epi32(_mm512_set1_epi32(load_bits<uint32_t>(indices)), _mm512_load_si512(table.shift));
    return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(3), _mm512_load_si512(table.block), 0xea);  // a & b | c
  }
  struct Xs {
    __m512 low, high;
  };
  static PROXSPARSE_INLINE Xs load_x(const X* x) { return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)}; }
  static PROXSPARSE_INLINE Numbers gather(Xs x, Places places) {
    return numbers(_mm512_permutex2var_ps(x.low, places, x.high));
  }
#elif PROXSPARSE_VECTOR_BYTES == 32
  using Places = __m256i;
  static PROXSPARSE_INLINE Places load_places(const uint8_t* indices) {
    const auto& table = kGatherTable<uint32_t, 8, 2>;
    const auto load = [](const uint32_t* memory) __attribute__((always_inline)) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(memory));
    };
    const auto bits = _mm256_srlv_epi32(_mm256_set1_epi32(load_bits<uint16_t>(indices)), load(table.shift));
    return _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(3)), load(table.block));
  }
  struct Xs {
    __m256 low, high;
  };
  static PROXSPARSE_INLINE Xs load_x(const X* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static PROXSPARSE_INLINE Numbers gather(Xs x, Places places) {
    const auto low = _mm256_permutevar8x32_ps(x.low, places), high = _mm256_permutevar8x32_ps(x.high, places);
    return numbers(_mm256_blend_ps(low, high, 0xf0));
  }
#else
  using Places = uint8_t;
  static PROXSPARSE_INLINE Places load_places(const uint8_t* indices) { return *indices; }
  using Xs = const X*;
  static PROXSPARSE_INLINE Xs load_x(const X* x) { return x; }
  static PROXSPARSE_INLINE Numbers gather(Xs x, Places places) {
    const float numbers[] = {x[places & 3], x[places >> 2 & 3], x[4 + (places >> 4 & 3)], x[4 + (places >> 6)]};
    return Numbers::load(numbers);
  }
#endif

 private:
  template <typename Integers>
  static PROXSPARSE_INLINE auto as_raw(Integers integers) {
    return reinterpret_cast<typename Vec<uint32_t, kValues>::Raw>(integers);
  }
  template <typename Raw>
  static PROXSPARSE_INLINE Numbers numbers(Raw raw) {
    Numbers numbers;
    numbers.lanes.raw = raw;
    return numbers;
  }
};

// `count` stored numbers in float32.
template <typename Format>
PROXSPARSE_INLINE void load_numbers(const typename Format::Storage* stored, int64_t count, float* numbers) {
  using Loaded = InFloat32<Format, kPlain>;
  int64_t i = 0;
  for (; i + Loaded::kValues <= count; i += Loaded::kValues) {
    Loaded::load_values(reinterpret_cast<const uint8_t*>(stored + i), {}).store(numbers + i);
  }
  for (; i < count; ++i) numbers[i] = Format::load(stored[i]);
}

template <typename Format, Codes codes = kPlain>
struct ArithmeticOf {
  using Type = InFloat32<Format, codes>;
};

#ifdef PROXSPARSE_BF16

// For lane j: the shift to code j % 16 of 64 bits.
struct In32Lanes {
  alignas(64) uint16_t of[32];
};
constexpr In32Lanes kCodeShifts = [] {
  In32Lanes shifts;
  for (int j = 0; j < 32; ++j) shifts.of[j] = 4 * (j % 16);
  return shifts;
}();

// Values and x in bfloat16. Products of neighbours are summed in float32; subnormal numbers are treated as zero.
template <Codes codes>
struct InBFloat16 {
  using X = uint16_t;
  static constexpr int kValues = 32;
  using Numbers = __m512i;
  using Sums = Vec<float, 16>;

  static PROXSPARSE_INLINE Numbers load_values(const uint8_t* values, const Sums& scale) {
    if constexpr (codes == kInt8) {
      const auto half = [&](const uint8_t* half) PROXSPARSE_INLINED {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bits<__m128i>(half))) * scale.lanes.raw;
      };
      return (__m512i)_mm512_cvtne2ps_pbh(half(values + 16), half(values));
    } else if constexpr (codes == kInt4) {
      // The values of the 16 codes, twice, as a lookup uses five bits. Each half of the lanes has 16 of the codes in
      // all its 64 bits; the low bits of lane j are code j % 16.
      const auto low = _mm512_set1_epi64(load_bits<int64_t>(values));
      const auto codes_of = _mm512_mask_set1_epi64(low, 0xf0, load_bits<int64_t>(values + 8));
      const auto each = _mm512_multishift_epi64_epi8(_mm512_load_si512(kCodeShifts.of), codes_of);
      const auto scaled = (scale * Sums::load(kNumberOfCode.of)).lanes.raw;
      return _mm512_permutexvar_epi16(each, (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled));
    } else {
      return _mm512_loadu_si512(values);
    }
  }
  static PROXSPARSE_INLINE Sums multiply_add(Sums sums, Numbers values, Numbers x) {
    sums.lanes.raw = _mm512_dpbf16_ps(sums.lanes.raw, (__m512bh)values, (__m512bh)x);
    return sums;
  }
  static PROXSPARSE_INLINE Numbers load_units(const uint32_t* units) { return _mm512_loadu_si512(units); }
  static PROXSPARSE_INLINE Numbers broadcast_unit(uint32_t unit) { return _mm512_set1_epi32(unit); }
  using Places = __m512i;
  static PROXSPARSE_INLINE Places load_places(const uint8_t* indices) {
    const auto& table = kGatherTable<uint16_t, 32, 16>;
    // The low byte of lane j: eight of the 64 bits, from those of value j on. The mask keeps two.
    const auto all = _mm512_set1_epi64(load_bits<uint64_t>(indices));
    const auto bits = _mm512_multishift_epi64_epi8(_mm512_load_si512(table.shift), all);
    return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi16(3), _mm512_load_si512(table.block), 0xea);  // a & b | c
  }
  struct Xs {
    __m512i low, high;
  };
  static PROXSPARSE_INLINE Xs load_x(const X* x) { return {_mm512_loadu_si512(x), _mm512_loadu_si512(x + 32)}; }
  static PROXSPARSE_INLINE Numbers gather(Xs x, Places places) {
    return _mm512_permutex2var_epi16(x.low, places, x.high);
  }
};

template <Codes codes>
struct ArithmeticOf<BFloat16, codes> {
  using Type = InBFloat16<codes>;
};
constexpr bool kReadsBFloat16 = true;
#else
constexpr bool kReadsBFloat16 = false;
#endif

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
