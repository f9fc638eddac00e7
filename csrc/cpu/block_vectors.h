// Blocks in vectors: the weights at position i of N blocks are one Vec, so that each lane computes one block.
#pragma once

#include "../formats.h"
#include "kernels.h"
#include "vec.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// Vectors that are computed alternately, because each operation waits for the previous one. AVX-512 has twice as many
// registers.
constexpr int kGroup = PROXSPARSE_VECTOR_BYTES == 64 ? 4 : 2;

// weight[i][b] is at position i of block b. store_packed needs room for one more vector.
template <typename T>
struct BlockVectors {
  alignas(64) T weight[4][kChunk + 2 * kLanes<T>];

  template <typename V>
  PROXSPARSE_INLINE Block<V> load(int b) const {
    return {V::load(weight[0] + b), V::load(weight[1] + b), V::load(weight[2] + b), V::load(weight[3] + b)};
  }
  template <typename V>
  PROXSPARSE_INLINE void store(int b, Block<V> x) {
    x.w1.store(weight[0] + b);
    x.w2.store(weight[1] + b);
    x.w3.store(weight[2] + b);
    x.w4.store(weight[3] + b);
  }
};

// N consecutive blocks as they are stored, one Vec for each position: numbers of a native format, otherwise the bits in
// the upper half of 32.
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

// The result of load_stored as numbers of the arithmetic.
template <typename Format, typename V>
PROXSPARSE_INLINE auto decoded(V stored) {
  using T = typename Format::Arithmetic;
  if constexpr (std::is_same_v<typename Format::Storage, T>) {
    return stored;
  } else {
    return Format::template decode<Vec<T, sizeof(V) / sizeof(T)>>(stored);
  }
}

// f applied at each position.
template <typename F, typename... Blocks>
PROXSPARSE_INLINE auto each(F f, Blocks... blocks) {
  return Block<decltype(f(blocks.w1...))>{f(blocks.w1...), f(blocks.w2...), f(blocks.w3...), f(blocks.w4...)};
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
