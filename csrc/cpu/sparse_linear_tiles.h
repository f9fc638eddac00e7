// y = x W^T + bias with packed 2:4 weights. A tile, kTile output features by a few rows of x, is summed in registers.
#pragma once

#include "kernels.h"
#include "sparse_dot.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

// What has not been multiplied yet, of the first output feature of the tile and of each row of x. The other features
// are addressed by their distance: pointers to all of them would not fit into the registers.
template <typename A, int kRows>
struct Position {
  const uint8_t *values, *indices;
  int64_t value_bytes, index_bytes;  // from one feature to the next
  const typename A::X* x[kRows];
  typename A::Sums scales[kTile];  // of codes
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
    values[t] = A::load_values(position.values + t * position.value_bytes, position.scales[t]);
    places[t] = A::load_places(position.indices + t * position.index_bytes);
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
  padded.values = values[0];
  padded.indices = indices[0];
  padded.value_bytes = sizeof(values[0]);
  padded.index_bytes = sizeof(indices[0]);
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    std::memcpy(values[t], position.values + t * position.value_bytes, left * kBytes / (2 * A::kValues));
    std::memcpy(indices[t], position.indices + t * position.index_bytes, (left + 7) / 8);
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

// The output features `first`, `first` + `distance`, ... of a tile for kRows rows of x from `row` on. Rows after the
// last one are computed as the last one.
template <typename Format, Codes codes, int kRows>
void sparse_linear_tile(const SparseLinearCall& call, int64_t first, int64_t distance, int64_t row) {
  using A = typename ArithmeticOf<Format, codes>::Type;
  using Storage = typename Format::Storage;
  constexpr int kStep = 2 * A::kValues;  // weights
  constexpr int kStepBytes = value_bytes<Format, codes>(A::kValues);
  const int64_t in_features = call.in_features, row_bytes = (in_features + 7) / 8;
  const int64_t row_value_bytes = value_bytes<Format, codes>(in_features / 2);
  const int64_t row_groups = codes == kInt4 ? (in_features + kScaleColumns - 1) / kScaleColumns : 1;
  const auto* scales = static_cast<const Storage*>(call.scales);
  int64_t rows[kRows];
  Position<A, kRows> position;
  position.values = static_cast<const uint8_t*>(call.values) + first * row_value_bytes;
  position.indices = call.indices + first * row_bytes;
  position.value_bytes = distance * row_value_bytes;
  position.index_bytes = distance * row_bytes;
  TileSums<A, kRows> sums;
  repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
    rows[r] = smaller(row + r, call.rows - 1);
    position.x[r] = static_cast<const typename A::X*>(call.x) + rows[r] * in_features;
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED { sums.of[t][r] = 0; });
  });

  // Scales in float32, for the next kGroups groups: a vector with a float32 of memory in all lanes costs only a load.
  constexpr int kGroups = 64;
  constexpr int64_t kColumns = kGroups * kScaleColumns;
  float next_scales[kTile][kGroups];
  const auto load_next_scales = [&](int64_t column) PROXSPARSE_INLINED {
    const int64_t group = column / kScaleColumns, count = smaller(int64_t{kGroups}, row_groups - group);
    repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
      const auto* stored = scales + (first + t * distance) * row_groups + group;
      load_numbers<Format>(stored, count, next_scales[t]);
      for (int i = 0; i < count; i += 64 / sizeof(*stored)) {
        __builtin_prefetch(stored + kTile * row_groups + i);  // of the next tile
      }
    });
  };
  const auto choose_scales = [&](int64_t column) PROXSPARSE_INLINED {
    repeat<kTile>([&](auto t)
                      PROXSPARSE_INLINED { position.scales[t] = next_scales[t][column % kColumns / kScaleColumns]; });
  };

  int64_t column = 0;
  if constexpr (codes == kInt8) {
    load_next_scales(0);
    choose_scales(0);
  }
  const int64_t whole = in_features / kStep * kStep;
  while (column < whole) {
    if constexpr (codes == kInt4) load_next_scales(column);
    const int64_t end = codes == kInt4 ? smaller(whole, column + kColumns) : whole;
    for (; column < end; column += kStep) {
      if constexpr (codes == kInt4) choose_scales(column);
      add_step<A, kRows>(position, sums);
      repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
        // The next tile: it is too far away in memory for the CPU to prefetch it by itself.
        __builtin_prefetch(position.values + (kTile + t) * position.value_bytes);
        __builtin_prefetch(position.indices + (kTile + t) * position.index_bytes);
      });
      position.values += kStepBytes;
      position.indices += A::kValues / 4;
      repeat<kRows>([&](auto r) PROXSPARSE_INLINED { position.x[r] += kStep; });
    }
  }
  if (column < in_features) {
    if constexpr (codes == kInt4) {
      if (column % kColumns == 0) load_next_scales(column);
      choose_scales(column);
    }
    add_last_step<A, kRows, kStepBytes>(position, in_features - column, sums);
  }

  const auto* bias = static_cast<const Storage*>(call.bias);
  auto* y = static_cast<Storage*>(call.y);
  repeat<kTile>([&](auto t) PROXSPARSE_INLINED {
    const int64_t feature = first + t * distance;
    const float bias_t = bias == nullptr ? 0 : Format::load(bias[feature]);
    repeat<kRows>([&](auto r) PROXSPARSE_INLINED {
      store_rounded(lane_sum(sums.of[t][r]) + bias_t, y + rows[r] * call.out_features + feature);
    });
  });
}

// Tiles `begin` to `end` for all rows of x. The weights of a tile stay in the cache for the next rows.
template <typename Format, Codes codes>
void sparse_linear_tiles(const SparseLinearCall& call, int64_t begin, int64_t end) {
  const auto all_rows = [&](int64_t first, int64_t distance) {
    for (int64_t row = 0, left = call.rows; left > 0; row += 4, left -= 4) {
      const auto linear_tile = left == 1   ? sparse_linear_tile<Format, codes, 1>
                               : left == 2 ? sparse_linear_tile<Format, codes, 2>
                                           : sparse_linear_tile<Format, codes, 4>;
      linear_tile(call, first, distance, row);
    }
  };
  int64_t feature = kTile * begin;
  const int64_t last = smaller(kTile * end, call.out_features);
  for (; feature + kTile <= last; feature += kTile) all_rows(feature, 1);
  for (; feature < last; ++feature) all_rows(feature, 0);  // a tile that is not full: one feature, kTile times
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
