// y = x W^T + bias with packed 2:4 weights: kTile output features by a few rows of x at a time, in registers.
#pragma once

#include "kernels.h"
#include "pick.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

#define PROXSPARSE_INLINED __attribute__((always_inline))

// f(0), ..., f(N - 1) with constants: no compiler keeps an array that a loop counts through in registers.
template <int N, typename F>
PROXSPARSE_INLINE void repeat(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      PROXSPARSE_INLINED { (f(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// Where the rest of each of the tile's rows begins, and of each row of x.
template <typename A, int kRows>
struct Position {
  const typename A::Storage* values[kTile];
  const uint8_t* indices[kTile];
  const typename A::X* x[kRows];
};

template <typename A, int kRows>
struct TileSums {
  typename A::Sums of[kTile][kRows];
};

// One step of all dot products.
template <typename A, int kRows>
PROXSPARSE_INLINE void add_step(const Position<A, kRows>& at, TileSums<A, kRows>& sums) {
  typename A::Numbers values[kTile];
  typename A::Places places[kTile];
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    values[t] = A::load_values(at.values[t]);
    places[t] = A::load_places(at.indices[t]);
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    const auto x = A::load_x(at.x[r]);
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      sums.of[t][r] = A::added(sums.of[t][r], values[t], A::picked(x, places[t]));
    });
  });
}

// The rest of in_features, `left` weights of a step, padded with zeros.
template <typename A, int kRows>
PROXSPARSE_INLINE void add_last(const Position<A, kRows>& at, size_t left, TileSums<A, kRows>& sums) {
  typename A::Storage values[kTile][A::kValues] = {};
  uint8_t indices[kTile][A::kValues / 4] = {};
  typename A::X x[kRows][2 * A::kValues] = {};
  Position<A, kRows> padded;
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    std::memcpy(values[t], at.values[t], left / 2 * sizeof(values[t][0]));
    std::memcpy(indices[t], at.indices[t], (left + 7) / 8);
    padded.values[t] = values[t];
    padded.indices[t] = indices[t];
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    std::memcpy(x[r], at.x[r], left * sizeof(x[r][0]));
    padded.x[r] = x[r];
  });
  add_step<A, kRows>(padded, sums);
}

// The sum of the lanes, after those `distance` apart were added.
template <int distance, int N>
PROXSPARSE_INLINE float halved(Vec<float, N> sums) {
  const Vec<float, N> half = sums + shuffle<Rotated<distance, N>>(sums, sums);
  if constexpr (distance == 1) {
    return half.lanes.raw[0];
  } else {
    return halved<distance / 2>(half);
  }
}
template <int N>
PROXSPARSE_INLINE float total(Vec<float, N> sums) {
  return halved<N / 2>(sums);
}

PROXSPARSE_INLINE void round_to(float value, float* stored) { *stored = value; }
PROXSPARSE_INLINE void round_to(float value, uint16_t* stored) {  // bfloat16: to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  *stored = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : BFloat16::kNaN >> 16;
}

// One tile for kRows rows of x from `row`; behind the last output feature, or row of x, the last one stands once more.
template <typename Format, int kRows>
void linear_tile(const LinearArguments& arguments, int64_t tile, int64_t row) {
  using A = typename ArithmeticOf<Format>::Type;
  using Storage = typename A::Storage;
  constexpr int kStep = 2 * A::kValues;  // weights
  const int64_t in_features = arguments.in_features, row_bytes = (in_features + 7) / 8;
  int64_t features[kTile], rows[kRows];
  Position<A, kRows> at;
  TileSums<A, kRows> sums;
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    features[t] = smaller(kTile * tile + t, arguments.out_features - 1);
    at.values[t] = static_cast<const Storage*>(arguments.values) + features[t] * in_features / 2;
    at.indices[t] = arguments.indices + features[t] * row_bytes;
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED { sums.of[t][r] = 0; });
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    rows[r] = smaller(row + r, arguments.rows - 1);
    at.x[r] = static_cast<const typename A::X*>(arguments.x) + rows[r] * in_features;
  });

  int64_t left = in_features;
  for (; left >= kStep; left -= kStep) {
    add_step<A, kRows>(at, sums);
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      // The next tile, while this one is computed: too far away for the CPU to fetch it unasked.
      __builtin_prefetch(at.values[t] + kTile * in_features / 2);
      __builtin_prefetch(at.indices[t] + kTile * row_bytes);
      at.values[t] += A::kValues;
      at.indices[t] += A::kValues / 4;
    });
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED { at.x[r] += kStep; });
  }
  if (left > 0) add_last<A, kRows>(at, left, sums);

  const auto* bias = static_cast<const Storage*>(arguments.bias);
  auto* y = static_cast<Storage*>(arguments.y);
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    const float added = bias == nullptr ? 0 : Format::load(bias[features[t]]);
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
      round_to(total(sums.of[t][r]) + added, y + rows[r] * arguments.out_features + features[t]);
    });
  });
}

// Tiles `begin` to `end` for all rows of x: the weights of a tile stay in the cache for the next rows.
template <typename Format>
void linear_tiles(const LinearArguments& arguments, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t row = 0, left = arguments.rows; left > 0; row += 4, left -= 4) {
      const auto tile_of = left == 1   ? linear_tile<Format, 1>
                           : left == 2 ? linear_tile<Format, 2>
                                       : linear_tile<Format, 4>;
      tile_of(arguments, tile, row);
    }
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
