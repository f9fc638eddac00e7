// Blocks in vectors: position i of N blocks becomes one Vec, so that one lane computes one block.
#pragma once

#include "formats.h"
#include "kernels.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// Vectors that are computed on in turns, because each operation waits for the one before; AVX-512 has twice the
// registers.
constexpr int kGroup = PROXSPARSE_VECTOR_BYTES == 64 ? 4 : 2;

// of[i][b] belongs to position i of block b. Room for one vector more: packed numbers are written a vector at a time.
template <typename T>
struct Lanes {
  alignas(64) T of[4][kChunk + 2 * kLanes<T>];

  template <typename V>
  PROXSPARSE_INLINE Block<V> load(int b) const {
    return {V::load(of[0] + b), V::load(of[1] + b), V::load(of[2] + b), V::load(of[3] + b)};
  }
  template <typename V>
  PROXSPARSE_INLINE void store(int b, Block<V> x) {
    x.w1.store(of[0] + b);
    x.w2.store(of[1] + b);
    x.w3.store(of[2] + b);
    x.w4.store(of[3] + b);
  }
};

// The weights of N contiguous blocks as they are stored, one Vec a position: the number itself in a native format, its
// bits in the upper half of 32 otherwise.
template <typename Format, int N, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE auto load_stored(const typename Format::Storage* weight) {
  if constexpr (sizeof(T) == sizeof(*weight)) {
    using V = Vec<T, N>;
    V a = V::load(weight), b = V::load(weight + N), c = V::load(weight + 2 * N), d = V::load(weight + 3 * N);
    deinterleave2(a, b);
    deinterleave2(c, d);
    deinterleave2(a, c);
    deinterleave2(b, d);
    return Block<V>{a, b, c, d};
  } else {
    using B = Vec<uint32_t, N>;
    B first = B::load(weight), second = B::load(weight + 2 * N);  // pairs of weights, the first in the lower half
    deinterleave2(first, second);
    return Block<B>{first << 16, first, second << 16, second};
  }
}

template <typename Format, typename V>
PROXSPARSE_INLINE void store_stored(Block<V> stored, typename Format::Storage* weight) {
  if constexpr (sizeof(typename ScalarOf<V>::Type) == sizeof(*weight)) {
    constexpr int N = sizeof(V) / sizeof(*weight);
    interleave2(stored.w1, stored.w3);
    interleave2(stored.w2, stored.w4);
    interleave2(stored.w1, stored.w2);
    interleave2(stored.w3, stored.w4);
    stored.w1.store(weight);
    stored.w2.store(weight + N);
    stored.w3.store(weight + 2 * N);
    stored.w4.store(weight + 3 * N);
  } else {
    V first = (stored.w1 >> 16) | (stored.w2 & V(0xffff0000)), second = (stored.w3 >> 16) | (stored.w4 & V(0xffff0000));
    interleave2(first, second);
    first.store(weight);
    second.store(weight + sizeof(V) / 2);
  }
}

// What load_stored gave, as numbers to compute with.
template <typename Format, typename V>
PROXSPARSE_INLINE auto decoded(V stored) {
  using T = typename Format::Arithmetic;
  if constexpr (std::is_same_v<typename Format::Storage, T>) {
    return stored;
  } else {
    return Format::template decode<Vec<T, sizeof(V) / sizeof(T)>>(stored);
  }
}

// f applied to each position.
template <typename F, typename... Blocks>
PROXSPARSE_INLINE auto each(F f, Blocks... blocks) {
  return Block<decltype(f(blocks.w1...))>{f(blocks.w1...), f(blocks.w2...), f(blocks.w3...), f(blocks.w4...)};
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
