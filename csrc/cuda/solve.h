// The prox of the blocks that the 32 lanes of a warp hold together. If all of them are in the convex range, the warp
// uses coordinate descent. Otherwise it puts the blocks into shared memory, solves those that a formula decides, and
// queues the others, so that all lanes iterate at the same time: first the 3-sparse candidates, then the dense ones.
#pragma once

#include "number.h"
#include "warp.h"

namespace proxsparse::gpu {

// ------------------------------------------------------------------------- coordinate descent

template <typename T>
__device__ inline Block<T> multiplied(Block<T> z, T factor) {
  return {factor * z.w1, factor * z.w2, factor * z.w3, factor * z.w4};
}

// The prox of kBlocks blocks of magnitudes with lambda * z <= kConvexUpTo, in any order, by at least two sweeps. The
// last sweep is in the unit of the weights, w = z - e_2(x) / lambda: a weight that does not change keeps its bits, even
// if u is tiny.
template <typename T, int kBlocks>
__device__ inline void descend(const Block<T> (&z)[kBlocks], const ProxParams<T>& params, int sweeps,
                               Block<T> (&w)[kBlocks]) {
  Block<T> u[kBlocks], x[kBlocks];
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    u[b] = multiplied(z[b], params.lambda);
    x[b] = sweep_24(u[b], u[b]);
  }
#pragma unroll 1
  for (int sweep = 2; sweep < sweeps; ++sweep) {
    PROXSPARSE_UNROLL
    for (int b = 0; b < kBlocks; ++b) x[b] = sweep_24(u[b], x[b]);
  }
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const auto result = [&](T z_i, T e2) { return larger(std::fma(-params.inverse_lambda, e2, z_i), T(0)); };
    const T sum12 = x[b].w1 + x[b].w2, product12 = x[b].w1 * x[b].w2;
    const T e2_of_4 = std::fma(sum12, x[b].w3, product12), x4 = at_least_zero(u[b].w4 - e2_of_4);
    const T e2_of_3 = std::fma(sum12, x4, product12), x3 = at_least_zero(u[b].w3 - e2_of_3);
    const T sum34 = x3 + x4, product34 = x3 * x4;
    const T e2_of_2 = std::fma(sum34, x[b].w1, product34), x2 = at_least_zero(u[b].w2 - e2_of_2);
    const T e2_of_1 = std::fma(sum34, x2, product34);
    w[b] = {result(z[b].w1, e2_of_1), result(z[b].w2, e2_of_2), result(z[b].w3, e2_of_3), result(z[b].w4, e2_of_4)};
  }
}

// ------------------------------------------------------------------------- blocks in shared memory

// The shared memory of a warp.
template <typename T, int kSlots>
struct WarpBlocks {
  struct alignas(16) Slot {
    T magnitude[4];
  };
  Slot slot[kSlots];                // one block each
  Block<T> without_fourth[kSlots];  // of a queued block: the best candidate with x4 = 0
  uint16_t queue[kSlots];           // indices of slots
};

template <typename T>
__device__ inline Block<T> block_of(const T (&magnitude)[4]) {
  return {magnitude[0], magnitude[1], magnitude[2], magnitude[3]};
}

template <typename T>
__device__ inline bool is_finite(const T (&magnitude)[4]) {
  return magnitude[0] * 0 + magnitude[1] * 0 + magnitude[2] * 0 + magnitude[3] * 0 == 0;
}

// Magnitudes below `least` become zero.
template <typename T>
__device__ inline void zero_below(T (&magnitude)[4], T least) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < 4; ++i) magnitude[i] = magnitude[i] < least ? T(0) : magnitude[i];
}

// magnitude <- min(x / lambda, magnitude), where x is in the order of the sorted block. Where x = u, z keeps its bits.
template <typename T>
__device__ inline void store_result(T (&magnitude)[4], const Sorted<T>& sorted, Block<T> u, Block<T> x,
                                    T inverse_lambda) {
  const Block<T> z = sorted.block;
  const auto shrunk = [=](T z_i, T u_i, T x_i) { return x_i < u_i ? smaller(x_i * inverse_lambda, z_i) : z_i; };
  const Block<T> result = unsort(
      sorted, {shrunk(z.w1, u.w1, x.w1), shrunk(z.w2, u.w2, x.w2), shrunk(z.w3, u.w3, x.w3), shrunk(z.w4, u.w4, x.w4)});
  magnitude[0] = result.w1, magnitude[1] = result.w2, magnitude[2] = result.w3, magnitude[3] = result.w4;
}

template <typename T, int kSlots>
__device__ inline void solve_24_blocks(WarpBlocks<T, kSlots>& blocks, const ProxParams<T>& params) {
  int queued = 0, dense = 0;
#pragma unroll 1
  for (int slot = lane(); slot < kSlots; slot += kLanes) {
    T(&magnitude)[4] = blocks.slot[slot].magnitude;
    const Block<T> z = sort_descending(block_of(magnitude)).block, u = multiplied(z, params.lambda);
    // If the second and the third weight are equal, their order matters: the solver preserves it.
    const bool decided = two_sparse_24(u) && (z.w2 > z.w3 || z.w3 == 0), finite = is_finite(magnitude);
    if (decided && finite) zero_below(magnitude, z.w2);
    const LaneCount lanes = count_lanes(finite && !decided);
    if (finite && !decided) blocks.queue[queued + lanes.before] = static_cast<uint16_t>(slot);
    queued += lanes.all;
  }
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < queued; first += kLanes) {
    uint16_t slot = 0;
    Block<T> x{};
    bool undecided = false;
    if (first + lane() < queued) {
      slot = blocks.queue[first + lane()];
      T(&magnitude)[4] = blocks.slot[slot].magnitude;
      const Sorted<T> sorted = sort_descending(block_of(magnitude));
      const Block<T> u = multiplied(sorted.block, params.lambda);
      x = best_without_fourth_24(u);
      undecided = dense_may_win_24(u, x);
      if (!undecided) store_result(magnitude, sorted, u, x, params.inverse_lambda);
    }
    const LaneCount lanes = count_lanes(undecided);
    __syncwarp();  // the queue of the dense candidates overwrites the part of the first queue that has been read
    if (undecided) {
      blocks.queue[dense + lanes.before] = slot;
      blocks.without_fourth[dense + lanes.before] = x;
    }
    dense += lanes.all;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane(); i < dense; i += kLanes) {
    T(&magnitude)[4] = blocks.slot[blocks.queue[i]].magnitude;
    const Sorted<T> sorted = sort_descending(block_of(magnitude));
    const Block<T> u = multiplied(sorted.block, params.lambda);
    store_result(magnitude, sorted, u, best_with_fourth_24(u, blocks.without_fourth[i]), params.inverse_lambda);
  }
  __syncwarp();
}

// ------------------------------------------------------------------------- any blocks

// magnitudes(b) returns block b of the lane, shrink(b, w) receives its prox. shrink is not called for a block with a
// NaN or an infinity. kTogether blocks descend at the same time. All lanes must call this; lanes without work have
// zeros.
template <typename Format, int kBlocks, int kTogether, typename T, typename Magnitudes, typename Shrink>
__device__ inline void solve_blocks(WarpBlocks<T, kBlocks * kLanes>& blocks, const ProxParams<T>& params,
                                    Magnitudes magnitudes, Shrink shrink) {
  uint32_t largest = 0;
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const Block<T> z = magnitudes(b);
    largest = larger(larger(largest, larger(ordered_bits(z.w1), ordered_bits(z.w2))),
                     larger(ordered_bits(z.w3), ordered_bits(z.w4)));
  }
  const float largest_u = static_cast<float>(params.lambda) * warp_maximum(largest);
  if (largest_u <= static_cast<float>(kConvexUpTo)) {
    const int sweeps = sweeps_needed<Format::kSweepsNeeded>(largest_u);
    PROXSPARSE_UNROLL
    for (int start = 0; start < kBlocks; start += kTogether) {
      Block<T> z[kTogether], w[kTogether];
      PROXSPARSE_UNROLL
      for (int b = 0; b < kTogether; ++b) z[b] = magnitudes(start + b);
      descend(z, params, sweeps, w);
      PROXSPARSE_UNROLL
      for (int b = 0; b < kTogether; ++b) shrink(start + b, w[b]);
    }
    return;
  }
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const Block<T> z = magnitudes(b);
    blocks.slot[b * kLanes + lane()] = {{z.w1, z.w2, z.w3, z.w4}};
  }
  solve_24_blocks(blocks, params);
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const T(&w)[4] = blocks.slot[b * kLanes + lane()].magnitude;
    if (is_finite(w)) shrink(b, Block<T>{w[0], w[1], w[2], w[3]});
  }
  __syncwarp();  // the caller may reuse the shared memory
}

}  // namespace proxsparse::gpu
