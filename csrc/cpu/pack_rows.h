// n:4 rows to kept values and their places, and back, for any n: portable, for a weight is packed once, and what is
// unpacked often is 2:4 (unpack_rows.h). The numbers are bit patterns.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace proxsparse {

constexpr uint8_t kInfeasible = 0xff;

// By which of a block's weights are nonzero (low nibble) and -0.0 (high nibble): the n places that are kept, ascending,
// two bits each.
template <int n>
struct PlacesOfBlock {
  uint8_t of[256];
};
template <int n>
constexpr PlacesOfBlock<n> kPlacesOfBlock = [] {
  PlacesOfBlock<n> places{};
  for (int block = 0; block < 256; ++block) {
    int chosen = 0, count = 0, nonzeros = 0;
    for (int i = 0; i < 4; ++i) nonzeros += block >> i & 1;
    for (int rank = 0; rank < 3; ++rank) {  // nonzero, -0.0, +0.0; then the lower place
      for (int i = 0; i < 4; ++i) {
        const int nonzero = block >> i & 1, negative = block >> (4 + i) & 1;
        const bool of_rank = rank == 0 ? nonzero : !nonzero && negative == (rank == 1);
        if (of_rank && count < n) chosen |= 1 << i, ++count;
      }
    }
    for (int i = 3; i >= 0; --i) {
      if (chosen >> i & 1) places.of[block] = places.of[block] << 2 | i;
    }
    if (nonzeros > n) places.of[block] = kInfeasible;
  }
  return places;
}();

// Rows `begin` to `end`; false if a block has more than n nonzeros.
template <typename Storage, int n>
bool pack_rows(const PackArguments& arguments, int64_t begin, int64_t end) {
  constexpr Storage kNegativeZero = Storage(Storage{1} << (8 * sizeof(Storage) - 1));
  const int64_t blocks = arguments.in_features / 4, row_bytes = (n * blocks + 3) / 4;
  bool feasible = true;
  for (int64_t row = begin; row < end; ++row) {
    const auto* weight = static_cast<const Storage*>(arguments.weight) + row * 4 * blocks;
    auto* values = static_cast<Storage*>(arguments.values) + row * n * blocks;
    uint8_t* indices = arguments.indices + row * row_bytes;
    uint32_t bits = 0;  // not written yet
    for (int64_t block = 0; block < blocks; ++block, weight += 4, values += n) {
      unsigned kinds = 0;
      for (int i = 0; i < 4; ++i) {
        kinds |= unsigned{Storage(weight[i] << 1) != 0} << i | unsigned{weight[i] == kNegativeZero} << (4 + i);
      }
      const unsigned places = kPlacesOfBlock<n>.of[kinds];
      feasible &= places != kInfeasible;
      for (int j = 0; j < n; ++j) values[j] = weight[places >> 2 * j & 3];
      const int group = block % 4;  // of four blocks, which fill n bytes
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
void unpack_rows(const UnpackArguments& arguments, int64_t begin, int64_t end) {
  const int64_t blocks = arguments.in_features / 4, row_bytes = (n * blocks + 3) / 4;
  for (int64_t row = begin; row < end; ++row) {
    const auto* values = static_cast<const Storage*>(arguments.values) + row * n * blocks;
    const uint8_t* indices = arguments.indices + row * row_bytes;
    auto* weight = static_cast<Storage*>(arguments.weight) + row * 4 * blocks;
    std::memset(weight, 0, 4 * blocks * sizeof(Storage));
    for (int64_t value = 0; value < n * blocks; ++value) {
      weight[value / n * 4 + (indices[value / 4] >> 2 * (value % 4) & 3)] = values[value];
    }
  }
}

}  // namespace proxsparse
