// The exact prox of blocks of m = 6, 8 or 10 weights of which n = m - 2 are kept, on the CPU: in the unit in which
// lambda is 1 (u = unit * |c w|, unit = lambda^(1/(m-3))),
//
//   argmin_{x >= 0}  1/2 |x - u|^2 + e_{m-1}(x),   e_{m-1}(x) = the sum of all products of m - 1 of the m numbers
//
// docs/solver.md derives the candidates, which need no sorted block: at most the two smallest numbers become zero.
#pragma once

#include "solve.h"
#include "wide_vectors.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

template <typename T>
struct WideParams {
  double exact_unit;
  T unit, inverse_unit;

  WideParams(double reg_lambda, int m) {
    constexpr double least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
    exact_unit = std::pow(smaller(larger(reg_lambda, least), most), 1.0 / (m - 3));
    unit = static_cast<T>(exact_unit);
    inverse_unit = static_cast<T>(1 / exact_unit);
  }
};

// The largest u for which no product of m - 1 numbers overflows.
template <typename T>
constexpr T kLargestWide = sizeof(T) == 8 ? T(1e30) : T(1e4);

// e_k and e_{k-1} of k numbers: their product, and the sum of the products of all but one.
template <typename V>
struct Products {
  V all, but_one;

  PROXSPARSE_INLINE void append(V x) {
    but_one = but_one * x + all;
    all = all * x;
  }
};

// One sweep of coordinate descent: x_i <- max(u_i - e_{m-2}(the others), 0). Returns the products of the result.
template <typename V, int m>
PROXSPARSE_INLINE Products<V> sweep_wide(const WideBlock<V, m>& u, WideBlock<V, m>& x) {
  Products<V> after[m], before{V(1), V(0)};  // of the numbers after and before each position
  after[m - 1] = before;
  repeat<m - 1>([&](auto k) PROXSPARSE_INLINED {
    after[m - 2 - k] = after[m - 1 - k];
    after[m - 2 - k].append(x.w[m - 1 - k]);
  });
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    x.w[i] = at_least_zero(u.w[i] - before.but_one * after[i].all - before.all * after[i].but_one);
    before.append(x.w[i]);
  });
  return before;
}

template <typename V, int m>
PROXSPARSE_INLINE V half_squared_distance(const WideBlock<V, m>& u, const WideBlock<V, m>& x) {
  V sum(0);
  repeat<m>([&](auto i) PROXSPARSE_INLINED { sum = sum + (x.w[i] - u.w[i]) * (x.w[i] - u.w[i]); });
  return V(0.5) * sum;
}

// (u + sqrt(u^2 - b^2 + (b - 2t)^2)) / 2: the larger solution of x (u - x) = t (b - t), for u >= b. Its derivative by t
// is -(b - 2t) * inverse_root.
template <typename V>
struct LargerRoot {
  V x, inverse_root;

  PROXSPARSE_INLINE LargerRoot(V u, V b, V twice) {  // twice: b - 2t
    using T = typename ScalarOf<V>::Type;
    const V square = (u - b) * (u + b) + twice * twice;
    inverse_root = inverse_square_root(square + V(kIsDouble<T> ? T(1e-300) : T(1e-37)));  // finite for 0
    x = V(T(0.5)) * (u + square * inverse_root);
  }
};

// Let x be the best point with a zero. A better point without zeros needs a smallest u above this part of e_{m-2}(the
// other x). By experiment: the least ratios of 108,000 blocks were 0.787, 0.679 and 0.596, for equal weights.
template <int m>
constexpr double kDenseFromWide = m == 6   ? 0.75
                                  : m == 8 ? 0.65
                                           : 0.57;

constexpr int kMostSweeps = 500;

// The prox where the objective may have several minima. The last sweep moves no number by more than `tolerance` of the
// largest.
template <typename V, int m>
__attribute__((noinline)) void solve_apart(const WideBlock<V, m>& u, WideBlock<V, m>& best,
                                           typename ScalarOf<V>::Type tolerance) {
  using T = typename ScalarOf<V>::Type;
  const V zero(0), one(1);
  const Smallest<V> smallest = two_smallest(u);
  const V a = smallest.least, b = smallest.second;
  // Of the largest m - 2 numbers the product; if it is b or more at x_i (u_i - x_i) = b^2 / 4, the two smallest are 0.
  V bound = one;
  best = u;
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    const auto small = smallest.includes(i);
    bound = bound * select(small, one, LargerRoot<V>(u.w[i], b, zero).x);
    best.w[i] = select(small, zero, u.w[i]);
  });
  auto alive = bound < b;
  if (lane_bits(alive.lanes) == 0) return;

  // Without the smallest: t = x of the second smallest is the larger root of t - b + (product of the others) = 0, whose
  // left side is convex in t. Newton's method descends to it from b - bound.
  V t = select(alive, b - bound, zero);
  for (int step = 0; step < (kIsDouble<T> ? 8 : 6); ++step) {
    const V twice = b - t - t;
    V product = one, slope = zero;
    repeat<m>([&](auto i) PROXSPARSE_INLINED {
      const LargerRoot<V> root(u.w[i], b, twice);
      const auto small = smallest.includes(i);
      const V x = select(small, one, root.x);
      slope = slope * x - product * select(small, zero, twice * root.inverse_root);
      product = product * x;
    });
    alive = alive & (slope > V(-1));
    t = select(alive, t - (t - b + product) / (one + slope), zero);
    alive = alive & (t > zero);
    t = select(alive, t, zero);
  }
  WideBlock<V, m> x, without_smallest;
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    const auto skipped = smallest.at_least == V(T(i));
    without_smallest.w[i] = select(skipped, zero, u.w[i]);
    const V larger_root = LargerRoot<V>(u.w[i], b, b - t - t).x;
    x.w[i] = select(skipped, zero, select(smallest.at_second == V(T(i)), t, larger_root));
  });
  V reg = sweep_wide(without_smallest, x).but_one;  // restores the relative accuracy of small numbers
  const auto objective = [&](const WideBlock<V, m>& x, V reg)
                             PROXSPARSE_INLINED { return half_squared_distance(u, x) + reg; };
  V least = V(T(0.5)) * (a * a + b * b);
  const V sparse = objective(x, reg);
  const auto take = alive & (sparse <= least * V(kTie<T>));
  least = select(take, smaller(sparse, least), least);
  best = each([&](V x, V best) PROXSPARSE_INLINED { return select(take, x, best); }, x, best);

  // All of them: coordinate descent from x_i (u_i - x_i) = a^2 / 4.
  Products<V> others{one, zero};  // of all numbers but the smallest
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    const auto skipped = smallest.at_least == V(T(i));
    const Products<V> old = others;
    others.append(best.w[i]);
    others.all = select(skipped, old.all, others.all);
    others.but_one = select(skipped, old.but_one, others.but_one);
  });
  const auto dense = (bound < b) & (a > V(T(kDenseFromWide<m>)) * others.but_one);
  if (lane_bits(dense.lanes) == 0) return;
  V largest = u.w[0];
  repeat<m - 1>([&](auto i) PROXSPARSE_INLINED { largest = larger(largest, u.w[i + 1]); });
  x = each([&](V u) PROXSPARSE_INLINED { return LargerRoot<V>(u, a, zero).x; }, u);
  for (int sweep = 0; sweep < kMostSweeps; sweep += 2) {
    sweep_wide(u, x);
    WideBlock<V, m> old = x;
    reg = sweep_wide(u, x).but_one;
    V moved = zero;  // a number that is 0 after a sweep may grow again
    repeat<m>([&](auto i) PROXSPARSE_INLINED { moved = larger(moved, magnitude(x.w[i] - old.w[i])); });
    if (lane_bits((dense & (moved > largest * V(tolerance))).lanes) == 0) break;
  }
  V smallest_x = x.w[0];
  repeat<m - 1>([&](auto i) PROXSPARSE_INLINED { smallest_x = smaller(smallest_x, x.w[i + 1]); });
  const auto take_all = dense & (smallest_x > zero) & (objective(x, reg) <= least * V(kTie<T>));
  best = each([&](V x, V best) PROXSPARSE_INLINED { return select(take_all, x, best); }, x, best);
}

// The prox, as u and x, of N blocks v = |c w| of which a number is not finite, or too large for T: each in double. A
// block with a number that is not finite does not change.
template <typename T, int N, int m>
__attribute__((noinline)) void solve_unusual(const WideBlock<Vec<T, N>, m>& v, double unit, WideBlock<Vec<T, N>, m>& u,
                                             WideBlock<Vec<T, N>, m>& x) {
  using D = Vec<double, kLanes<double>>;
  T number[m][N], of_u[m][N], of_x[m][N];
  for (int i = 0; i < m; ++i) v.w[i].store(number[i]);
  for (int lane = 0; lane < N; ++lane) {
    bool finite = true;
    WideBlock<D, m> exact, best;
    for (int i = 0; i < m; ++i) {
      finite = finite && std::isfinite(number[i][lane]);
      exact.w[i] = D(smaller(number[i][lane] * unit, kLargestWide<double>));
    }
    if (finite) solve_apart(exact, best, 2e-15);
    for (int i = 0; i < m; ++i) {
      const double most = std::numeric_limits<T>::max();  // numbers above it do not change
      of_u[i][lane] = finite ? static_cast<T>(smaller(exact.w[i].lanes.raw[0], most)) : T(0);
      of_x[i][lane] = finite ? static_cast<T>(smaller(best.w[i].lanes.raw[0], most)) : T(0);
    }
  }
  for (int i = 0; i < m; ++i) {
    u.w[i] = Vec<T, N>::load(of_u[i]);
    x.w[i] = Vec<T, N>::load(of_x[i]);
  }
}

// The largest number of all positions and lanes. Bits have the order of the magnitudes, infinity and NaN above the
// others.
template <typename V, int m>
PROXSPARSE_INLINE auto largest_wide(const WideBlock<V, m>& block) {
  using Bits = typename V::Bits;
  Vec<Bits, sizeof(V) / sizeof(Bits)> most(0);
  repeat<m>([&](auto i) PROXSPARSE_INLINED { most = larger(most, bits_as<Bits>(block.w[i])); });
  return std::bit_cast<typename ScalarOf<V>::Type>(largest(most));
}

// Coordinate descent from x = u, which converges at `rate` = (m-1)(m-2) mean^(m-3) at least, up to 1/2; `mean` is the
// sum of u divided by m-1. The error is at most rate^(k+1) / (m-2) mean after k sweeps, and at most 2 rate times what
// the last sweep has moved. Stops where it is at most `tolerance` times the mean. docs/solver.md has the proof.
template <typename V, int m, typename T>
PROXSPARSE_INLINE void descend_wide(const WideBlock<V, m>& u, WideBlock<V, m>& x, V mean, V rate, T most, T tolerance) {
  V moved;
  T error = most;
  do {
    const WideBlock<V, m> old = x;
    sweep_wide(u, x);
    moved = V(0);
    repeat<m>([&](auto i) PROXSPARSE_INLINED { moved = larger(moved, magnitude(x.w[i] - old.w[i])); });
    error *= most;
  } while (error > T(m - 2) * tolerance && lane_bits((rate * moved > mean * V(tolerance / 2)).lanes) != 0);
}

// The prox of N blocks in place; `scale` is that of their weights, or null.
template <typename Format, int m, typename T = typename Format::Arithmetic>
PROXSPARSE_INLINE void prox_wide(typename Format::Storage* weight, const T* scale, const WideParams<T>& params) {
  constexpr int N = kLanes<T>;
  using V = Vec<T, N>;
  const auto stored = load_wide<Format, m, N>(weight);
  auto v = each([](auto stored) PROXSPARSE_INLINED { return magnitude(decoded<Format>(stored)); }, stored);
  auto inverse = each([&](V) PROXSPARSE_INLINED { return V(params.inverse_unit); }, v);
  if (scale != nullptr) {
    const auto c = load_wide<Native<T>, m, N>(scale);
    v = each([](V v, V c) PROXSPARSE_INLINED { return v * magnitude(c); }, v, c);
    inverse = each([](V inverse, V c) PROXSPARSE_INLINED { return inverse / magnitude(c); }, inverse, c);
  }
  auto u = each([&](V v) PROXSPARSE_INLINED { return v * V(params.unit); }, v), x = u;
  V mean = u.w[0], rate((m - 1) * (m - 2));
  repeat<m - 1>([&](auto i) PROXSPARSE_INLINED { mean = mean + u.w[i + 1]; });
  mean = mean * V(T(1) / T(m - 1));
  repeat<m - 3>([&](auto) PROXSPARSE_INLINED { rate = rate * mean; });
  const T most = largest_wide(WideBlock<V, 1>{rate});
  constexpr bool rounds = !std::is_same_v<Format, Native<T>>;  // to 8 or 11 bits
  if (most <= T(0.5)) {
    descend_wide(u, x, mean, rate, most, T(sizeof(T) == 8 ? 1e-16 : rounds ? 3e-5 : 1e-7));
  } else if (largest_wide(u) <= kLargestWide<T>) {
    solve_apart(u, x, T(sizeof(T) == 8 ? 2e-15 : rounds ? 1e-5 : 1e-6));
  } else {
    solve_unusual(v, params.exact_unit, u, x);
  }
  WideBlock<std::remove_cv_t<std::remove_reference_t<decltype(stored.w[0])>>, m> result;
  repeat<m>([&](auto i) PROXSPARSE_INLINED {
    const auto old = stored.w[i];
    if constexpr (std::is_same_v<typename Format::Storage, T>) {
      result.w[i] = select(x.w[i] == u.w[i], old, apply_magnitude(old, u.w[i], x.w[i], inverse.w[i]));
    } else {
      result.w[i] = select(x.w[i] == u.w[i], old, Format::encode(x.w[i] * inverse.w[i], sign_bits(old)));
    }
  });
  store_wide<Format>(result, weight);
}

// What a step of AdamW solves together is a multiple of this: whole vectors of blocks of m, and of 4 for the step
// itself.
template <typename T, int m>
constexpr int kWideVectors = (m % 4 == 0 ? m : 2 * m) * kLanes<T>;

// The prox of the rows from `begin` to `end`. The remainder of a row is padded with at least two zeros, so that the
// prox does not change it.
template <typename Format, int m>
void wide_prox_rows(const ProxCall& call, int64_t begin, int64_t end) {
  using T = typename Format::Arithmetic;
  constexpr int64_t kPiece = m * kLanes<T>;
  const WideParams<T> params(call.reg_lambda, m);
  const T* const no_scale = nullptr;
  for (int64_t row = begin; row < end; ++row) {
    auto* weight = static_cast<typename Format::Storage*>(call.weight) + row * call.in_features;
    int64_t first = 0;
    for (; first + kPiece <= call.in_features; first += kPiece) {
      prox_wide<Format, m>(weight + first, no_scale, params);
    }
    const int64_t left = call.in_features - first;
    if (left == 0) continue;
    typename Format::Storage padded[kPiece] = {};
    std::memcpy(padded, weight + first, left * sizeof(*weight));
    prox_wide<Format, m>(padded, no_scale, params);
    std::memcpy(weight + first, padded, left * sizeof(*weight));
  }
}

// The prox of `count` numbers, whole vectors of blocks, after the step of AdamW.
template <typename T, int m>
__attribute__((noinline)) void prox_wide_chunk(T* weight, const T* scale, double reg_lambda, int count) {
  const WideParams<T> params(reg_lambda, m);
  for (int first = 0; first < count; first += m * kLanes<T>) {
    prox_wide<Native<T>, m>(weight + first, scale == nullptr ? nullptr : scale + first, params);
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
