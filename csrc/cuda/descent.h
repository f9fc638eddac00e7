// Coordinate descent over 2:4 blocks where it is sure to find the optimum: in the units in which lambda is 1, a weight
// costs five multiply-adds a sweep.
#pragma once

#include <utility>

#include "number.h"

namespace proxsparse::gpu {

// The column of kSweeps that the rounding of a format asks for.
template <typename Format>
constexpr int Sweeps::* kSweepsOf = &Sweeps::rounded;
template <>
constexpr int Sweeps::* kSweepsOf<Float32> = &Sweeps::single;
template <>
constexpr int Sweeps::* kSweepsOf<Float64> = &Sweeps::twice;

template <typename Format, int... row>
__device__ inline int sweeps_needed(float largest_u, std::integer_sequence<int, row...>) {
  constexpr float reach[] = {kSweeps[row].reach...};
  constexpr int sweeps[] = {kSweeps[row + 1].*kSweepsOf<Format>...};
  int needed = kSweeps[0].*kSweepsOf<Format>;
  ((needed = largest_u > reach[row] ? sweeps[row] : needed), ...);
  return needed;
}

// For blocks with u1 <= largest_u <= kConvexUpTo.
template <typename Format>
__device__ inline int sweeps_needed(float largest_u) {
  return sweeps_needed<Format>(largest_u, std::make_integer_sequence<int, kSweepRows - 1>());
}

// max(x, 0) for an x that is never above 1: saturation costs a multiply-add nothing.
__device__ inline float at_least_zero(float x) { return __saturatef(x); }
__device__ inline double at_least_zero(double x) { return larger(x, 0.0); }

// x_i <- max(u_i - e_2(the three others), 0), as sweep_24.
template <typename T>
__device__ inline Block<T> swept(Block<T> u, Block<T> x) {
  const T sum12 = x.w1 + x.w2;
  x.w4 = at_least_zero(std::fma(-sum12, x.w3, std::fma(-x.w1, x.w2, u.w4)));
  x.w3 = at_least_zero(std::fma(-sum12, x.w4, std::fma(-x.w1, x.w2, u.w3)));
  const T sum34 = x.w3 + x.w4;
  x.w2 = at_least_zero(std::fma(-sum34, x.w1, std::fma(-x.w3, x.w4, u.w2)));
  x.w1 = at_least_zero(std::fma(-sum34, x.w2, std::fma(-x.w3, x.w4, u.w1)));
  return x;
}

// The prox, by at least two sweeps, of kBlocks blocks of magnitudes with lambda * z <= kConvexUpTo, in any order. The
// last sweep is in the units of the weights, w = z - e_2(x) / lambda: what does not change keeps its bits, however
// small u is.
template <typename T, int kBlocks>
__device__ inline void descend(const Block<T> (&z)[kBlocks], T lambda, T inverse_lambda, int sweeps,
                               Block<T> (&w)[kBlocks]) {
  Block<T> u[kBlocks], x[kBlocks];
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    u[b] = {lambda * z[b].w1, lambda * z[b].w2, lambda * z[b].w3, lambda * z[b].w4};
    x[b] = swept(u[b], u[b]);
  }
#pragma unroll 1
  for (int sweep = 2; sweep < sweeps; ++sweep) {
    PROXSPARSE_UNROLL
    for (int b = 0; b < kBlocks; ++b) x[b] = swept(u[b], x[b]);
  }
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const auto best = [&](T z_i, T e2) { return larger(std::fma(-inverse_lambda, e2, z_i), T(0)); };
    const T sum12 = x[b].w1 + x[b].w2, product12 = x[b].w1 * x[b].w2;
    const T e2_of_4 = std::fma(sum12, x[b].w3, product12), x4 = at_least_zero(u[b].w4 - e2_of_4);
    const T e2_of_3 = std::fma(sum12, x4, product12), x3 = at_least_zero(u[b].w3 - e2_of_3);
    const T sum34 = x3 + x4, product34 = x3 * x4;
    const T e2_of_2 = std::fma(sum34, x[b].w1, product34), x2 = at_least_zero(u[b].w2 - e2_of_2);
    const T e2_of_1 = std::fma(sum34, x2, product34);
    w[b] = {best(z[b].w1, e2_of_1), best(z[b].w2, e2_of_2), best(z[b].w3, e2_of_3), best(z[b].w4, e2_of_4)};
  }
}

}  // namespace proxsparse::gpu
