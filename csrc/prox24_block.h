// The proximal operator of ONE 2:4 block, on the CPU and on the GPU. T is one number or a vector of
// numbers. No function has a branch that depends on a number: a loop over blocks becomes vector code, and the threads
// of a GPU diverge only where the caller branches.
//
//   argmin_{x >= 0}  1/2 |x - u|^2 + e_3(x),  e_3(x) = x1 x2 x3 + x1 x2 x4 + x1 x3 x4 + x2 x3 x4
//
// in the unit in which lambda is 1: u = lambda * z and x = lambda * w, where z are the magnitudes of the block.
// u1 >= u2 >= u3 >= u4 unless a function says otherwise. solve_24 in proxsparse/reference explains the candidates, and
// solves all of them. The criteria here choose the support without solving: our own derivation, checked on 10^7 random
// blocks.
#pragma once

#include <cmath>
#include <limits>

#include "inline.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// Four magnitudes, in descending order unless a function says otherwise.
template <typename T>
struct Block {
  T w1, w2, w3, w4;
};

// ------------------------------------------------------------------------- arithmetic (for vectors: cpu/vec.h)

// By value: a conditional between two lvalues would be a conditional address, which no compiler vectorizes.
template <typename T>
PROXSPARSE_INLINE T select(bool condition, T if_true, T if_false) {
  return condition ? if_true : if_false;
}

template <typename T>
PROXSPARSE_INLINE T larger(T a, T b) {
#ifdef __CUDA_ARCH__
  return max(a, b);  // one instruction; of a NaN and a number, it returns the number
#endif
  return a > b ? a : b;
}

template <typename T>
PROXSPARSE_INLINE T smaller(T a, T b) {
#ifdef __CUDA_ARCH__
  return min(a, b);
#endif
  return a < b ? a : b;
}

// max(v, 0) for v <= 1. On a GPU, the instruction that computes v can saturate its result at no cost.
template <typename T>
PROXSPARSE_INLINE T at_least_zero(T v) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return __saturatef(v);
#endif
  return larger(v, T(0));
}

// One instruction, exact to 1 or 2 units in the last place; treats a subnormal number as zero.
#define PROXSPARSE_APPROXIMATE(function, v)                          \
  [](float x) {                                                      \
    float result;                                                    \
    asm(function ".approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x)); \
    return result;                                                   \
  }(v)

template <typename T>
PROXSPARSE_INLINE T square_root(T v) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return PROXSPARSE_APPROXIMATE("sqrt", v);
#endif
  using std::sqrt;
  return sqrt(v);
}

template <typename T>
PROXSPARSE_INLINE T inverse_square_root(T v) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return PROXSPARSE_APPROXIMATE("rsqrt", v);
#endif
  return T(1) / std::sqrt(v);
}

template <typename T>
PROXSPARSE_INLINE T reciprocal(T v) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) return PROXSPARSE_APPROXIMATE("rcp", v);
#endif
  return T(1) / v;
}

template <typename T>
constexpr bool kIsDouble = sizeof(typename ScalarOf<T>::Type) == 8;

// ------------------------------------------------------------------------- the parameters of a prox

template <typename T>
struct ProxParams {
  T lambda, inverse_lambda;  // clamped so that both are finite and positive in T

  explicit ProxParams(double reg_lambda) {
    constexpr double least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
    lambda = static_cast<T>(smaller(larger(reg_lambda, least), most));
    inverse_lambda = 1 / lambda;
  }
};

// ------------------------------------------------------------------------- the order of a block

// A block in descending order, and the swaps of neighbours that sorted it. The sort is stable: ties keep their order.
template <typename T>
struct Sorted {
  using Condition = decltype(T(0) < T(0));
  Block<T> block;
  Condition first12, first34, first23, second12, second34, second23;
};

template <typename Condition, typename T>
PROXSPARSE_INLINE void swap_if(Condition condition, T& a, T& b) {
  const T old = a;
  a = select(condition, b, a);
  b = select(condition, old, b);
}

template <typename T>
PROXSPARSE_INLINE auto descending(T& a, T& b) {
  const auto swapped = a < b;
  const T high = larger(a, b), low = smaller(a, b);
  a = high;
  b = low;
  return swapped;
}

template <typename T>
PROXSPARSE_INLINE Sorted<T> sort_descending(Block<T> m) {
  const auto first12 = descending(m.w1, m.w2), first34 = descending(m.w3, m.w4), first23 = descending(m.w2, m.w3);
  const auto second12 = descending(m.w1, m.w2), second34 = descending(m.w3, m.w4), second23 = descending(m.w2, m.w3);
  return {m, first12, first34, first23, second12, second34, second23};
}

// Returns x, which is in the order of the sorted block, in the order before sorting.
template <typename T>
PROXSPARSE_INLINE Block<T> unsort(const Sorted<T>& sorted, Block<T> x) {
  swap_if(sorted.second23, x.w2, x.w3);
  swap_if(sorted.second34, x.w3, x.w4);
  swap_if(sorted.second12, x.w1, x.w2);
  swap_if(sorted.first23, x.w2, x.w3);
  swap_if(sorted.first34, x.w3, x.w4);
  swap_if(sorted.first12, x.w1, x.w2);
  return x;
}

// ------------------------------------------------------------------------- 2:4, the convex range

// Up to u1 = 0.3 the objective has one stationary point on x >= 0, and coordinate descent finds it; the magnitudes may
// be in any order. (Up to 0.16 the objective is strictly convex: the off-diagonal row sums of its Hessian are below 1.
// From there on by experiment: no miss in 10^7 random blocks up to 0.31.)
constexpr double kConvexUpTo = 0.3;

// The number of sweeps from x = u after which the error of every weight is below 3e-5 u1 (`rounded`: enough for a
// result that is rounded to 8 or 11 bits), 1e-7 u1 (float32) and 1e-15 u1 (float64), for u1 <= max_u1. Source: the
// worst of 72,000 blocks of all families in tests/ops/blocks.py.
struct Sweeps {
  float max_u1;
  int rounded, float32, float64;
};
constexpr Sweeps kSweeps[] = {{0.003f, 2, 3, 6},  {0.01f, 2, 4, 7},  {0.03f, 3, 5, 10},  {0.06f, 4, 6, 13},
                              {0.1f, 5, 8, 17},   {0.13f, 6, 9, 19}, {0.16f, 6, 10, 21}, {0.2f, 7, 12, 24},
                              {0.25f, 9, 13, 28}, {0.3f, 10, 16, 33}};
constexpr int kSweepRows = sizeof(kSweeps) / sizeof(kSweeps[0]);

// The sweeps for blocks with u1 <= largest <= kConvexUpTo. Comparisons with constants: a GPU then needs no table in
// memory.
template <int Sweeps::* kPrecision, int row = kSweepRows - 1, typename T>
PROXSPARSE_INLINE int sweeps_needed(T largest) {
  constexpr Sweeps sweeps = kSweeps[row], previous = kSweeps[row > 0 ? row - 1 : 0];
  if constexpr (row == 0) {
    return sweeps.*kPrecision;
  } else {
    return select(largest > previous.max_u1, sweeps.*kPrecision, sweeps_needed<kPrecision, row - 1>(largest));
  }
}

// One sweep of coordinate descent for u1 <= 1, in any order: x_i <- max(u_i - e_2(the three others), 0).
template <typename T>
PROXSPARSE_INLINE Block<T> sweep_24(Block<T> u, Block<T> x) {
  const T sum12 = x.w1 + x.w2;
  x.w4 = at_least_zero(u.w4 - x.w1 * x.w2 - sum12 * x.w3);
  x.w3 = at_least_zero(u.w3 - x.w1 * x.w2 - sum12 * x.w4);
  const T sum34 = x.w3 + x.w4;
  x.w2 = at_least_zero(u.w2 - x.w3 * x.w4 - sum34 * x.w1);
  x.w1 = at_least_zero(u.w1 - x.w3 * x.w4 - sum34 * x.w2);
  return x;
}

// ------------------------------------------------------------------------- 2:4, the candidates

template <typename T>
PROXSPARSE_INLINE T objective_24(Block<T> u, Block<T> x) {
  const T d1 = x.w1 - u.w1, d2 = x.w2 - u.w2, d3 = x.w3 - u.w3, d4 = x.w4 - u.w4;
  return T(0.5) * (d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4) + x.w1 * x.w2 * x.w3 +
         x.w4 * (x.w1 * x.w2 + (x.w1 + x.w2) * x.w3);
}

// For u1 >= (1 + sqrt 2) / 2 no 3-sparse candidate is better than the 2-sparse one; for u1 >= 1 no dense one is.
constexpr double kTwoSparseFrom = 1.2071067811865475;

// Where true, (u1, u2, 0, 0) is the optimum. A 3-sparse point with x3 = t can be better only if k(t) < 0,
//   k(t) = t/2 - u3 + (p^2 / (1 + t) - m^2 / (1 - t)) / 4,  p = u1 + u2, m = u1 - u2, 0 <= t <= u3.
// If u1^2 + u2^2 <= 1, the sign of k(0) = u1 u2 - u3 decides. Otherwise the minima of the terms of k bound it.
template <typename T>
PROXSPARSE_INLINE auto two_sparse_24(Block<T> u) {
  const T p = u.w1 + u.w2, m = u.w1 - u.w2, half = p * T(0.5);
  const T rising = select(half < T(0.7071067811865476), half * half, p * T(0.7071067811865476) - T(0.5));
  const T bound = (rising - u.w3) * (T(1) - u.w3) - T(0.25) * m * m;  // of k, times 1 - u3
  return (u.w1 >= T(kTwoSparseFrom)) |
         ((u.w3 <= u.w1 * u.w2) & ((u.w1 * u.w1 + u.w2 * u.w2 <= T(1)) | ((bound >= T(0)) & (u.w3 < T(1)))));
}

// 2f / (f' + sqrt(f'^2 - 2 f f'')): the step to the nearer root of the quadratic Taylor model.
template <typename T>
PROXSPARSE_INLINE T euler_step(T f, T slope, T curvature, T floor) {
  const T root = square_root(larger(slope * slope - T(2) * f * curvature, T(0)));
  return T(2) * f * reciprocal(larger(larger(slope, T(0)) + root, floor));
}

// The steps after which the objective is at most 1e-6 u1^2 (float) or 1e-15 u1^2 (double) above the optimum, for all of
// 2 million random blocks.
template <typename T>
constexpr int kEulerSteps = kIsDouble<T> ? 5 : 3;

template <typename T>
struct ThreeSparse {
  Block<T> x;
  T gain;  // k(t) as above: at most 0 where x is better than (u1, u2, 0, 0)
};

// The candidate with x4 = 0. With x1 and x2 eliminated, t = x3 is the root in [0, 0.75] of
//   phi(t) = t - u3 + (P / (1 + t))^2 - (M / (1 - t))^2,  P = (u1 + u2) / 2, M = (u1 - u2) / 2
// phi is convex to the left of its inflection and concave to the right. The iteration starts at the smaller of the
// inflection and u3, takes one Newton step, then Euler steps, and converges monotonically.
template <typename T>
PROXSPARSE_INLINE ThreeSparse<T> three_sparse_24(Block<T> u) {
  const T one = T(1), zero = T(0), P = T(0.5) * (u.w1 + u.w2), M = T(0.5) * (u.w1 - u.w2);
  const T inflection = u.w2 * reciprocal(u.w1 + T(2) * square_root(P * M) + T(1e-30));
  const T start = smaller(smaller(inflection, u.w3), T(0.75));
  T t = start;
  PROXSPARSE_UNROLL
  for (int step = 0; step < kEulerSteps<T>; ++step) {
    const T inverse = reciprocal(one - t * t), r1 = inverse - t * inverse, r2 = inverse + t * inverse;
    const T a = P * r1, b = M * r2, f = t - u.w3 + a * a - b * b;
    const T slope1 = a * a * r1, slope2 = b * b * r2, slope = one - T(2) * (slope1 + slope2);
    if (step == 0) {
      t = t - f * reciprocal(larger(slope, T(1e-6)));
    } else {
      t = t - euler_step(f, slope, T(6) * (slope1 * r1 - slope2 * r2), T(1e-6));
    }
  }
  t = smaller(larger(t, zero), start);  // in case phi has no root: x2 > 0 up to the start, so the gain is valid
  const T inverse = reciprocal(one - t * t), half_sum = P * (inverse - t * inverse),
          half_gap = M * (inverse + t * inverse);
  Block<T> x{half_sum + half_gap, larger(half_sum - half_gap, zero), zero, zero};
  const T gain = T(0.5) * t - u.w3 + P * half_sum - M * half_gap;
  // One sweep restores the relative accuracy of small weights.
  x.w3 = larger(u.w3 - x.w1 * x.w2, zero);
  x.w2 = larger(u.w2 - x.w1 * x.w3, zero);
  x.w1 = larger(u.w1 - x.w2 * x.w3, zero);
  return {x, gain};
}

template <typename T>
struct DenseCandidate {
  Block<T> x;
  T x4;  // before clamping: clearly negative where the dense problem has no solution
};

// x_i of the dense candidate; the first form keeps its accuracy where R_i and e = 1 - s nearly cancel.
template <typename T>
PROXSPARSE_INLINE T dense_member(T u, T q, T root, T e) {
  const T stable = T(2) * (u - q) * reciprocal(root + e), plain = T(0.5) * (root - e);
  return select((e > T(0)) & (root > T(0)), stable, plain);
}

// The candidate with all four weights. With s = x1 + x2 + x3 + x4, every x_i = (s - 1 + R_i) / 2, and s is the root of
//   2 s - 4 + R1 + R2 + R3 + R4 = 0,  R_i = sqrt(s^2 + 1 + 4 u_i - 2 (u1 + u2 + u3 + u4))
// The unknown v is s if k4 >= 0, and the signed root R4 if k4 < 0; the left-hand side is convex in v in both cases.
template <typename T>
PROXSPARSE_INLINE DenseCandidate<T> dense_24(Block<T> u) {
  const T zero = T(0), one = T(1), two = T(2), tiny = T(1e-30);
  const T total = u.w1 + u.w2 + u.w3 + u.w4, k4 = one - two * (u.w1 + u.w2 + u.w3 - u.w4);
  const auto signed_root = k4 < zero;
  const T alpha = select(signed_root, one, two), beta = T(3) - alpha, kappa = select(signed_root, zero - k4, k4);
  const T shift = larger(k4, zero);
  const T k1 = T(4) * (u.w1 - u.w4) + shift, k2 = T(4) * (u.w2 - u.w4) + shift, k3 = T(4) * (u.w3 - u.w4) + shift;
  const T equal =
      two * total * reciprocal(one + square_root(one + T(3) * total));  // s if all were equal: a lower bound
  T v = select(signed_root, square_root(larger(equal * equal + k4, zero)), equal);
  PROXSPARSE_UNROLL
  for (int step = 0; step < kEulerSteps<T>; ++step) {
    const T p1 = v * v + k1, p2 = v * v + k2, p3 = v * v + k3, p4 = v * v + kappa;
    const T i1 = inverse_square_root(p1 + tiny), i2 = inverse_square_root(p2 + tiny);
    const T i3 = inverse_square_root(p3 + tiny), i4 = inverse_square_root(p4 + tiny);
    const T f = alpha * v - T(4) + beta * p4 * i4 + p1 * i1 + p2 * i2 + p3 * i3;
    const T slope = alpha + v * (beta * i4 + i1 + i2 + i3);
    const T curvature = beta * kappa * i4 * i4 * i4 + k1 * i1 * i1 * i1 + k2 * i2 * i2 * i2 + k3 * i3 * i3 * i3;
    v = v - euler_step(f, slope, curvature, T(1e-3));
  }
  const T other = square_root(v * v + kappa), s = select(signed_root, other, v), root4 = select(signed_root, v, other);
  const T q = (total - s) * T(0.5), e = one - s;
  const T x1 = dense_member(u.w1, q, square_root(v * v + k1), e),
          x2 = dense_member(u.w2, q, square_root(v * v + k2), e);
  const T x3 = dense_member(u.w3, q, square_root(v * v + k3), e), x4 = dense_member(u.w4, q, root4, e);
  const Block<T> x{smaller(larger(x1, zero), u.w1), smaller(larger(x2, zero), u.w2), smaller(larger(x3, zero), u.w3),
                   smaller(larger(x4, zero), u.w4)};
  return {sweep_24(u, x), x4};
}

// ------------------------------------------------------------------------- 2:4, the choice

template <typename T>
PROXSPARSE_INLINE Block<T> choose(typename Sorted<T>::Condition condition, Block<T> if_true, Block<T> if_false) {
  return {select(condition, if_true.w1, if_false.w1), select(condition, if_true.w2, if_false.w2),
          select(condition, if_true.w3, if_false.w3), select(condition, if_true.w4, if_false.w4)};
}

// The better of the 2-sparse and the 3-sparse candidate, for blocks where two_sparse_24 is false.
template <typename T>
PROXSPARSE_INLINE Block<T> best_without_fourth_24(Block<T> u) {
  const ThreeSparse<T> three = three_sparse_24(u);
  return choose((u.w3 > u.w1 * u.w2) | (three.gain <= T(0)), three.x, Block<T>{u.w1, u.w2, T(0), T(0)});
}

// Let x be the best point with x4 = 0. A dense optimum away from x needs u4 > 0.9277 e_2(x). By experiment: the search
// for the least ratio among 10^7 such blocks ends at u1 = u2 = u3 = u4 = 0.875.
constexpr double kDenseFrom = 0.92;

// Where true, the dense candidate may be better than x, the best one with x4 = 0. For u1 + u2 <= 1 this is so exactly
// if x4 = 0 is not stationary, u4 > e_2(x1, x2, x3); otherwise the dense candidate may also lie away from x.
template <typename T>
PROXSPARSE_INLINE auto dense_may_win_24(Block<T> u, Block<T> x) {
  const T pairs = x.w1 * x.w2 + (x.w1 + x.w2) * x.w3;
  return (u.w3 > u.w1 * u.w2) & (u.w1 < T(1)) &
         ((u.w4 > pairs) | ((u.w1 + u.w2 > T(1)) & (u.w4 > T(kDenseFrom) * pairs)));
}

// Near a continuous transition, rounding hides which candidate is better. There the denser valid one is more accurate.
template <typename T>
constexpr double kTie = 1 + 4 * (kIsDouble<T> ? 2.220446049250313e-16 : 1.1920929e-07);

// The better of x and the dense candidate, for blocks where dense_may_win_24 is true.
template <typename T>
PROXSPARSE_INLINE Block<T> best_with_fourth_24(Block<T> u, Block<T> x) {
  const DenseCandidate<T> dense = dense_24(u);
  const auto valid = (dense.x4 > (kIsDouble<T> ? T(-1e-15) : T(-5e-7))) & (dense.x.w4 > T(0));
  return choose(valid & (objective_24(u, dense.x) <= objective_24(u, x) * T(kTie<T>)), dense.x, x);
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
