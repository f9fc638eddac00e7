// n:4 rows to kept values and their places, and back, for any n. No vector code: a weight is packed once, and only 2:4
// weights are unpacked often (unpack_rows.h). The numbers are bit patterns.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "../packed_places.h"
#include "kernels.h"

namespace proxsparse {

constexpr uint8_t kInfeasible = 0xff;

// kept_places of a block whose nonzeros are the low nibble and whose -0.0 are the high nibble; kInfeasible if it has
// more than n nonzeros.
template <int n>
struct PlacesOfBlock {
  uint8_t of[256];
};
template <int n>
constexpr PlacesOfBlock<n> kPlacesOfBlock = [] {
  PlacesOfBlock<n> places{};
  for (uint32_t block = 0; block < 256; ++block) {
    const uint32_t nonzero = block & 15, negative_zero = block >> 4;
    places.of[block] = std::popcount(nonzero) > n ? kInfeasible : kept_places<n>(nonzero, negative_zero & ~nonzero);
  }
  return places;
}();

// Rows `begin` to `end`; false if a block has more than n nonzeros.
template <typename Storage, int n>
bool pack_rows(const PackCall& call, int64_t begin, int64_t end) {
  constexpr Storage kNegativeZero = Storage(Storage{1} << (8 * sizeof(Storage) - 1));
  const int64_t blocks = call.in_features / 4, row_bytes = (n * blocks + 3) / 4;
  bool feasible = true;
  for (int64_t row = begin; row < end; ++row) {
    const auto* weight = static_cast<const Storage*>(call.weight) + row * 4 * blocks;
    auto* values = static_cast<Storage*>(call.values) + row * n * blocks;
    uint8_t* indices = call.indices + row * row_bytes;
    uint32_t bits = 0;  // of places that are not written yet
    for (int64_t block = 0; block < blocks; ++block, weight += 4, values += n) {
      unsigned kinds = 0;
      for (int i = 0; i < 4; ++i) {
        kinds |= unsigned{Storage(weight[i] << 1) != 0} << i | unsigned{weight[i] == kNegativeZero} << (4 + i);
      }
      const unsigned places = kPlacesOfBlock<n>.of[kinds];
      feasible &= places != kInfeasible;
      for (int j = 0; j < n; ++j) values[j] = weight[places >> 2 * j & 3];
      const int group = block % 4;  // in a group of four blocks, whose places are n bytes
      bits |= (places & ((1 << 2 * n) - 1)) << 2 * n * group;
      if (group == 3 || block == blocks - 1) {
        for (int byte = 0; 8 * byte < 2 * n * (group + 1); ++byte) *indices++ = bits >> 8 * byte;
        bits = 0;
      }
    }
  }
  return feasible;
}

// Rows `begin` to `end`.
template <typename Storage, int n>
void unpack_rows(const PackCall& call, int64_t begin, int64_t end) {
  const int64_t blocks = call.in_features / 4, row_bytes = (n * blocks + 3) / 4;
  for (int64_t row = begin; row < end; ++row) {
    const auto* values = static_cast<const Storage*>(call.values) + row * n * blocks;
    const uint8_t* indices = call.indices + row * row_bytes;
    auto* weight = static_cast<Storage*>(call.weight) + row * 4 * blocks;
    std::memset(weight, 0, 4 * blocks * sizeof(Storage));
    for (int64_t value = 0; value < n * blocks; ++value) {
      weight[value / n * 4 + (indices[value / 4] >> 2 * (value % 4) & 3)] = values[value];
    }
  }
}

}  // namespace proxsparse
