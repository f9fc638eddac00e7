// The exact prox of a chunk of blocks, N lanes at a time. Groups of blocks use the cheapest solver that supports all of
// their blocks.
#pragma once

#include "block_vectors.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

template <typename V>
PROXSPARSE_INLINE V block_maximum(Block<V> u) {
  return larger(larger(u.w1, u.w2), larger(u.w3, u.w4));
}

// The largest magnitude of many blocks. Compares bits, which have the order of the magnitudes, with infinity and NaN
// above all numbers.
template <typename V>
struct Maximum {
  using T = typename ScalarOf<V>::Type;
  using Bits = Vec<typename V::Bits, sizeof(V) / sizeof(T)>;
  Bits most;

  PROXSPARSE_INLINE Maximum() : most(0) {}

  PROXSPARSE_INLINE void add(Block<V> u) {
    const auto bits = [](V v) __attribute__((always_inline)) { return bits_as<typename V::Bits>(v); };
    most = larger(most, block_maximum(each(bits, u)));
  }
  PROXSPARSE_INLINE T largest_of_all() const { return std::bit_cast<T>(largest(most)); }
};

// The scale c of the weights of a chunk that begins at weight number `first`; a chunk may span rows.
template <typename T>
PROXSPARSE_INLINE void load_scale(const void* scale, int64_t in_features, int64_t first, T* of_chunk) {
  int64_t column = first % in_features;
  for (int64_t filled = 0; filled < kChunkWeights; column = 0) {
    const int64_t piece = smaller(kChunkWeights - filled, in_features - column);
    std::memcpy(of_chunk + filled, static_cast<const T*>(scale) + column, piece * sizeof(T));
    filled += piece;
  }
}

// The factors between |w| and u, for N blocks: u = unit * |w|, unit = lambda |c|.
template <typename V>
struct Units {
  Block<V> unit, inverse;
};

template <typename V, typename T>
PROXSPARSE_INLINE Units<V> units(const ProxParams<T>& params, const T* scale, int b) {
  const V unit(params.lambda), inverse(params.inverse_lambda);
  if (scale == nullptr) return {{unit, unit, unit, unit}, {inverse, inverse, inverse, inverse}};
  const Block<V> scaled =
      each([=](V c) { return magnitude(c) * unit; }, load_stored<Native<T>, sizeof(V) / sizeof(T)>(scale + 4 * b));
  return {scaled, each([](V unit) { return V(1) / unit; }, scaled)};
}

// Blocks that need the same solver, packed without gaps, so that every lane computes a block that needs it.
template <typename T>
struct Queue {
  BlockVectors<T> u, x;
  int length = 0;

  // Appends the lanes of `block` named by `bits`.
  template <typename V>
  PROXSPARSE_INLINE void append(Block<V> block, uint32_t bits) {
    const int end = length;
    store_packed(block.w1.lanes, bits, u.weight[0] + end);
    store_packed(block.w2.lanes, bits, u.weight[1] + end);
    store_packed(block.w3.lanes, bits, u.weight[2] + end);
    store_packed(block.w4.lanes, bits, u.weight[3] + end);
    length = end + std::popcount(bits);
  }
  // Appends zeros after the last block: the last vector may have lanes without a block.
  template <typename V>
  PROXSPARSE_INLINE void pad() {
    const V zero(0);
    u.store(length, Block<V>{zero, zero, zero, zero});
    x.store(length, Block<V>{zero, zero, zero, zero});
  }
  // Returns `block` with the lanes named by `bits` replaced by the results from number `first` on.
  template <typename V>
  PROXSPARSE_INLINE Block<V> take(Block<V> block, uint32_t bits, int first) const {
    load_packed(block.w1.lanes, bits, x.weight[0] + first);
    load_packed(block.w2.lanes, bits, x.weight[1] + first);
    load_packed(block.w3.lanes, bits, x.weight[2] + first);
    load_packed(block.w4.lanes, bits, x.weight[3] + first);
    return block;
  }
};

// Solves the blocks whose support no formula decides, each with the iterative solvers it needs.
template <typename T>
void solve_pending(Queue<T>& pending) {
  constexpr int N = 2 * kLanes<T>;  // two vectors at a time: an iteration is a chain of dependent operations
  using V = Vec<T, N>;
  Queue<T> dense;  // few: copied one by one
  int from[kChunk];
  pending.template pad<V>();
  for (int b = 0; b < pending.length; b += N) {
    const Sorted<V> sorted = sort_descending(pending.u.template load<V>(b));
    const Block<V> best = best_without_fourth_24(sorted.block);
    pending.x.store(b, unsort(sorted, best));
    uint32_t bits = lane_bits(dense_may_win_24(sorted.block, best).lanes);
    for (; bits != 0; bits &= bits - 1) {
      from[dense.length] = b + std::countr_zero(bits);
      for (int i = 0; i < 4; ++i) {
        dense.u.weight[i][dense.length] = pending.u.weight[i][from[dense.length]];
        dense.x.weight[i][dense.length] = pending.x.weight[i][from[dense.length]];
      }
      ++dense.length;
    }
  }
  dense.template pad<V>();
  for (int b = 0; b < dense.length; b += N) {
    const Sorted<V> sorted = sort_descending(dense.u.template load<V>(b));
    const Block<V> start = sort_descending(dense.x.template load<V>(b)).block;  // x is in the order of u
    dense.x.store(b, unsort(sorted, best_with_fourth_24(sorted.block, start)));
  }
  for (int k = 0; k < dense.length; ++k) {
    for (int i = 0; i < 4; ++i) pending.x.weight[i][from[k]] = dense.x.weight[i][k];
  }
}

// x <- the prox of u in the groups whose bit is set in `waiting`.
template <typename T>
void solve_waiting(uint64_t waiting, const BlockVectors<T>& u, BlockVectors<T>& x) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const V zero(0);
  Queue<T> pending;
  uint32_t pending_bits[kChunk / N] = {};
  for (int b = 0; b < kChunk; b += N) {
    if ((waiting >> b / (kGroup * N) & 1) == 0) continue;
    const Block<V> block = u.template load<V>(b);
    const Sorted<V> sorted = sort_descending(block);
    x.store(b, unsort(sorted, Block<V>{sorted.block.w1, sorted.block.w2, zero, zero}));
    pending_bits[b / N] = lane_bits((!two_sparse_24(sorted.block)).lanes);
    pending.append(block, pending_bits[b / N]);
  }
  if (pending.length == 0) return;
  solve_pending(pending);
  for (int b = 0, taken = 0; b < kChunk; taken += std::popcount(pending_bits[b / N]), b += N) {
    if (pending_bits[b / N] != 0) x.store(b, pending.take(x.template load<V>(b), pending_bits[b / N], taken));
  }
}

// Returns the number of magnitude x / unit with the sign of w, where |w| = u / unit; a zero is +0. For accuracy, a
// small change is converted to the unit of w and added; a large one is not: the result itself is converted.
template <typename V>
PROXSPARSE_INLINE V apply_magnitude(V w, V u, V x, V inverse_unit) {
  using T = typename ScalarOf<V>::Type;
  const V factor = bits_as<T>(sign_bits(w) | bits_as<typename V::Bits>(inverse_unit));
  const V product = factor * x;
  return select(x + x > u, w + factor * (x - u), select(product == V(0), V(0), product));
}

// Replaces u in the blocks from b on where it is not finite. number(b, i) is the weight times the scale. If a number of
// the block is not finite, u becomes 0: the block keeps its weights. Otherwise only u overflowed; such numbers are so
// large that the two largest are kept, and small integers in the same order replace u.
template <typename Number, typename T>
void replace_nonfinite(Number number, int b, int count, BlockVectors<T>& u) {
  for (const int end = b + count; b < end; ++b) {
    bool finite = true, overflows = false;
    for (int i = 0; i < 4; ++i) {
      finite &= std::isfinite(number(b, i));
      overflows |= !std::isfinite(u.weight[i][b]);
    }
    if (!overflows) continue;
    for (int i = 0; i < 4; ++i) {
      const T magnitude = std::abs(number(b, i));
      int before = 0;
      for (int j = 0; j < 4; ++j) {
        const T other = std::abs(number(b, j));
        before += other > magnitude || (other == magnitude && j < i);
      }
      u.weight[i][b] = finite && magnitude > 0 ? T(5 - before) : T(0);
    }
  }
}

// The prox of one chunk of blocks.
//   load(b)                         -> u of the blocks from b on, one lane each; called once for each b, in order
//   replace_nonfinite(b, count, u)  makes u finite in the blocks from b on
//   finish(b, u, x)                 takes the result; called once for each b, in any order
// The most frequent solver, coordinate descent, needs no memory.
template <typename Format, typename T = typename Format::Arithmetic, typename Load, typename Replace, typename Finish>
PROXSPARSE_INLINE void solve_chunk(Load load, Replace replace_nonfinite, Finish finish) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  BlockVectors<T> u;
  uint64_t waiting = 0;  // a bit for each group that coordinate descent cannot solve
  for (int group = 0; group < kChunk / (kGroup * N); ++group) {
    const int first = group * kGroup * N;
    Block<V> start[kGroup];
    Maximum<V> maximum;
    for (int i = 0; i < kGroup; ++i) {
      start[i] = load(first + i * N);
      maximum.add(start[i]);
    }
    T largest = maximum.largest_of_all();
    if (!(largest <= std::numeric_limits<T>::max())) [[unlikely]] {
      for (int i = 0; i < kGroup; ++i) u.store(first + i * N, start[i]);
      replace_nonfinite(first, kGroup * N, u);
      maximum = Maximum<V>();
      for (int i = 0; i < kGroup; ++i) {
        start[i] = u.template load<V>(first + i * N);
        maximum.add(start[i]);
      }
      largest = maximum.largest_of_all();
    }
    if (largest <= T(kConvexUpTo)) {
      Block<V> x[kGroup];
      for (int i = 0; i < kGroup; ++i) x[i] = start[i];
      for (int sweep = sweeps_needed<Format::kSweepsNeeded>(largest); sweep > 0; --sweep) {
        for (int i = 0; i < kGroup; ++i) x[i] = sweep_24(start[i], x[i]);
      }
      for (int i = 0; i < kGroup; ++i) finish(first + i * N, start[i], x[i]);
    } else {
      for (int i = 0; i < kGroup; ++i) u.store(first + i * N, start[i]);
      waiting |= uint64_t{1} << group;
    }
  }
  if (waiting == 0) return;
  BlockVectors<T> x;
  solve_waiting(waiting, u, x);
  for (int b = 0; b < kChunk; b += N) {
    if (waiting >> b / (kGroup * N) & 1) finish(b, u.template load<V>(b), x.template load<V>(b));
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
