// y = x W^T + bias with packed 2:4 weights. A tile, kTile output features by a few rows of x, is summed in registers.
#pragma once

#include "kernels.h"
#include "sparse_dot.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// f(0), ..., f(N - 1) with constants. No compiler keeps an array that a loop indexes in registers.
template <int N, typename F>
PROXSPARSE_INLINE void repeat(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>)
      PROXSPARSE_INLINED { (f(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, N>{});
}

// Pointers to what has not been multiplied yet: of each output feature of the tile, and of each row of x.
template <typename A, int kRows>
struct Position {
  const uint8_t* values[kTile];
  const uint8_t* indices[kTile];
  const typename A::X* x[kRows];
  typename A::Scales scales[kTile];  // of codes
};

template <typename A, int kRows>
struct TileSums {
  typename A::Sums of[kTile][kRows];
};

// One step of all dot products.
template <typename A, int kRows>
PROXSPARSE_INLINE void add_step(const Position<A, kRows>& position, TileSums<A, kRows>& sums) {
  typename A::Numbers values[kTile];
  typename A::Places places[kTile];
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    values[t] = A::load_values(position.values[t], position.scales[t]);
    places[t] = A::load_places(position.indices[t]);
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    const auto x = A::load_x(position.x[r]);
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      sums.of[t][r] = A::multiply_add(sums.of[t][r], values[t], A::gather(x, places[t]));
    });
  });
}

// The last `left` in_features, less than a step, padded with zeros. kBytes: of the values of a step.
template <typename A, int kRows, int kBytes>
PROXSPARSE_INLINE void add_last_step(const Position<A, kRows>& position, size_t left, TileSums<A, kRows>& sums) {
  uint8_t values[kTile][kBytes] = {}, indices[kTile][A::kValues / 4] = {};
  typename A::X x[kRows][2 * A::kValues] = {};
  Position<A, kRows> padded = position;
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    std::memcpy(values[t], position.values[t], left * kBytes / (2 * A::kValues));
    std::memcpy(indices[t], position.indices[t], (left + 7) / 8);
    padded.values[t] = values[t];
    padded.indices[t] = indices[t];
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    std::memcpy(x[r], position.x[r], left * sizeof(x[r][0]));
    padded.x[r] = x[r];
  });
  add_step<A, kRows>(padded, sums);
}

// The sum of all lanes, by halving.
template <int distance, int N>
PROXSPARSE_INLINE float sum_lanes(Vec<float, N> sums) {
  const Vec<float, N> half = sums + shuffle<Rotated<distance, N>>(sums, sums);
  if constexpr (distance == 1) {
    return half.lanes.raw[0];
  } else {
    return sum_lanes<distance / 2>(half);
  }
}
template <int N>
PROXSPARSE_INLINE float lane_sum(Vec<float, N> sums) {
  return sum_lanes<N / 2>(sums);
}

PROXSPARSE_INLINE void store_rounded(float value, float* stored) { *stored = value; }
PROXSPARSE_INLINE void store_rounded(float value, uint16_t* stored) {  // bfloat16
  *stored = (value == value ? BFloat16::round(std::bit_cast<uint32_t>(value)) : BFloat16::kNaN) >> 16;
}

// One tile for kRows rows of x from `row` on. Features and rows after the last one are computed as the last one.
template <typename Format, Codes codes, int kRows>
void sparse_linear_tile(const SparseLinearCall& call, int64_t tile, int64_t row) {
  using A = typename ArithmeticOf<Format, codes>::Type;
  using Storage = typename Format::Storage;
  constexpr int kStep = 2 * A::kValues;  // weights
  constexpr int kStepBytes = value_bytes<Format, codes>(A::kValues);
  const int64_t in_features = call.in_features, row_bytes = (in_features + 7) / 8;
  const int64_t row_value_bytes = value_bytes<Format, codes>(in_features / 2);
  using Groups = ScalesOf<Format, codes>;
  const int64_t row_groups = has_4_bits(codes) ? (in_features + Groups::kColumns - 1) / Groups::kColumns : 1;
  const auto* scales = static_cast<const typename Groups::Stored::Storage*>(call.scales);
  int64_t features[kTile], rows[kRows];
  Position<A, kRows> position;
  TileSums<A, kRows> sums;
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    features[t] = smaller(kTile * tile + t, call.out_features - 1);
    position.values[t] = static_cast<const uint8_t*>(call.values) + features[t] * row_value_bytes;
    position.indices[t] = call.indices + features[t] * row_bytes;
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED { sums.of[t][r] = 0; });
  });
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    rows[r] = smaller(row + r, call.rows - 1);
    position.x[r] = static_cast<const typename A::X*>(call.x) + rows[r] * in_features;
  });
  // Scales in float32, for the next kGroups groups: a vector with a float32 of memory in all lanes costs only a load. A
  // step on a grid may read one group after the last.
  constexpr int kGroups = 64, kNumbers = Groups::kNumbers;
  float next_scales[kTile][(kGroups + 1) * kNumbers];
  const auto load_scales = [&](int64_t column) PROXSPARSE_INLINED {
    const int64_t group = column / Groups::kColumns, row_numbers = row_groups * kNumbers;
    const int64_t count = smaller(int64_t{kGroups}, row_groups - group) * kNumbers;
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      if (column % (kGroups * Groups::kColumns) == 0) {
        const auto* stored = scales + features[t] * row_numbers + group * kNumbers;
        load_numbers<typename Groups::Stored>(stored, count, next_scales[t]);
        for (int i = 0; i < count; i += 64 / sizeof(*stored)) {
          __builtin_prefetch(stored + kTile * row_numbers + i);  // of the next tile
        }
        if constexpr (codes == kGrid) next_scales[t][count] = next_scales[t][count + 1] = 0;
      }
      position.scales[t].load(next_scales[t] + group % kGroups * kNumbers);
    });
  };

  int64_t column = 0;
  if constexpr (codes == kInt8) load_scales(0);
  for (; column + kStep <= in_features; column += kStep) {
    if constexpr (has_4_bits(codes)) load_scales(column);
    add_step<A, kRows>(position, sums);
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      // The next tile: it is too far away in memory for the CPU to prefetch it by itself.
      __builtin_prefetch(position.values[t] + kTile * row_value_bytes);
      __builtin_prefetch(position.indices[t] + kTile * row_bytes);
      position.values[t] += kStepBytes;
      position.indices[t] += A::kValues / 4;
    });
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED { position.x[r] += kStep; });
  }
  if (column < in_features) {
    if constexpr (has_4_bits(codes)) load_scales(column);
    add_last_step<A, kRows, kStepBytes>(position, in_features - column, sums);
  }

  const auto* bias = static_cast<const Storage*>(call.bias);
  auto* y = static_cast<Storage*>(call.y);
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    const float bias_t = bias == nullptr ? 0 : Format::load(bias[features[t]]);
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
      store_rounded(lane_sum(sums.of[t][r]) + bias_t, y + rows[r] * call.out_features + features[t]);
    });
  });
}

// Tiles `begin` to `end` for all rows of x. The weights of a tile stay in the cache for the next rows.
template <typename Format, Codes codes>
void sparse_linear_tiles(const SparseLinearCall& call, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t row = 0, left = call.rows; left > 0; row += 4, left -= 4) {
      const auto linear_tile = left == 1   ? sparse_linear_tile<Format, codes, 1>
                               : left == 2 ? sparse_linear_tile<Format, codes, 2>
                                           : sparse_linear_tile<Format, codes, 4>;
      linear_tile(call, tile, row);
    }
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
