// The prox of the blocks that the 32 lanes of a warp hold together. A warp whose blocks all lie in the convex range
// descends. Any other warp puts its blocks into shared memory, decides by formula what a formula decides, and queues
// the rest, so that all lanes iterate at the same time, first over the 3-sparse candidates, then over the dense ones.
#pragma once

#include <algorithm>
#include <limits>

#include "descent.h"
#include "warp.h"

namespace proxsparse::gpu {

// What all blocks of a call have in common.
template <typename T>
struct Regulariser {
  T lambda, inverse_lambda;
  T gain;  // 1 / (1 - lambda), for 1:4; 0 from lambda = 1 on, where the largest weight of a block stays alone
  int n;   // weights kept of every 4: 1 or 2
};

// Clamped so that neither lambda nor its inverse is infinite in T; the gain in double, because in T lambda may be 1.
template <typename T>
Regulariser<T> regulariser(double reg_lambda, int n) {
  const T lambda = static_cast<T>(
      std::clamp(reg_lambda, double{std::numeric_limits<T>::min()}, double{std::numeric_limits<T>::max()}));
  return {lambda, 1 / lambda, static_cast<T>(reg_lambda < 1 ? 1 / (1 - reg_lambda) : 0), n};
}

// The memory that a warp shares.
template <typename T, int kSlots>
struct Tile {
  struct alignas(16) Slot {
    T magnitude[4];
  };
  Slot slot[kSlots];       // a block each
  Block<T> rival[kSlots];  // the best of a queued block without its fourth weight
  uint16_t queue[kSlots];  // numbers of slots
};

template <typename T>
__device__ inline Block<T> block_of(const T (&magnitude)[4]) {
  return {magnitude[0], magnitude[1], magnitude[2], magnitude[3]};
}

template <typename T>
__device__ inline Block<T> multiplied(Block<T> z, T factor) {
  return {factor * z.w1, factor * z.w2, factor * z.w3, factor * z.w4};
}

template <typename T>
__device__ inline bool is_finite(const T (&magnitude)[4]) {
  return magnitude[0] * 0 + magnitude[1] * 0 + magnitude[2] * 0 + magnitude[3] * 0 == 0;
}

// What is smaller than `least` becomes zero.
template <typename T>
__device__ inline void keep_from(T (&magnitude)[4], T least) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < 4; ++i) magnitude[i] = magnitude[i] < least ? T(0) : magnitude[i];
}

// w in the order of the sorted block becomes the magnitudes, where it is smaller than they are.
template <typename T>
__device__ inline void put_back(T (&magnitude)[4], const Sorted<T>& sorted, Block<T> w) {
  const Block<T> z = sorted.block;
  const Block<T> result =
      unsort(sorted, {smaller(w.w1, z.w1), smaller(w.w2, z.w2), smaller(w.w3, z.w3), smaller(w.w4, z.w4)});
  magnitude[0] = result.w1, magnitude[1] = result.w2, magnitude[2] = result.w3, magnitude[3] = result.w4;
}

// The same for x = lambda * w; where x = u, z keeps its bits.
template <typename T>
__device__ inline void put_back(T (&magnitude)[4], const Sorted<T>& sorted, Block<T> u, Block<T> x, T inverse_lambda) {
  const Block<T> z = sorted.block;
  put_back(magnitude, sorted,
           {x.w1 < u.w1 ? x.w1 * inverse_lambda : z.w1, x.w2 < u.w2 ? x.w2 * inverse_lambda : z.w2,
            x.w3 < u.w3 ? x.w3 * inverse_lambda : z.w3, x.w4 < u.w4 ? x.w4 * inverse_lambda : z.w4});
}

template <typename T, int kSlots>
__device__ inline void solve_tile_14(Tile<T, kSlots>& tile, Regulariser<T> reg) {
#pragma unroll 1
  for (int slot = lane(); slot < kSlots; slot += kLanes) {
    T(&magnitude)[4] = tile.slot[slot].magnitude;
    if (is_finite(magnitude)) {
      const Sorted<T> sorted = sort_descending(block_of(magnitude));
      const Block<T> alone{sorted.block.w1, T(0), T(0), T(0)};
      put_back(magnitude, sorted, reg.gain > 0 ? solve_14(sorted.block, reg.lambda, reg.gain) : alone);
    }
  }
}

template <typename T, int kSlots>
__device__ inline void solve_tile_24(Tile<T, kSlots>& tile, Regulariser<T> reg) {
  int queued = 0, dense = 0;
#pragma unroll 1
  for (int slot = lane(); slot < kSlots; slot += kLanes) {
    T(&magnitude)[4] = tile.slot[slot].magnitude;
    const Block<T> z = sort_descending(block_of(magnitude)).block, u = multiplied(z, reg.lambda);
    // Where the second and the third tie, their places matter: the solver knows them.
    const bool decided = two_sparse_24(u) && (z.w2 > z.w3 || z.w3 == 0), finite = is_finite(magnitude);
    if (decided && finite) keep_from(magnitude, z.w2);
    const Count lanes = count_lanes(finite && !decided);
    if (finite && !decided) tile.queue[queued + lanes.before] = static_cast<uint16_t>(slot);
    queued += lanes.all;
  }
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < queued; first += kLanes) {
    uint16_t slot = 0;
    Block<T> x{};
    bool undecided = false;
    if (first + lane() < queued) {
      slot = tile.queue[first + lane()];
      T(&magnitude)[4] = tile.slot[slot].magnitude;
      const Sorted<T> sorted = sort_descending(block_of(magnitude));
      const Block<T> u = multiplied(sorted.block, reg.lambda);
      x = best_without_fourth_24(u);
      undecided = dense_may_win_24(u, x);
      if (!undecided) put_back(magnitude, sorted, u, x, reg.inverse_lambda);
    }
    const Count lanes = count_lanes(undecided);
    __syncwarp();  // the queue of the dense candidates grows where the first one has been read
    if (undecided) {
      tile.queue[dense + lanes.before] = slot;
      tile.rival[dense + lanes.before] = x;
    }
    dense += lanes.all;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane(); i < dense; i += kLanes) {
    T(&magnitude)[4] = tile.slot[tile.queue[i]].magnitude;
    const Sorted<T> sorted = sort_descending(block_of(magnitude));
    const Block<T> u = multiplied(sorted.block, reg.lambda);
    put_back(magnitude, sorted, u, best_with_fourth_24(u, tile.rival[i]), reg.inverse_lambda);
  }
  __syncwarp();
}

// `magnitudes(b)` is block b of the lane, `shrink(b, w)` takes its prox; blocks with a NaN or an infinity are left out.
// kTogether blocks descend at once. All lanes call it; lanes without work have blocks of zeros.
template <typename Format, int kBlocks, int kTogether, typename T, typename Magnitudes, typename Shrink>
__device__ inline void solve_blocks(Tile<T, kBlocks * kLanes>& tile, Regulariser<T> reg, Magnitudes magnitudes,
                                    Shrink shrink) {
  uint32_t largest = 0;
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const Block<T> z = magnitudes(b);
    largest = larger(larger(largest, larger(order(z.w1), order(z.w2))), larger(order(z.w3), order(z.w4)));
  }
  const float largest_u = static_cast<float>(reg.lambda) * warp_maximum(largest);
  if (reg.n == 2 && largest_u <= static_cast<float>(kConvexUpTo)) {
    const int sweeps = sweeps_needed<Format>(largest_u);
    PROXSPARSE_UNROLL
    for (int start = 0; start < kBlocks; start += kTogether) {
      Block<T> z[kTogether], w[kTogether];
      PROXSPARSE_UNROLL
      for (int b = 0; b < kTogether; ++b) z[b] = magnitudes(start + b);
      descend(z, reg.lambda, reg.inverse_lambda, sweeps, w);
      PROXSPARSE_UNROLL
      for (int b = 0; b < kTogether; ++b) shrink(start + b, w[b]);
    }
    return;
  }
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const Block<T> z = magnitudes(b);
    tile.slot[b * kLanes + lane()] = {{z.w1, z.w2, z.w3, z.w4}};
  }
  if (reg.n == 1) {
    solve_tile_14(tile, reg);
  } else {
    solve_tile_24(tile, reg);
  }
  PROXSPARSE_UNROLL
  for (int b = 0; b < kBlocks; ++b) {
    const T(&w)[4] = tile.slot[b * kLanes + lane()].magnitude;
    if (is_finite(w)) shrink(b, Block<T>{w[0], w[1], w[2], w[3]});
  }
  __syncwarp();  // the caller may use the memory of the tile
}

}  // namespace proxsparse::gpu
