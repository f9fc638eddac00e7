// The exact prox of a chunk of blocks, N lanes at a time: the cheapest way that serves all of them, or block by block.
#pragma once

#include "lanes.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// lambda and n of n:4, in the units of the solvers: u = unit * |w|, lambda * |w| for 2:4 and |w| itself for 1:4.
template <typename T>
struct Strength {
  T lambda, unit;
  T gain;  // 1 / (1 - lambda), for 1:4; 0 from lambda = 1 on, where the largest weight of a block stays alone
  int64_t n;
};

// Clamped so that neither lambda nor its inverse is infinite in T; the gain in double, because in T lambda may be 1.
template <typename T>
Strength<T> strength_of(double reg_lambda, int64_t n) {
  constexpr double least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  const T lambda = static_cast<T>(smaller(larger(reg_lambda, least), most));
  return {lambda, n == 2 ? lambda : T(1), static_cast<T>(reg_lambda < 1 ? 1 / (1 - reg_lambda) : 0), n};
}

template <typename V>
PROXSPARSE_INLINE V block_maximum(Block<V> u) {
  return larger(larger(u.w1, u.w2), larger(u.w3, u.w4));
}

// The largest magnitude of many blocks; read off the bits, which are in the order of the magnitudes and
// put infinity and NaN above all.
template <typename V>
struct Maxima {
  using T = typename ScalarOf<V>::Type;
  using Bits = Vec<typename V::Bits, sizeof(V) / sizeof(T)>;
  Bits most;

  PROXSPARSE_INLINE Maxima() : most(0) {}

  PROXSPARSE_INLINE void add(Block<V> u) {
    const auto bits = [](V v) __attribute__((always_inline)) { return bits_as<typename V::Bits>(v); };
    most = larger(most, block_maximum(each(bits, u)));
  }
  PROXSPARSE_INLINE T largest_of_all() const { return std::bit_cast<T>(largest(most)); }
};

template <typename T>
PROXSPARSE_INLINE int sweeps_needed(T largest_u, int Sweeps::* precision) {
  int row = 0;
  while (row < kSweepRows - 1 && largest_u > kSweeps[row].reach) ++row;
  return kSweeps[row].*precision;
}

// The metric of kChunk blocks from the weight number `start` on, in the order of the weights; a chunk may span rows.
template <typename T>
PROXSPARSE_INLINE void load_metric(const T* scale, int64_t in_features, int64_t start, T* metric) {
  int64_t column = start % in_features;
  for (int64_t filled = 0; filled < kChunkWeights; column = 0) {
    const int64_t piece = smaller(kChunkWeights - filled, in_features - column);
    std::memcpy(metric + filled, scale + column, piece * sizeof(T));
    filled += piece;
  }
}

// u = unit * |w| of N blocks, and back; with a metric c the unit of a column is that of the strength times |c|.
template <typename V>
struct Units {
  Block<V> unit, inverse;
};

template <typename V, typename T>
PROXSPARSE_INLINE Units<V> units(const Strength<T>& strength, const T* metric, int b) {
  const V unit(strength.unit), inverse(1 / strength.unit);
  if (metric == nullptr) return {{unit, unit, unit, unit}, {inverse, inverse, inverse, inverse}};
  const Block<V> scaled =
      each([=](V c) { return magnitude(c) * unit; }, load_stored<Native<T>, sizeof(V) / sizeof(T)>(metric + 4 * b));
  return {scaled, each([](V unit) { return V(1) / unit; }, scaled)};
}

// Blocks that wait for the same solver, closely packed, so that no lane computes what its block does not need.
template <typename T>
struct Queue {
  Lanes<T> u, x;
  int length = 0;

  // Appends the lanes of `block` named by `bits`.
  template <typename V>
  PROXSPARSE_INLINE void append(Block<V> block, uint32_t bits) {
    const int end = length;
    store_packed(block.w1.lanes, bits, u.of[0] + end);
    store_packed(block.w2.lanes, bits, u.of[1] + end);
    store_packed(block.w3.lanes, bits, u.of[2] + end);
    store_packed(block.w4.lanes, bits, u.of[3] + end);
    length = end + std::popcount(bits);
  }
  // Behind the last block follow zeros: what the last lanes compute has to be harmless.
  template <typename V>
  PROXSPARSE_INLINE void close() {
    const V zero(0);
    u.store(length, Block<V>{zero, zero, zero, zero});
    x.store(length, Block<V>{zero, zero, zero, zero});
  }
  // The lanes of `block` named by `bits` become the results from number `first` on.
  template <typename V>
  PROXSPARSE_INLINE Block<V> take(Block<V> block, uint32_t bits, int first) const {
    load_packed(block.w1.lanes, bits, x.of[0] + first);
    load_packed(block.w2.lanes, bits, x.of[1] + first);
    load_packed(block.w3.lanes, bits, x.of[2] + first);
    load_packed(block.w4.lanes, bits, x.of[3] + first);
    return block;
  }
};

// The blocks of which no formula names the winner, each to the iterative solvers it needs.
template <typename T>
void solve_pending(Queue<T>& pending) {
  constexpr int N = 2 * kLanes<T>;  // two vectors at a time: an iteration is a chain of dependent operations
  using V = Vec<T, N>;
  Queue<T> dense;  // few: copied one by one
  int from[kChunk];
  pending.template close<V>();
  for (int b = 0; b < pending.length; b += N) {
    const Sorted<V> sorted = sort_descending(pending.u.template load<V>(b));
    const Block<V> best = best_without_fourth_24(sorted.block);
    pending.x.store(b, unsort(sorted, best));
    uint32_t bits = lane_bits(dense_may_win_24(sorted.block, best).lanes);
    for (; bits != 0; bits &= bits - 1) {
      from[dense.length] = b + std::countr_zero(bits);
      for (int i = 0; i < 4; ++i) {
        dense.u.of[i][dense.length] = pending.u.of[i][from[dense.length]];
        dense.x.of[i][dense.length] = pending.x.of[i][from[dense.length]];
      }
      ++dense.length;
    }
  }
  dense.template close<V>();
  for (int b = 0; b < dense.length; b += N) {
    const Sorted<V> sorted = sort_descending(dense.u.template load<V>(b));
    const Block<V> start = sort_descending(dense.x.template load<V>(b)).block;  // x is in the order of u
    dense.x.store(b, unsort(sorted, best_with_fourth_24(sorted.block, start)));
  }
  for (int k = 0; k < dense.length; ++k) {
    for (int i = 0; i < 4; ++i) pending.x.of[i][from[k]] = dense.x.of[i][k];
  }
}

// x <- the prox of u in the groups that wait.
template <typename T>
void solve_waiting(const Strength<T>& strength, uint64_t waiting, const Lanes<T>& u, Lanes<T>& x) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const V zero(0);
  Queue<T> pending;
  uint32_t pending_bits[kChunk / N] = {};
  for (int b = 0; b < kChunk; b += N) {
    if ((waiting >> b / (kGroup * N) & 1) == 0) continue;
    const Block<V> block = u.template load<V>(b);
    const Sorted<V> sorted = sort_descending(block);
    if (strength.n == 1) {
      const Block<V> largest{sorted.block.w1, zero, zero, zero};
      const bool alone = strength.gain == 0;
      x.store(b, unsort(sorted, alone ? largest : solve_14(sorted.block, V(strength.lambda), V(strength.gain))));
    } else {
      x.store(b, unsort(sorted, Block<V>{sorted.block.w1, sorted.block.w2, zero, zero}));
      pending_bits[b / N] = lane_bits((!two_sparse_24(sorted.block)).lanes);
      pending.append(block, pending_bits[b / N]);
    }
  }
  if (pending.length == 0) return;
  solve_pending(pending);
  for (int b = 0, taken = 0; b < kChunk; taken += std::popcount(pending_bits[b / N]), b += N) {
    if (pending_bits[b / N] != 0) x.store(b, pending.take(x.template load<V>(b), pending_bits[b / N], taken));
  }
}

// The number of magnitude x / unit with the sign of w, whose own magnitude is u / unit; a zero is +0. Where little
// changes, the change is what is converted; where much does, the result: each keeps its accuracy.
template <typename V>
PROXSPARSE_INLINE V moved(V w, V u, V x, V inverse_unit) {
  using T = typename ScalarOf<V>::Type;
  const V factor = bits_as<T>(sign_bits(w) | bits_as<typename V::Bits>(inverse_unit));
  const V product = factor * x;
  return select(x + x > u, w + factor * (x - u), select(product == V(0), V(0), product));
}

// For the blocks from b on whose u are not finite: zeros where a number in the metric, number(b, i), is not finite
// either, because zeros stay zeros; else the numbers are large enough for the two largest to win: their ranks stand in.
template <typename Number, typename T>
void mend(Number number, int b, int count, Lanes<T>& u) {
  for (const int end = b + count; b < end; ++b) {
    bool finite = true, overflows = false;
    for (int i = 0; i < 4; ++i) {
      finite &= std::isfinite(number(b, i));
      overflows |= !std::isfinite(u.of[i][b]);
    }
    if (!overflows) continue;
    for (int i = 0; i < 4; ++i) {
      const T magnitude = std::abs(number(b, i));
      int before = 0;
      for (int j = 0; j < 4; ++j) {
        const T other = std::abs(number(b, j));
        before += other > magnitude || (other == magnitude && j < i);
      }
      u.of[i][b] = finite && magnitude > 0 ? T(5 - before) : T(0);
    }
  }
}

// The prox of one chunk of blocks.
//   load(b)          -> u of the blocks from b on, one lane each; called once for each b, in order
//   mend(b, count, u)  makes u finite in the blocks from b on
//   finish(b, u, x)  takes the result; once for each b, in any order
// Groups of a few vectors go the cheapest way that serves all their blocks, the most frequent one without a detour
// through memory.
template <typename T, typename Load, typename Mend, typename Finish>
PROXSPARSE_INLINE void solve_chunk(const Strength<T>& strength, int Sweeps::* precision, Load load, Mend mend,
                                   Finish finish) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  Lanes<T> u;
  uint64_t waiting = 0;  // one bit for each group
  for (int group = 0; group < kChunk / (kGroup * N); ++group) {
    const int first = group * kGroup * N;
    Block<V> start[kGroup];
    Maxima<V> maxima;
    for (int i = 0; i < kGroup; ++i) {
      start[i] = load(first + i * N);
      maxima.add(start[i]);
    }
    T largest = maxima.largest_of_all();
    if (!(largest <= std::numeric_limits<T>::max())) [[unlikely]] {
      for (int i = 0; i < kGroup; ++i) u.store(first + i * N, start[i]);
      mend(first, kGroup * N, u);
      maxima = Maxima<V>();
      for (int i = 0; i < kGroup; ++i) {
        start[i] = u.template load<V>(first + i * N);
        maxima.add(start[i]);
      }
      largest = maxima.largest_of_all();
    }
    if (strength.n == 2 && largest <= T(kConvexUpTo)) {
      Block<V> at[kGroup];
      for (int i = 0; i < kGroup; ++i) at[i] = start[i];
      for (int sweep = sweeps_needed(largest, precision); sweep > 0; --sweep) {
        for (int i = 0; i < kGroup; ++i) at[i] = sweep_24(start[i], at[i]);
      }
      for (int i = 0; i < kGroup; ++i) finish(first + i * N, start[i], at[i]);
    } else {
      for (int i = 0; i < kGroup; ++i) u.store(first + i * N, start[i]);
      waiting |= uint64_t{1} << group;
    }
  }
  if (waiting == 0) return;
  Lanes<T> x;
  solve_waiting(strength, waiting, u, x);
  for (int b = 0; b < kChunk; b += N) {
    if (waiting >> b / (kGroup * N) & 1) finish(b, u.template load<V>(b), x.template load<V>(b));
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
