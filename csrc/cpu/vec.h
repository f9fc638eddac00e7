// Vec<S, N>: N numbers of type S with the operators of one number, so that one template serves one block and N blocks
// at a time. Vec uses the vector types of GCC and Clang, PROXSPARSE_VECTOR_BYTES wide. A Vec may consist of several of
// them: the CPU then computes one while it waits for the result of another.
#pragma once

#include "../inline.h"
#include "standard.h"

#define PROXSPARSE_INLINED __attribute__((always_inline))

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// f(0), ..., f(N - 1) with constants. No compiler keeps an array that a loop indexes in registers.
template <int N, typename F>
PROXSPARSE_INLINE void repeat(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      PROXSPARSE_INLINED { (f(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// The numbers in one vector.
template <typename S>
constexpr int kLanes = PROXSPARSE_VECTOR_BYTES / sizeof(S);

// One vector, or two halves. Members, because no compiler keeps an array of vectors in registers.
template <typename S, int N>
struct Lanewise {
  Lanewise<S, N / 2> low, high;
};
template <typename S, int N>
  requires(N == kLanes<S>)
struct Lanewise<S, N> {
  typedef S Raw __attribute__((vector_size(PROXSPARSE_VECTOR_BYTES)));
  typedef S Unaligned __attribute__((vector_size(PROXSPARSE_VECTOR_BYTES), aligned(1), may_alias));
  Raw raw;
};

// f(lanes, lanes, ...), applied to one vector at a time.
template <typename S, int N, typename F, typename... Arguments>
PROXSPARSE_INLINE Lanewise<S, N> lanewise(F f, const Arguments&... arguments) {
  if constexpr (N == kLanes<S>) {
    return {f(arguments.raw...)};
  } else {
    return {lanewise<S, N / 2>(f, arguments.low...), lanewise<S, N / 2>(f, arguments.high...)};
  }
}

// All bits of a lane are set where the condition is true.
template <typename I, int N>
struct Mask {
  Lanewise<I, N> lanes;

  friend PROXSPARSE_INLINE Mask operator&(Mask a, Mask b) {
    return {lanewise<I, N>([](auto a, auto b) { return a & b; }, a.lanes, b.lanes)};
  }
  friend PROXSPARSE_INLINE Mask operator|(Mask a, Mask b) {
    return {lanewise<I, N>([](auto a, auto b) { return a | b; }, a.lanes, b.lanes)};
  }
  friend PROXSPARSE_INLINE Mask operator!(Mask a) {
    return {lanewise<I, N>([](auto a) { return ~a; }, a.lanes)};
  }
};

#define PROXSPARSE_OPERATOR(op)                             \
  friend PROXSPARSE_INLINE Vec operator op(Vec a, Vec b) {  \
    return of([](auto a, auto b) { return a op b; }, a, b); \
  }
#define PROXSPARSE_COMPARISON(op)                                                           \
  friend PROXSPARSE_INLINE Condition operator op(Vec a, Vec b) {                            \
    return {lanewise<Integer, N>([](auto a, auto b) { return a op b; }, a.lanes, b.lanes)}; \
  }

template <typename S, int N>
struct Vec {
  using Raw = typename Lanewise<S, kLanes<S>>::Raw;
  using Bits = std::conditional_t<sizeof(S) == 8, uint64_t, uint32_t>;
  using Integer = std::make_signed_t<Bits>;
  using Condition = Mask<Integer, N>;

  Lanewise<S, N> lanes;

  Vec() = default;
  PROXSPARSE_INLINE Vec(S value) : lanes(broadcast(value, lanes)) {}
  template <typename F, typename... Vecs>
  static PROXSPARSE_INLINE Vec of(F f, Vecs... vecs) {
    Vec v;
    v.lanes = lanewise<S, N>(f, vecs.lanes...);
    return v;
  }
  static PROXSPARSE_INLINE Vec load(const void* memory) {
    Vec v;
    copy(static_cast<const char*>(memory), v.lanes);
    return v;
  }
  PROXSPARSE_INLINE void store(void* memory) const { copy(lanes, static_cast<char*>(memory)); }

  PROXSPARSE_OPERATOR(+)
  PROXSPARSE_OPERATOR(-)
  PROXSPARSE_OPERATOR(*)
  PROXSPARSE_OPERATOR(/)
  PROXSPARSE_OPERATOR(&)
  PROXSPARSE_OPERATOR(|)
  PROXSPARSE_OPERATOR(^)
  PROXSPARSE_COMPARISON(<)
  PROXSPARSE_COMPARISON(>)
  PROXSPARSE_COMPARISON(<=)
  PROXSPARSE_COMPARISON(>=)
  PROXSPARSE_COMPARISON(==)
  PROXSPARSE_COMPARISON(!=)
  friend PROXSPARSE_INLINE Vec operator<<(Vec a, int count) {
    return of([=](auto a) { return a << count; }, a);
  }
  friend PROXSPARSE_INLINE Vec operator>>(Vec a, int count) {
    return of([=](auto a) { return a >> count; }, a);
  }
  friend PROXSPARSE_INLINE Vec select(Condition condition, Vec if_true, Vec if_false) {
    return {lanewise<S, N>([](auto c, auto a, auto b) { return c ? a : b; }, condition.lanes, if_true.lanes,
                           if_false.lanes)};
  }

 private:
  template <int M>
  static PROXSPARSE_INLINE Lanewise<S, M> broadcast(S value, const Lanewise<S, M>&) {
    if constexpr (M == kLanes<S>) {
      return {value - Raw{}};  // x - 0 = x, even for x = -0
    } else {
      return {broadcast(value, Lanewise<S, M / 2>{}), broadcast(value, Lanewise<S, M / 2>{})};
    }
  }
  // One vector at a time. A compiler may copy memory in smaller pieces, and the CPU then waits for all of them.
  template <int M>
  static PROXSPARSE_INLINE void copy(const char* memory, Lanewise<S, M>& to) {
    if constexpr (M == kLanes<S>) {
      to.raw = *reinterpret_cast<const typename Lanewise<S, M>::Unaligned*>(memory);
    } else {
      copy(memory, to.low);
      copy(memory + sizeof(to.low), to.high);
    }
  }
  template <int M>
  static PROXSPARSE_INLINE void copy(const Lanewise<S, M>& from, char* memory) {
    if constexpr (M == kLanes<S>) {
      *reinterpret_cast<typename Lanewise<S, M>::Unaligned*>(memory) = from.raw;
    } else {
      copy(from.low, memory);
      copy(from.high, memory + sizeof(from.low));
    }
  }
  PROXSPARSE_INLINE Vec(Lanewise<S, N> lanes) : lanes(lanes) {}
};

#undef PROXSPARSE_OPERATOR
#undef PROXSPARSE_COMPARISON

template <typename S, int N>
struct ScalarOf<Vec<S, N>> {
  using Type = S;
};

template <typename To, typename S, int N>
PROXSPARSE_INLINE Vec<To, N> bits_as(Vec<S, N> v) {
  return Vec<To, N>::of([](auto v) { return reinterpret_cast<typename Vec<To, N>::Raw>(v); }, v);
}

template <typename S, int N>
PROXSPARSE_INLINE Vec<S, N> magnitude(Vec<S, N> v) {
  using Bits = typename Vec<S, N>::Bits;
  return bits_as<S>(bits_as<Bits>(v) & Vec<Bits, N>(~Bits{0} >> 1));
}

template <typename S, int N>
PROXSPARSE_INLINE auto sign_bits(Vec<S, N> v) {
  using Bits = typename Vec<S, N>::Bits;
  return bits_as<Bits>(v) & Vec<Bits, N>(~(~Bits{0} >> 1));
}

// ------------------------------------------------------------------------- functions with instructions for x86

#if PROXSPARSE_VECTOR_BYTES == 64
#define PROXSPARSE_INTRINSIC(name) _mm512_##name
#elif PROXSPARSE_VECTOR_BYTES == 32
#define PROXSPARSE_INTRINSIC(name) _mm256_##name
#else
#define PROXSPARSE_INTRINSIC(name) _mm_##name
#endif

template <typename S, int N>
PROXSPARSE_INLINE Vec<S, N> larger(Vec<S, N> a, Vec<S, N> b) {
  const auto of_vectors = [](auto a, auto b) {
#ifdef __x86_64__  // GCC emits two instructions for a maximum with zero
    if constexpr (std::is_same_v<S, float>) return PROXSPARSE_INTRINSIC(max_ps)(a, b);
    if constexpr (std::is_same_v<S, double>) return PROXSPARSE_INTRINSIC(max_pd)(a, b);
#endif
    return a > b ? a : b;
  };
  return Vec<S, N>::of(of_vectors, a, b);
}

template <typename S, int N>
PROXSPARSE_INLINE Vec<S, N> smaller(Vec<S, N> a, Vec<S, N> b) {
  return Vec<S, N>::of([](auto a, auto b) { return a < b ? a : b; }, a, b);
}

template <typename S, int N>
PROXSPARSE_INLINE Vec<S, N> sqrt(Vec<S, N> v) {
  const auto of_vector = [](auto v) {
    for (int lane = 0; lane < kLanes<S>; ++lane) v[lane] = std::sqrt(v[lane]);
    return v;
  };
  return Vec<S, N>::of(of_vector, v);
}

// 1 / sqrt(v) for a finite v > 0. For float: the CPU's estimate and one Newton step, exact except for the last one or
// two bits.
template <typename S, int N>
PROXSPARSE_INLINE Vec<S, N> inverse_square_root(Vec<S, N> v) {
  if constexpr (std::is_same_v<S, float> && PROXSPARSE_VECTOR_BYTES >= 32) {
#if PROXSPARSE_VECTOR_BYTES == 64
    const auto y = Vec<S, N>::of([](auto v) { return _mm512_rsqrt14_ps(v); }, v);
#elif PROXSPARSE_VECTOR_BYTES == 32
    const auto y = Vec<S, N>::of([](auto v) { return _mm256_rsqrt_ps(v); }, v);
#else
    const auto y = v;
#endif
    const Vec<S, N> half(S(0.5));
    return y + y * (half - half * v * y * y);
  } else {
    return Vec<S, N>(1) / sqrt(v);
  }
}

// One bit for each lane of a mask.
template <typename I, int N>
PROXSPARSE_INLINE uint32_t lane_bits(const Lanewise<I, N>& mask) {
  if constexpr (N > kLanes<I>) {
    return lane_bits(mask.low) | lane_bits(mask.high) << N / 2;
  } else {
#if PROXSPARSE_VECTOR_BYTES == 64
    if constexpr (sizeof(I) == 4) return _mm512_movepi32_mask((__m512i)mask.raw);
#elif PROXSPARSE_VECTOR_BYTES == 32
    if constexpr (sizeof(I) == 4) return _mm256_movemask_ps((__m256)mask.raw);
#endif
    uint32_t bits = 0;
    for (int lane = 0; lane < N; ++lane) bits |= uint32_t(mask.raw[lane] & 1) << lane;
    return bits;
  }
}

#if PROXSPARSE_VECTOR_BYTES == 32
// For each set of 8 lanes: `packed` has the lane at each place after packing, `unpacked` the place that each lane comes
// from.
struct Permutations {
  alignas(32) int32_t packed[256][8], unpacked[256][8];

  constexpr Permutations() : packed(), unpacked() {
    for (int bits = 0; bits < 256; ++bits) {
      for (int lane = 0, place = 0; lane < 8; ++lane) {
        unpacked[bits][lane] = place;
        if (bits >> lane & 1) packed[bits][place++] = lane;
      }
    }
  }
};
inline constexpr Permutations kPermutations;
#endif

// Writes the lanes named by `bits` without gaps. May overwrite up to N numbers after them.
template <typename S, int N>
PROXSPARSE_INLINE void store_packed(const Lanewise<S, N>& v, uint32_t bits, S* memory) {
  if constexpr (N > kLanes<S>) {
    const uint32_t low = bits & ((1u << N / 2) - 1);
    store_packed(v.low, low, memory);
    store_packed(v.high, bits >> N / 2, memory + std::popcount(low));
  } else {
#if PROXSPARSE_VECTOR_BYTES == 64
    if constexpr (std::is_same_v<S, float>) return _mm512_storeu_ps(memory, _mm512_maskz_compress_ps(bits, v.raw));
#elif PROXSPARSE_VECTOR_BYTES == 32
    if constexpr (std::is_same_v<S, float>) {
      const auto lanes = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPermutations.packed[bits]));
      return _mm256_storeu_ps(memory, _mm256_permutevar8x32_ps(v.raw, lanes));
    }
#endif
    for (int lane = 0; lane < N; ++lane) {
      *memory = v.raw[lane];
      memory += bits >> lane & 1;
    }
  }
}

// Replaces the lanes named by `bits`, in order, by the numbers at `memory`. May read up to N numbers.
template <typename S, int N>
PROXSPARSE_INLINE void load_packed(Lanewise<S, N>& v, uint32_t bits, const S* memory) {
  if constexpr (N > kLanes<S>) {
    const uint32_t low = bits & ((1u << N / 2) - 1);
    load_packed(v.low, low, memory);
    load_packed(v.high, bits >> N / 2, memory + std::popcount(low));
  } else {
#if PROXSPARSE_VECTOR_BYTES == 64
    if constexpr (std::is_same_v<S, float>) {
      v.raw = _mm512_mask_expand_ps(v.raw, bits, _mm512_loadu_ps(memory));
      return;
    }
#elif PROXSPARSE_VECTOR_BYTES == 32
    if constexpr (std::is_same_v<S, float>) {
      const auto places = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPermutations.unpacked[bits]));
      const auto unpacked = _mm256_permutevar8x32_ps(_mm256_loadu_ps(memory), places);
      const auto lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
      const auto named = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lanes), lanes);
      v.raw = _mm256_blendv_ps(v.raw, unpacked, _mm256_castsi256_ps(named));
      return;
    }
#endif
    for (int lane = 0; lane < N; ++lane) {
      if (bits >> lane & 1) v.raw[lane] = *memory++;
    }
  }
}

// ------------------------------------------------------------------------- lanes in another order

// Lanes of(0), of(1), ... of the vectors a and b; the lanes of b follow those of a.
template <typename Lane, typename S, int N, int... i>
PROXSPARSE_INLINE Vec<S, N> shuffle(Vec<S, N> a, Vec<S, N> b, std::integer_sequence<int, i...>) {
  return Vec<S, N>::of([](auto a, auto b) { return __builtin_shufflevector(a, b, Lane::of(i)...); }, a, b);
}
template <typename Lane, typename S, int N>
PROXSPARSE_INLINE Vec<S, N> shuffle(Vec<S, N> a, Vec<S, N> b) {
  static_assert(N == kLanes<S>);
  return shuffle<Lane>(a, b, std::make_integer_sequence<int, N>{});
}

template <int start>
struct EverySecond {  // of two vectors
  static constexpr int of(int i) { return 2 * i + start; }
};
template <int start, int N>
struct Alternating {  // half of one vector and half of the other, lane by lane
  static constexpr int of(int i) { return start * N / 2 + i / 2 + i % 2 * N; }
};
template <int distance, int N>
struct Rotated {
  static constexpr int of(int i) { return (i + distance) % N; }
};

// a0 b0 a1 b1 ... in two vectors <-> a0 a1 ..., b0 b1 ...
template <typename S, int N>
PROXSPARSE_INLINE void deinterleave2(Vec<S, N>& a, Vec<S, N>& b) {
  const Vec<S, N> first = a, second = b;
  a = shuffle<EverySecond<0>>(first, second);
  b = shuffle<EverySecond<1>>(first, second);
}
template <typename S, int N>
PROXSPARSE_INLINE void interleave2(Vec<S, N>& a, Vec<S, N>& b) {
  const Vec<S, N> first = a, second = b;
  a = shuffle<Alternating<0, N>>(first, second);
  b = shuffle<Alternating<1, N>>(first, second);
}

// The largest lane, by halving.
template <int distance, typename S, int N>
PROXSPARSE_INLINE S largest_lane(Vec<S, N> v) {
  const Vec<S, N> half = larger(v, shuffle<Rotated<distance, N>>(v, v));
  if constexpr (distance == 1) {
    return half.lanes.raw[0];
  } else {
    return largest_lane<distance / 2>(half);
  }
}
template <typename S, int N>
PROXSPARSE_INLINE S largest(Vec<S, N> v) {
  return largest_lane<N / 2>(v);
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
