// y = x W^T + bias with packed 2:4 weights, for many rows of x. The weights of a few output features are unpacked into
// the cache and multiplied by all rows, so that the work of unpacking is divided by the number of rows.
//
// A unit is 32 bits, one float32 or two neighbouring bfloat16: what one lane of an instruction multiplies and adds. x
// is transposed to panels: a vector holds the same unit of kPanelRows rows, and is multiplied by that unit of a weight
// in all lanes. The sums of a group, kGroupFeatures output features by two panels, stay in registers for kDepth units.
// Then the next of groups_together groups uses the same units of x, which are in the cache.
#pragma once

#include <bit>

#include "kernels.h"
#include "sparse_dot.h"
#include "sparse_linear_tiles.h"
#include "unpack_rows.h"

namespace proxsparse {
inline namespace PROXSPARSE_ISA {

constexpr int kPanelRows = PROXSPARSE_VECTOR_BYTES / 4;
constexpr int kGroupFeatures = PROXSPARSE_VECTOR_BYTES == 64 ? 12 : 4;  // a multiple of kTile; 24 or 8 vectors of sums

using UnitVec = Vec<uint32_t, kPanelRows>;

// A weight as it is multiplied.
template <typename Format>
struct Unit {
  using Weight = std::conditional_t<sizeof(typename ArithmeticOf<Format>::Type::X) == 4, uint32_t, uint16_t>;
};

// vectors[i] lane j <- vectors[j] lane i. Each round moves the highest bit of the lane into the number of the vector.
// If the vectors have k N lanes, the result has lanes j of the N vectors, then j + 1, ..., in the vector j / k.
template <typename V, int N, int rounds = N>
PROXSPARSE_INLINE void transpose(V (&vectors)[N]) {
  if constexpr (rounds > 1) {
    V next[N];
    repeat<N / 2>([&](auto i) PROXSPARSE_INLINED {
      V a = vectors[i], b = vectors[i + N / 2];
      interleave2(a, b);
      next[2 * i] = a;
      next[2 * i + 1] = b;
    });
    repeat<N>([&](auto i) PROXSPARSE_INLINED { vectors[i] = next[i]; });
    transpose<V, N, rounds / 2>(vectors);
  }
}

// Panels `begin` to `end` of x [rows, units]: [panel, unit, kPanelRows]. Rows after the last one are copies of it.
inline void row_panels(const RowPanelsCall& call, int64_t begin, int64_t end) {
  const int64_t units = call.units;
  for (int64_t panel = begin; panel < end; ++panel) {
    const char* rows[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      rows[r] = static_cast<const char*>(call.x) + 4 * units * (row < call.rows ? row : call.rows - 1);
    }
    uint32_t* to = call.panels + panel * units * kPanelRows;
    int64_t unit = 0;
    for (; unit + kPanelRows <= units; unit += kPanelRows) {
      UnitVec vectors[kPanelRows];
      repeat<kPanelRows>([&](auto r) PROXSPARSE_INLINED { vectors[r] = UnitVec::load(rows[r] + 4 * unit); });
      transpose(vectors);
      repeat<kPanelRows>([&](auto u) PROXSPARSE_INLINED { vectors[u].store(to + (unit + u) * kPanelRows); });
    }
    for (; unit < units; ++unit) {
      for (int r = 0; r < kPanelRows; ++r) std::memcpy(to + unit * kPanelRows + r, rows[r] + 4 * unit, 4);
    }
  }
}

// Values `first` to `first + count` of an output feature as they are multiplied. Writes whole steps.
template <typename Format, Codes codes, typename Unpacked>
PROXSPARSE_INLINE void decode_values(const SparseLinearCall& call, int64_t feature, int64_t first, int64_t count,
                                     Unpacked* to) {
  using A = typename ArithmeticOf<Format, codes>::Type;
  constexpr int64_t kStepBytes = value_bytes<Format, codes>(A::kValues);
  const int64_t in_features = call.in_features, groups = (in_features + kScaleColumns - 1) / kScaleColumns;
  const auto* scales = static_cast<const typename Format::Storage*>(call.scales);
  const auto* values =
      static_cast<const uint8_t*>(call.values) + value_bytes<Format, codes>(feature * (in_features / 2) + first);
  typename A::Sums scale;
  if constexpr (codes == kInt8) scale = Format::load(scales[feature]);
  for (int64_t i = 0; i < count; i += A::kValues, values += kStepBytes) {
    if constexpr (codes == kInt4) scale = Format::load(scales[feature * groups + (first + i) / (kScaleColumns / 2)]);
    uint8_t last[kStepBytes] = {};
    if (count - i < A::kValues) std::memcpy(last, values, value_bytes<Format, codes>(count - i));
    const auto numbers = A::load_values(count - i < A::kValues ? last : values, scale);
    std::memcpy(to + i, &numbers, sizeof(numbers));
  }
}

// Weights `begin` to `begin + count` of an output feature in dense form, at most kUnpackedUnits units; `to` as in
// unpack_24_row.
template <typename Format, Codes codes, typename To>
PROXSPARSE_INLINE void unpack_feature(const SparseLinearCall& call, int64_t feature, int64_t begin, int64_t count,
                                      To to) {
  using Unpacked = Unit<Format>::Weight;
  const uint8_t* indices = call.indices + feature * ((call.in_features + 7) / 8) + begin / 8;
  if constexpr (codes == kPlain && sizeof(typename Format::Storage) == sizeof(Unpacked)) {
    const auto* values = static_cast<const Unpacked*>(call.values) + (feature * call.in_features + begin) / 2;
    unpack_24_row(values, indices, count, to);
  } else {
    alignas(64) Unpacked values[kUnpackedUnits * 2 / sizeof(Unpacked)];
    decode_values<Format, codes>(call, feature, begin / 2, count / 2, values);
    unpack_24_row(values, indices, count, to);
  }
}

// Turns -0.0 into +0.0 in pairs of bfloat16. A column lies in up to two windows; the one without its weight may keep
// a zero there, of a code with a negative scale.
inline void clear_negative_zeros(uint32_t* pairs, int64_t count) {
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  for (int64_t i = 0; i < count; ++i) pairs[i] &= kMagnitudes | ((pairs[i] & kMagnitudes) + kMagnitudes);
}

// Pairs of columns from those of their windows, as reference/windows.py: whole blocks, then the remainder. A column has
// its weight in one window, and +0.0 in the other.
inline void fold_windows(const uint32_t* windows, int64_t pairs, int m, uint32_t* to) {
  const int last = m / 2 - 1;  // windows of a block
  for (; pairs > last; pairs -= last + 1, windows += 2 * last, to += last + 1) {
    to[0] = windows[0];
    for (int i = 1; i < last; ++i) to[i] = windows[2 * i - 1] | windows[2 * i];
    to[last] = windows[2 * last - 1];
  }
  for (int i = 0; i < pairs; ++i) to[i] = windows[2 * i];
}

// Output features `begin` to `end` in dense form: [feature, in_features].
template <Codes codes>
void unpack_features(const SparseLinearCall& call, int64_t in_features, int m, int64_t begin, int64_t end,
                     void* weight) {
  constexpr int64_t most = 2 * kUnpackedUnits;
  const bool windowed = in_features != call.in_features;
  // Whole blocks, whose packed columns are whole groups of a scale.
  const int64_t columns = windowed ? most / (64 * (m - 2)) * 32 * m : most;
  alignas(64) uint32_t windows[kUnpackedUnits];
  auto* row = static_cast<uint16_t*>(weight);
  for (int64_t feature = begin; feature < end; ++feature, row += in_features) {
    for (int64_t first = 0; first < in_features; first += columns) {
      const int64_t count = smaller(columns, in_features - first);
      if (!windowed) {
        unpack_feature<BFloat16, codes>(call, feature, first, count, [=](int64_t i) { return row + first + i; });
        continue;
      }
      const int64_t packed = first / m * (2 * m - 4), width = count / m * (2 * m - 4) + count % m * 2;
      unpack_feature<BFloat16, codes>(call, feature, packed, width,
                                      [&](int64_t i) { return reinterpret_cast<uint16_t*>(windows) + i; });
      clear_negative_zeros(windows, width / 2);
      fold_windows(windows, count / 2, m, reinterpret_cast<uint32_t*>(row + first));
    }
  }
}

// The weights of a group, from `unit` on, in dense form: [chunk, feature, kChunkUnits units]. Features after the last
// one are copies of it.
template <typename Format, Codes codes>
void unpack_group(const SparseLinearCall& call, int64_t group, int64_t unit, int64_t units, uint32_t* weight) {
  using Unpacked = Unit<Format>::Weight;
  constexpr int64_t unit_weights = 4 / sizeof(Unpacked), chunk = kChunkUnits * unit_weights;
  for (int f = 0; f < kGroupFeatures; ++f) {
    const int64_t feature = smaller(group * kGroupFeatures + f, call.out_features - 1);
    const auto to = [=](int64_t i) PROXSPARSE_INLINED {
      return reinterpret_cast<Unpacked*>(weight) + (i / chunk * kGroupFeatures + f) * chunk + i % chunk;
    };
    unpack_feature<Format, codes>(call, feature, unit * unit_weights, units * unit_weights, to);
  }
}

// Prefetches the packed weights of a group that are unpacked next: up to 7 lines for each chunk that is multiplied.
template <int kLineChunks>  // chunks whose values are in a line of 64 bytes
struct Ahead {
  const char *values, *indices;      // of the first feature; null: nothing is prefetched
  int64_t value_bytes, index_bytes;  // of a feature
  int64_t chunk;

  PROXSPARSE_INLINE void prefetch_chunk() {
    for (int f = chunk % kLineChunks; f < kGroupFeatures; f += kLineChunks) {
      __builtin_prefetch(values + f * value_bytes + chunk / kLineChunks * 64, 0, 2);
    }
    // The indices of a chunk are 2 or 4 bytes of each feature.
    if (chunk % 16 < kGroupFeatures) __builtin_prefetch(indices + chunk % 16 * index_bytes + chunk / 16 * 64, 0, 2);
    ++chunk;
  }
};

// total [panel, feature, kPanelRows] += the products of a group and kPanels panels, which are x_stride apart.
template <typename Format, int kPanels, int kLineChunks>
void multiply_group(const uint32_t* weight, const uint32_t* x, int64_t x_stride, int64_t units, bool is_first,
                    float* total, Ahead<kLineChunks> ahead) {
  using A = typename ArithmeticOf<Format>::Type;
  struct {
    typename A::Sums of[kGroupFeatures][kPanels];
  } sums;
  const auto each_sum = [](auto f) PROXSPARSE_INLINED {
    repeat<kGroupFeatures>([&](auto feature) PROXSPARSE_INLINED {
      repeat<kPanels>([&](auto panel) PROXSPARSE_INLINED { f(feature, panel); });
    });
  };
  each_sum([&](auto f, auto p) PROXSPARSE_INLINED { sums.of[f][p] = 0; });
  for (; units > 0; units -= kChunkUnits) {
    if (ahead.values != nullptr) ahead.prefetch_chunk();
    for (const uint32_t* end = weight + smaller(units, int64_t{kChunkUnits}); weight < end; ++weight, x += kPanelRows) {
      typename A::Numbers xs[kPanels];
      repeat<kPanels>([&](auto p) PROXSPARSE_INLINED { xs[p] = A::load_units(x + p * x_stride); });
      repeat<kGroupFeatures>([&](auto f) PROXSPARSE_INLINED {
        const auto w = A::broadcast_unit(weight[f * kChunkUnits]);
        repeat<kPanels>([&](auto p) PROXSPARSE_INLINED { sums.of[f][p] = A::multiply_add(sums.of[f][p], w, xs[p]); });
      });
    }
    weight += (kGroupFeatures - 1) * kChunkUnits;
  }
  each_sum([&](auto f, auto p) PROXSPARSE_INLINED {
    float* to = total + (p * kGroupFeatures + f) * kPanelRows;
    (is_first ? sums.of[f][p] : sums.of[f][p] + A::Sums::load(to)).store(to);
  });
}

// bfloat16 in the upper halves, 0 in the lower ones.
PROXSPARSE_INLINE UnitVec rounded_to_bfloat16(Vec<float, kPanelRows> outputs) {
  const UnitVec bits = BFloat16::round(UnitVec(bits_as<uint32_t>(outputs)));
  return select(outputs == outputs, bits, UnitVec(BFloat16::kNaN)) & UnitVec(0xffff0000);
}

// y <- total [feature, kPanelRows] + bias, for a group and a panel.
template <typename Format>
void store_group(const SparseLinearCall& call, int64_t group, int64_t panel, const float* total) {
  using Storage = typename Format::Storage;
  constexpr int unit_outputs = 4 / sizeof(Storage), group_units = kGroupFeatures / unit_outputs;
  constexpr int kUnits = std::bit_ceil(unsigned{group_units}), kRows = kPanelRows / kUnits;
  const int64_t first = group * kGroupFeatures, features = smaller(int64_t{kGroupFeatures}, call.out_features - first);
  const int64_t row = panel * kPanelRows, rows = smaller(int64_t{kPanelRows}, call.rows - row);
  float biases[kGroupFeatures] = {};
  for (int f = 0; f < features && call.bias != nullptr; ++f) {
    biases[f] = Format::load(static_cast<const Storage*>(call.bias)[first + f]);
  }
  const auto output = [&](int f) PROXSPARSE_INLINED {
    return Vec<float, kPanelRows>::load(total + f * kPanelRows) + biases[f];
  };
  UnitVec outputs[kUnits];
  repeat<kUnits>([&](auto u) PROXSPARSE_INLINED {
    outputs[u] = UnitVec(0);
    if constexpr (u < group_units && unit_outputs == 2) {
      outputs[u] = rounded_to_bfloat16(output(2 * u)) >> 16 | rounded_to_bfloat16(output(2 * u + 1));
    } else if constexpr (u < group_units) {
      outputs[u] = bits_as<uint32_t>(output(u));
    }
  });
  transpose(outputs);  // now a vector has kRows rows
  auto* y = static_cast<Storage*>(call.y) + row * call.out_features + first;
  for (int r = 0; r < rows; r += kRows) {
    uint32_t of_rows[kPanelRows];
    outputs[r / kRows].store(of_rows);
    for (int i = 0; i < kRows && r + i < rows; ++i, y += call.out_features) {
      if (features == kGroupFeatures) {
        std::memcpy(y, of_rows + i * kUnits, kGroupFeatures * sizeof(Storage));  // a constant size: no call
      } else {
        std::memcpy(y, of_rows + i * kUnits, features * sizeof(Storage));
      }
    }
  }
}

// Groups `begin` to `end` for all rows. Rows after the last panel are computed as few rows. The units of x that are
// multiplied by all groups before the next ones stay in the L3 cache.
template <typename Format, Codes codes>
void sparse_gemm_groups(const SparseGemmCall& gemm, uint32_t* scratch, int64_t begin, int64_t end) {
  constexpr int64_t unit_weights = 4 / sizeof(typename Unit<Format>::Weight);
  constexpr int kLineChunks = 64 / value_bytes<Format, codes>(kChunkUnits * unit_weights / 2);
  const SparseLinearCall& call = gemm.linear;
  const int64_t units = call.in_features / unit_weights, index_bytes = (call.in_features + 7) / 8;
  const int64_t row_value_bytes = value_bytes<Format, codes>(call.in_features / 2);
  const int64_t chunks = (gemm.units_together + kChunkUnits - 1) / kChunkUnits;
  const int64_t unpacked = chunks * kChunkUnits * kGroupFeatures;
  const int64_t panel_size = kPanelRows * kGroupFeatures;
  const auto* values = static_cast<const char*>(call.values);
  const auto* indices = reinterpret_cast<const char*>(call.indices);
  float* totals = reinterpret_cast<float*>(scratch + kGroupFeatures * kUnpackedUnits);
  for (int64_t unit = 0; unit < units; unit += gemm.units_together) {
    const int64_t count = smaller(gemm.units_together, units - unit);
    const bool is_last = unit + count == units;
    for (int64_t first = begin; first < end; first += gemm.groups_together) {
      const int64_t groups = smaller(gemm.groups_together, end - first);
      float* of_groups = totals + (units > gemm.units_together ? first - begin : 0) * gemm.panels * panel_size;
      for (int64_t g = 0; g < groups; ++g)
        unpack_group<Format, codes>(call, first + g, unit, count, scratch + g * unpacked);
      for (int64_t panel = 0; panel < gemm.panels; panel += 2) {
        const int64_t after = smaller(panel + 2, gemm.panels);
        const auto multiply =
            after - panel == 1 ? multiply_group<Format, 1, kLineChunks> : multiply_group<Format, 2, kLineChunks>;
        for (int64_t done = 0; done < count; done += kDepth) {
          const uint32_t* x = gemm.x_panels + (panel * units + unit + done) * kPanelRows;
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t next = (first + gemm.groups_together + g) * kGroupFeatures, weight = unit * unit_weights;
            const char* next_values = values + next * row_value_bytes + value_bytes<Format, codes>(weight / 2);
            const Ahead<kLineChunks> ahead{panel > 0 ? nullptr : next_values, indices + next * index_bytes + weight / 8,
                                           row_value_bytes, index_bytes, done / kChunkUnits};
            multiply(scratch + g * unpacked + done * kGroupFeatures, x, units * kPanelRows,
                     smaller(int64_t{kDepth}, count - done), unit + done == 0,
                     of_groups + (g * gemm.panels + panel) * panel_size, ahead);
          }
        }
        for (int64_t part = panel; is_last && part < after; ++part) {
          for (int64_t g = 0; g < groups; ++g) {
            store_group<Format>(call, first + g, part, of_groups + (g * gemm.panels + part) * panel_size);
          }
        }
      }
    }
  }
  if (gemm.rest.rows > 0) {
    constexpr int64_t group_tiles = kGroupFeatures / kTile;
    const int64_t tiles = (call.out_features + kTile - 1) / kTile;
    sparse_linear_tiles<Format, codes>(gemm.rest, begin * group_tiles, smaller(end * group_tiles, tiles));
  }
}

}  // namespace PROXSPARSE_ISA
}  // namespace proxsparse
