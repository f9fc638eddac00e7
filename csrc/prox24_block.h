// The proximal operator of ONE block of four weights, for any caller: each function takes scalars and is free of
// branches, so that a compiler turns a loop over blocks into vector code, and a GPU thread never diverges.
//
//   argmin_{w >= 0}  1/2 |w - z|^2 + lambda * Reg(w),   z1 >= z2 >= z3 >= z4 >= 0 the sorted magnitudes of a block
//   2:4  Reg = e_3(w) = w1 w2 w3 + w1 w2 w4 + w1 w3 w4 + w2 w3 w4
//   1:4  Reg = e_2(w), the sum of all w_i w_j, i < j
//
// Same algorithm as solve_24 and solve_1m in proxsparse/reference.py, where the derivation is explained.
#pragma once

#include <cmath>

#include "inline.h"

#ifdef __CUDACC__
#define PROXSPARSE_UNROLL _Pragma("unroll")
#else
#define PROXSPARSE_UNROLL _Pragma("GCC unroll 8")
#endif

namespace proxsparse {

// Four magnitudes; in descending order unless a function says otherwise.
template <typename T>
struct Block {
  T w1, w2, w3, w4;
};

// For each position of a block, how many of its magnitudes stand before it in descending order; ties keep their order.
// The ranks are of type T: mixed widths would cost the vector code conversions.
template <typename T>
struct Ranks {
  T r1, r2, r3, r4;
};

// From lambda * z1 = (1 + sqrt 2) / 2 on, the 2-sparse candidate wins.
template <typename T>
constexpr T kTwoSparseFrom = T(1.2071067811865475);

// By value: a conditional between two lvalues would be a conditional address, which no compiler turns into vector code.
template <typename T>
PROXSPARSE_INLINE T select(bool condition, T if_true, T if_false) {
  return condition ? if_true : if_false;
}

template <typename T>
PROXSPARSE_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}

template <typename T>
PROXSPARSE_INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
PROXSPARSE_INLINE Ranks<T> rank_descending(Block<T> m) {
  const T after12 = select(m.w1 < m.w2, T(1), T(0)), after13 = select(m.w1 < m.w3, T(1), T(0));
  const T after14 = select(m.w1 < m.w4, T(1), T(0)), after23 = select(m.w2 < m.w3, T(1), T(0));
  const T after24 = select(m.w2 < m.w4, T(1), T(0)), after34 = select(m.w3 < m.w4, T(1), T(0));
  return {after12 + after13 + after14, T(1) - after12 + after23 + after24, T(2) - after13 - after23 + after34,
          T(3) - after14 - after24 - after34};
}

template <typename T>
PROXSPARSE_INLINE Block<T> sort_descending(Block<T> m) {
  const T high12 = larger(m.w1, m.w2), low12 = smaller(m.w1, m.w2);
  const T high34 = larger(m.w3, m.w4), low34 = smaller(m.w3, m.w4);
  const T middle_a = smaller(high12, high34), middle_b = larger(low12, low34);
  return {larger(high12, high34), larger(middle_a, middle_b), smaller(middle_a, middle_b), smaller(low12, low34)};
}

// The member of a sorted block that stands at `rank`.
template <typename T>
PROXSPARSE_INLINE T at_rank(Block<T> sorted, T rank) {
  const T upper = select(rank < T(0.5), sorted.w1, sorted.w2);
  const T lower = select(rank < T(2.5), sorted.w3, sorted.w4);
  return select(rank < T(1.5), upper, lower);
}

// max(z - lambda * e_2(a, b, latest), 0): the best value of one weight while the three others stay. lambda * a * b is
// formed so that it cannot overflow, and all but the last two operations can start before `latest` is known.
template <typename T>
PROXSPARSE_INLINE T best_coordinate(T z, T lambda, T a, T b, T latest) {
  const T la = lambda * a, lb = lambda * b;
  return larger((z - la * b) - (la + lb) * latest, T(0));
}

// One sweep of coordinate descent from the last weight to the first; no order of the magnitudes needed.
template <typename T>
PROXSPARSE_INLINE Block<T> sweep_24(Block<T> z, T lambda, Block<T> w) {
  w.w4 = best_coordinate(z.w4, lambda, w.w2, w.w3, w.w1);
  w.w3 = best_coordinate(z.w3, lambda, w.w1, w.w2, w.w4);
  w.w2 = best_coordinate(z.w2, lambda, w.w1, w.w4, w.w3);
  w.w1 = best_coordinate(z.w1, lambda, w.w3, w.w4, w.w2);
  return w;
}

// lambda^2 times the objective: all terms lie within [0, 10] where it is used, whatever the units of the weights.
template <typename T>
PROXSPARSE_INLINE T scaled_objective(Block<T> z, T lambda, Block<T> w) {
  const T d1 = lambda * (w.w1 - z.w1), d2 = lambda * (w.w2 - z.w2);
  const T d3 = lambda * (w.w3 - z.w3), d4 = lambda * (w.w4 - z.w4);
  const T x1 = lambda * w.w1, x2 = lambda * w.w2, x3 = lambda * w.w3, x4 = lambda * w.w4;
  return (d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4) / 2 + x1 * x2 * x3 + x4 * (x1 * x2 + (x1 + x2) * x3);
}

// 2f / (f' + sqrt(f'^2 - 2 f f'')): the step to the nearer root of the quadratic Taylor model.
template <typename T>
PROXSPARSE_INLINE T euler_step(T f, T slope, T curvature, T floor) {
  const T root = std::sqrt(larger(slope * slope - 2 * f * curvature, T(0)));
  return 2 * f / larger(larger(slope, T(0)) + root, floor);
}

// Steps until the objective is within 1e-6 (fp32) and 1e-15 (fp64) of z1^2 of the optimum on two million random blocks.
template <typename T>
constexpr int kEulerSteps = sizeof(T) == 8 ? 5 : 3;

// The candidate with w4 = 0. With u = lambda * z and w1, w2 eliminated, t = lambda * w3 is the root in [0, 0.75] of
//   phi(t) = t - u3 + (u1 + u2)^2 / (4 (1 + t)^2) - (u1 - u2)^2 / (4 (1 - t)^2)
template <typename T>
PROXSPARSE_INLINE Block<T> three_sparse_24(Block<T> z, T lambda, T inverse_lambda) {
  const T u1 = lambda * z.w1, u2 = lambda * z.w2, u3 = lambda * z.w3;
  const T total = u1 + u2, difference = u1 - u2;
  const T inflection = u2 / (u1 + std::sqrt(total * difference) + T(1e-30));  // phi'' = 0; monotone from here
  T t = smaller(smaller(inflection, u3), T(0.75));
  PROXSPARSE_UNROLL
  for (int step = 0; step < kEulerSteps<T>; ++step) {
    const T r1 = 1 / (1 + t), r2 = 1 / (1 - t);
    const T a = total * total * r1 * r1 / 4, b = difference * difference * r2 * r2 / 4;
    const T phi = t - u3 + a - b, slope = 1 - 2 * (a * r1 + b * r2), curvature = 6 * (a * r1 * r1 - b * r2 * r2);
    t = smaller(larger(t - euler_step(phi, slope, curvature, T(1e-6)), T(0)), T(0.75));
  }
  const T half_sum = total / (1 + t) / 2, half_difference = difference / (1 - t) / 2;
  Block<T> w{(half_sum + half_difference) * inverse_lambda, larger(half_sum - half_difference, T(0)) * inverse_lambda,
             T(0), T(0)};
  // One sweep in the original units restores the relative accuracy of tiny weights.
  w.w3 = larger(z.w3 - lambda * w.w1 * w.w2, T(0));
  w.w2 = larger(z.w2 - lambda * w.w1 * w.w3, T(0));
  w.w1 = larger(z.w1 - lambda * w.w2 * w.w3, T(0));
  return w;
}

template <typename T>
struct DenseCandidate {
  Block<T> w;
  T x4;  // lambda * w4 before it was clamped: clearly negative where the dense problem has no solution
};

// x_i of the dense candidate; the first form loses nothing where R_i and e = 1 - s nearly cancel.
template <typename T>
PROXSPARSE_INLINE T dense_member(T u, T q, T root, T e) {
  const T stable = 2 * (u - q) / (root + e), plain = (root - e) / 2;
  return select(e > 0, select(root > 0, stable, plain), plain);
}

// The candidate with all four weights. With s = x1 + x2 + x3 + x4, every x_i = (s - 1 + R_i) / 2, and s is the root of
//   2 s - 4 + R1 + R2 + R3 + R4 = 0,  R_i = sqrt(s^2 + 1 + 4 u_i - 2 (u1 + u2 + u3 + u4))
// The unknown v is s itself where k4 >= 0 and the signed root R4 where k4 < 0: convex in v either way.
template <typename T>
PROXSPARSE_INLINE DenseCandidate<T> dense_24(Block<T> z, T lambda, T inverse_lambda) {
  const T u1 = lambda * z.w1, u2 = lambda * z.w2, u3 = lambda * z.w3, u4 = lambda * z.w4;
  const T total = u1 + u2 + u3 + u4, k4 = 1 - 2 * (u1 + u2 + u3 - u4);
  const bool signed_root = k4 < 0;
  const T alpha = select(signed_root, T(1), T(2)), beta = 3 - alpha, kappa = select(signed_root, -k4, k4);
  const T shift = larger(k4, T(0));
  const T k1 = 4 * (u1 - u4) + shift, k2 = 4 * (u2 - u4) + shift, k3 = 4 * (u3 - u4) + shift;
  const T equal = 2 * total / (1 + std::sqrt(1 + 3 * total));  // s if all four were equal: a lower bound
  const T start = std::sqrt(larger(equal * equal + k4, T(0)));
  T v = select(signed_root, start, equal);
  PROXSPARSE_UNROLL
  for (int step = 0; step < kEulerSteps<T>; ++step) {
    const T p1 = v * v + k1, p2 = v * v + k2, p3 = v * v + k3, p4 = v * v + kappa;
    const T i1 = 1 / std::sqrt(p1 + T(1e-30)), i2 = 1 / std::sqrt(p2 + T(1e-30));
    const T i3 = 1 / std::sqrt(p3 + T(1e-30)), i4 = 1 / std::sqrt(p4 + T(1e-30));
    const T f = alpha * v - 4 + beta * p4 * i4 + p1 * i1 + p2 * i2 + p3 * i3;
    const T slope = alpha + v * (beta * i4 + i1 + i2 + i3);
    const T curvature = beta * kappa * i4 * i4 * i4 + k1 * i1 * i1 * i1 + k2 * i2 * i2 * i2 + k3 * i3 * i3 * i3;
    v -= euler_step(f, slope, curvature, T(1e-3));
  }
  const T other = std::sqrt(v * v + kappa), s = select(signed_root, other, v), root4 = select(signed_root, v, other);
  const T q = (total - s) / 2, e = 1 - s;
  const T x1 = dense_member(u1, q, std::sqrt(v * v + k1), e), x2 = dense_member(u2, q, std::sqrt(v * v + k2), e);
  const T x3 = dense_member(u3, q, std::sqrt(v * v + k3), e), x4 = dense_member(u4, q, root4, e);
  const Block<T> w{smaller(larger(x1, T(0)) * inverse_lambda, z.w1), smaller(larger(x2, T(0)) * inverse_lambda, z.w2),
                   smaller(larger(x3, T(0)) * inverse_lambda, z.w3), smaller(larger(x4, T(0)) * inverse_lambda, z.w4)};
  return {sweep_24(z, lambda, w), x4};
}

// Exact prox of a sorted 2:4 block: the best of the 2-sparse, the 3-sparse and the dense candidate. lambda > 0.
template <typename T>
PROXSPARSE_INLINE Block<T> solve_24(Block<T> z, T lambda, T inverse_lambda) {
  const Block<T> sparse3 = three_sparse_24(z, lambda, inverse_lambda);
  const DenseCandidate<T> dense = dense_24(z, lambda, inverse_lambda);

  // lambda^2 times the objectives; `never` and -1 keep a candidate from winning and from losing.
  constexpr T never = T(1e30), below_zero = sizeof(T) == 8 ? T(-1e-15) : T(-5e-7);
  const T u3 = lambda * z.w3, u4 = lambda * z.w4;
  const T objective2 = select(lambda * z.w1 < kTwoSparseFrom<T>, (u3 * u3 + u4 * u4) / 2, T(-1));
  const T objective3 = select(sparse3.w3 > 0, scaled_objective(z, lambda, sparse3), never);
  const T objective4 =
      select(dense.x4 > below_zero, select(dense.w.w4 > 0, scaled_objective(z, lambda, dense.w), never), never);

  // Rounding hides which candidate wins near a continuous transition: the denser valid one is the accurate one there.
  constexpr T tie = 1 + 4 * (sizeof(T) == 8 ? T(2.220446049250313e-16) : T(1.1920929e-07));
  const bool take3 = objective3 <= objective2 * tie;
  const T best = select(take3, smaller(objective2, objective3), objective2);
  const bool take4 = objective4 <= best * tie;
  return {select(take4, dense.w.w1, select(take3, sparse3.w1, z.w1)),
          select(take4, dense.w.w2, select(take3, sparse3.w2, z.w2)),
          select(take4, dense.w.w3, select(take3, sparse3.w3, T(0))), select(take4, dense.w.w4, T(0))};
}

// Exact prox of a sorted 1:4 block for lambda < 1, where it is convex (from 1 on it is [z1, 0, 0, 0]). With
//   w_k = ((z1 + ... + z_k) / (1 + (k - 1) lambda) - gain * sum_{j<k} (z_j - z_k)) / k,  gain = 1 / (1 - lambda)
// the last k with w_k > 0 wins, and w_i = w_k + gain * (z_i - z_k) for i <= k. `gain` has to come from a lambda in
// double, which may be 1 in T; as only differences are multiplied by it, ties stay exact however close to 1 it is.
template <typename T>
PROXSPARSE_INLINE Block<T> solve_14(Block<T> z, T lambda, T gain) {
  const T sum2 = z.w1 + z.w2, sum3 = sum2 + z.w3, sum4 = sum3 + z.w4;
  const T d12 = gain * (z.w1 - z.w2), d13 = gain * (z.w1 - z.w3), d23 = gain * (z.w2 - z.w3);
  const T d14 = gain * (z.w1 - z.w4), d24 = gain * (z.w2 - z.w4), d34 = gain * (z.w3 - z.w4);
  const T last2 = (sum2 / (1 + lambda) - d12) / 2, last3 = (sum3 / (1 + 2 * lambda) - (d13 + d23)) / 3;
  const T last4 = (sum4 / (1 + 3 * lambda) - (d14 + d24 + d34)) / 4;
  const bool take2 = last2 > 0, take3 = last3 > 0, take4 = last4 > 0;
  return {smaller(select(take4, last4 + d14, select(take3, last3 + d13, select(take2, last2 + d12, z.w1))), z.w1),
          smaller(select(take4, last4 + d24, select(take3, last3 + d23, select(take2, last2, T(0)))), z.w2),
          smaller(select(take4, last4 + d34, select(take3, last3, T(0))), z.w3),
          smaller(select(take4, last4, T(0)), z.w4)};
}

}  // namespace proxsparse
