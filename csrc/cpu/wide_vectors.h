// Blocks of m = 6, 8 or 10 in vectors, in rows that may end in a remainder: in_features % m weights that stay dense.
// Position i of N consecutive blocks is one Vec, so that each lane computes one block.
#pragma once

#include "block_vectors.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

template <int value>
using Constant = std::integral_constant<int, value>;

// f(m) with a constant m.
template <typename F>
void with_constant(int m, F f) {
  if (m == 6) f(Constant<6>{});
  if (m == 8) f(Constant<8>{});
  if (m == 10) f(Constant<10>{});
}

template <typename V, int m>
struct WideBlock {
  V w[m];
};

// f applied at each position.
template <int m, typename F, typename... Vecs>
PROXSPARSE_INLINE auto each(F f, const WideBlock<Vecs, m>&... blocks) {
  WideBlock<decltype(f(blocks.w[0]...)), m> result;
  repeat<m>([&](auto i) PROXSPARSE_INLINED { result.w[i] = f(blocks.w[i]...); });
  return result;
}

// Of the numbers of `parts` vectors, every k-th from number j on. Part 1 is shuffled with part 0, and each other part
// with the numbers found so far.
template <int k, int j, int part, int N>
struct Strided {
  static constexpr int of(int i) {
    const int number = k * i + j;
    return number / N == part ? N + number % N : part == 1 ? number % N : i;
  }
};
// The inverse for vector `to` of the result: number i of the k vectors, one after the other.
template <int k, int to, int part, int N>
struct Merged {
  static constexpr int of(int i) {
    const int number = N * to + i;
    return number % k == part ? N + number / k : part == 1 ? number / k : i;
  }
};

template <template <int, int, int, int> typename Order, int k, typename V>
PROXSPARSE_INLINE void reorder(V* v) {
  constexpr int N = sizeof(V) / sizeof(typename ScalarOf<V>::Type);
  V given[k];
  repeat<k>([&](auto i) PROXSPARSE_INLINED { given[i] = v[i]; });
  repeat<k>([&](auto j) PROXSPARSE_INLINED {
    V numbers = given[0];
    repeat<k - 1>([&](auto part) PROXSPARSE_INLINED {
      numbers = shuffle<Order<k, decltype(j)::value, decltype(part)::value + 1, N>>(numbers, given[part + 1]);
    });
    v[j] = numbers;
  });
}

// k vectors of consecutive numbers -> k vectors, of which number j has every k-th number from j on.
template <int k, typename V>
PROXSPARSE_INLINE void deinterleave(V* v) {
  if constexpr (k % 2 == 1) {
    if constexpr (k > 1) reorder<Strided, k>(v);
  } else {
    V even[k / 2], odd[k / 2];
    repeat<k / 2>([&](auto i) PROXSPARSE_INLINED {
      even[i] = v[2 * i];
      odd[i] = v[2 * i + 1];
      deinterleave2(even[i], odd[i]);
    });
    deinterleave<k / 2>(even);
    deinterleave<k / 2>(odd);
    repeat<k / 2>([&](auto i) PROXSPARSE_INLINED {
      v[2 * i] = even[i];
      v[2 * i + 1] = odd[i];
    });
  }
}

// The inverse.
template <int k, typename V>
PROXSPARSE_INLINE void interleave(V* v) {
  if constexpr (k % 2 == 1) {
    if constexpr (k > 1) reorder<Merged, k>(v);
  } else {
    V even[k / 2], odd[k / 2];
    repeat<k / 2>([&](auto i) PROXSPARSE_INLINED {
      even[i] = v[2 * i];
      odd[i] = v[2 * i + 1];
    });
    interleave<k / 2>(even);
    interleave<k / 2>(odd);
    repeat<k / 2>([&](auto i) PROXSPARSE_INLINED {
      interleave2(even[i], odd[i]);
      v[2 * i] = even[i];
      v[2 * i + 1] = odd[i];
    });
  }
}

// N consecutive blocks as they are stored, as in block_vectors.h.
template <typename Format, int m, int N, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE auto load_wide(const typename Format::Storage* weight) {
  if constexpr (sizeof(T) == sizeof(*weight)) {
    WideBlock<Vec<T, N>, m> block;
    repeat<m>([&](auto i) PROXSPARSE_INLINED { block.w[i] = Vec<T, N>::load(weight + i * N); });
    deinterleave<m>(block.w);
    return block;
  } else {
    using B = Vec<uint32_t, N>;
    WideBlock<B, m> block;
    B pairs[m / 2];  // of weights, the first in the lower half
    repeat<m / 2>([&](auto i) PROXSPARSE_INLINED { pairs[i] = B::load(weight + 2 * i * N); });
    deinterleave<m / 2>(pairs);
    repeat<m / 2>([&](auto i) PROXSPARSE_INLINED {
      block.w[2 * i] = pairs[i] << 16;
      block.w[2 * i + 1] = pairs[i];
    });
    return block;
  }
}

template <typename Format, typename V, int m>
PROXSPARSE_INLINE void store_wide(WideBlock<V, m> stored, typename Format::Storage* weight) {
  constexpr int N = sizeof(V) / sizeof(typename ScalarOf<V>::Type);
  if constexpr (sizeof(typename ScalarOf<V>::Type) == sizeof(*weight)) {
    interleave<m>(stored.w);
    repeat<m>([&](auto i) PROXSPARSE_INLINED { stored.w[i].store(weight + i * N); });
  } else {
    V pairs[m / 2];
    repeat<m / 2>(
        [&](auto i) PROXSPARSE_INLINED { pairs[i] = (stored.w[2 * i] >> 16) | (stored.w[2 * i + 1] & V(0xffff0000)); });
    interleave<m / 2>(pairs);
    repeat<m / 2>([&](auto i) PROXSPARSE_INLINED { pairs[i].store(weight + 2 * i * N); });
  }
}

// The two smallest numbers of a block and their positions; of equal numbers, the later ones.
template <typename V>
struct Smallest {
  V least, second, at_least, at_second;

  PROXSPARSE_INLINE auto includes(int i) const { return (at_least == V(i)) | (at_second == V(i)); }
};

template <typename V, int m>
PROXSPARSE_INLINE Smallest<V> two_smallest(const WideBlock<V, m>& block) {
  using T = typename ScalarOf<V>::Type;
  const auto swapped = block.w[0] < block.w[1];
  Smallest<V> s{smaller(block.w[0], block.w[1]), larger(block.w[0], block.w[1]), select(swapped, V(0), V(1)),
                select(swapped, V(1), V(0))};
  repeat<m - 2>([&](auto k) PROXSPARSE_INLINED {
    const V w = block.w[k + 2], at(T(k + 2));
    const auto least = w <= s.least, second = w <= s.second;
    s.second = select(least, s.least, smaller(w, s.second));
    s.at_second = select(least, s.at_least, select(second, at, s.at_second));
    s.least = smaller(w, s.least);
    s.at_least = select(least, at, s.at_least);
  });
  return s;
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
