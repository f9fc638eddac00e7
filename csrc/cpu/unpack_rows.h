// 2:4 rows to dense rows. The numbers are bit patterns.
#pragma once

#include "../inline.h"
#include "kernels.h"
#include "standard.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

constexpr int kSegment = 512;  // weights whose indices, 64 bytes, are read together

#if PROXSPARSE_VECTOR_BYTES == 64

// For the nibble i0 | i1 << 2, the bits of the kept weights of a block: 1 << i0 | 1 << i1.
struct BitsOfNibble {
  alignas(16) uint8_t of[16];
};
constexpr BitsOfNibble kBitsOfNibble = [] {
  BitsOfNibble kept;
  for (int nibble = 0; nibble < 16; ++nibble) kept.of[nibble] = 1 << (nibble & 3) | 1 << (nibble >> 2);
  return kept;
}();

// For each byte of the indices of a segment, the eight bits of the kept weights.
struct KeptWeights {
  alignas(64) uint8_t bytes[kSegment / 8];

  PROXSPARSE_INLINE void load(const uint8_t* indices, int count) {
    const auto table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBitsOfNibble.of)));
    const auto nibble = _mm512_set1_epi8(0x0f);
    const auto packed = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - count), indices);
    const auto first = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, nibble));
    const auto second = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble));
    _mm512_store_si512(bytes, _mm512_or_si512(first, _mm512_slli_epi16(second, 4)));
  }
};

#ifdef PROXSPARSE_BF16
constexpr bool kExpands16 = true;
#else
constexpr bool kExpands16 = false;
#endif

// The weights that unpack_step writes.
template <typename Storage>
constexpr int kStep = sizeof(Storage) == 2 && !kExpands16 ? 16 : 64 / sizeof(Storage);

template <typename Storage>
PROXSPARSE_INLINE void unpack_step(const Storage* values, const uint8_t* kept, Storage* weight) {
  std::conditional_t<kStep<Storage> == 32, uint32_t, std::conditional_t<kStep<Storage> == 16, uint16_t, uint8_t>> bits;
  std::memcpy(&bits, kept, sizeof(bits));
  const auto load = [&] { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)); };
  if constexpr (sizeof(Storage) == 8) {
    _mm512_storeu_si512(weight, _mm512_maskz_expand_epi64(bits, _mm512_castsi256_si512(load())));
  } else if constexpr (sizeof(Storage) == 4) {
    _mm512_storeu_si512(weight, _mm512_maskz_expand_epi32(bits, _mm512_castsi256_si512(load())));
  } else {
#ifdef PROXSPARSE_BF16
    _mm512_storeu_si512(weight, _mm512_maskz_expand_epi16(bits, _mm512_castsi256_si512(load())));
#else
    const auto wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    const auto expanded = _mm512_maskz_expand_epi32(bits, _mm512_castsi256_si512(wide));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight), _mm512_cvtepi32_epi16(expanded));
#endif
  }
}

#else

struct KeptWeights {
  const uint8_t* bytes;  // here, the indices themselves
  PROXSPARSE_INLINE void load(const uint8_t* indices, int) { bytes = indices; }
};

// For each byte of indices and each of its eight weights: which of the four values it is, or 4 for +0.
struct Sources {
  alignas(64) uint8_t of[256][8];
};
constexpr Sources kSources = [] {
  Sources sources;
  for (int byte = 0; byte < 256; ++byte) {
    for (int i = 0; i < 8; ++i) sources.of[byte][i] = 4;
    for (int value = 0; value < 4; ++value) sources.of[byte][(byte >> 2 * value & 3) + value / 2 * 4] = value;
  }
  return sources;
}();

template <typename Storage>
constexpr int kStep = 8;

template <typename Storage>
PROXSPARSE_INLINE void unpack_step(const Storage* values, const uint8_t* indices, Storage* weight) {
#if PROXSPARSE_VECTOR_BYTES == 32
  const auto narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSources.of[*indices]));
  const auto expand = [=](__m128i values) __attribute__((always_inline)) {
    return _mm256_permutevar8x32_epi32(_mm256_zextsi128_si256(values), _mm256_cvtepu8_epi32(narrow));
  };
  if constexpr (sizeof(Storage) == 4) {
    const auto expanded = expand(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(weight), expanded);
  } else if constexpr (sizeof(Storage) == 2) {
    const auto wide = expand(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values))));
    const auto expanded = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    return _mm_storeu_si128(reinterpret_cast<__m128i*>(weight), expanded);
  }
#endif
  const Storage choices[] = {values[0], values[1], values[2], values[3], 0};
  for (int i = 0; i < 8; ++i) weight[i] = choices[kSources.of[*indices][i]];
}

#endif

// One row. Weight i is written to to(i); the next ones follow it, up to a multiple of 64 bytes.
template <typename Storage, typename To>
PROXSPARSE_INLINE void unpack_24_row(const Storage* values, const uint8_t* indices, int64_t in_features, To to) {
  constexpr int step = kStep<Storage>;
  KeptWeights kept;
  for (int64_t first = 0; first < in_features; first += kSegment) {
    const int count = in_features - first < kSegment ? in_features - first : kSegment;
    kept.load(indices + first / 8, (count + 7) / 8);
    int i = 0;
    for (; i + step <= count; i += step) unpack_step(values + (first + i) / 2, kept.bytes + i / 8, to(first + i));
    if (i < count) {
      Storage last_values[step / 2] = {}, last[step];
      std::memcpy(last_values, values + (first + i) / 2, (count - i) / 2 * sizeof(Storage));
      unpack_step(last_values, kept.bytes + i / 8, last);
      std::memcpy(to(first + i), last, (count - i) * sizeof(Storage));
    }
  }
}

// Rows `begin` to `end`.
template <typename Storage>
void unpack_24_rows(const PackCall& call, int64_t begin, int64_t end) {
  const int64_t in_features = call.in_features, row_bytes = (in_features + 7) / 8;
  for (int64_t row = begin; row < end; ++row) {
    auto* weight = static_cast<Storage*>(call.weight) + row * in_features;
    unpack_24_row(static_cast<const Storage*>(call.values) + row * in_features / 2, call.indices + row * row_bytes,
                  in_features, [=](int64_t i) { return weight + i; });
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
