// A tile of a packed 2:4 weight in the registers of a warp: 8 rows by a step of 256 columns.
//
// mma_sp multiplies a chunk of 16 blocks of each row at once. Lane 4g+q holds 4 of those of row g, j = 0 to 3: even j
// are row g of the operand and odd j are row g+8; j = 0 and 1 are block q, j = 2 and 3 are block q+4. Which blocks of a
// step are block j of lane q in chunk c is free, and chosen so that a lane reads consecutive bytes: weight_bits.h.
//
// mma_sp reads the places of chunks 0 and 1 from lanes q = 0 and 1, and those of chunks 2 and 3 from lanes q = 2 and 3;
// j = 0 and 1 from the even lane, j = 2 and 3 from the odd one. So each lane reads 16 of the 32 bytes of a step and
// uses half of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "sparse_mma.h"
#include "weight_bits.h"

namespace proxsparse::gpu {

constexpr int kTile = 8;  // rows of W

// The start of the tiles of a warp. Rows after the last one are read as the last one, and their results are not used.
template <typename Bits, int kTiles>
struct PackedTiles {
  const typename Bits::Stored* values;
  const uint8_t* indices;
  const uint16_t* scales;  // of codes of 4 bits, one for every kScaleColumns columns
  uint32_t columns, row[kTiles];

  __device__ PackedTiles(const GemvCall& call, int first) : columns(static_cast<uint32_t>(call.in_features)) {
    first = std::min(first, call.out_features - 1);
    constexpr int kColumns = Bits::kColumns;
    values = static_cast<const typename Bits::Stored*>(call.values) + int64_t{first} * (call.in_features / kColumns);
    indices = call.indices + int64_t{first} * ((call.in_features + 7) / 8);
    if constexpr (Bits::kStoredAs == kInt4) {
      constexpr int kGroup = kScaleColumns;
      scales = static_cast<const uint16_t*>(call.scales) + int64_t{first} * ((call.in_features + kGroup - 1) / kGroup);
    }
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      row[i] = static_cast<uint32_t>(std::min(i * kTile + lane() / 4, call.out_features - first - 1));
    }
  }

  // That of this lane's columns in a piece of the step that begins at `column`.
  __device__ uint32_t scale(int tile, uint32_t column, uint32_t piece) const {
    constexpr uint32_t kGroup = kScaleColumns, kScales = Bits::kPieceColumns / kGroup;
    const uint32_t first = column / kGroup + lane_of_row() * kScales / 4;
    return load_scale(scales + (row[tile] * ((columns + kGroup - 1) / kGroup) + first) + piece * kScales);
  }
};

// The part of a step of a tile that one lane holds: 4 blocks of every chunk, and the places of two chunks.
template <typename Bits>
struct LaneWeights {
  typename Bits::Values values[Bits::kPieces];
  Words2 places[2];
};

// From the places of a chunk with the two j that mma_sp reads from this lane, a byte for each r: the first j for all r
// in the lower half, the second in the upper half.
__device__ inline uint32_t places_of_lane(uint32_t both) {
  const uint32_t differ = (both ^ both >> 4) & 0x00f000f0u;
  return __byte_perm(both ^ differ ^ differ << 4, 0, 0x3120);
}

// The readers below load one piece of the values of a step that begins at `column`, and one of the two words of places.

// Reads 16 or 8 bytes at once. The columns must be a multiple of 64; values and indices must be 16-byte aligned.
template <bool kWhole>  // the whole step lies in the row; otherwise some of its chunks may be after the end
struct Aligned {
  template <typename Bits, int kTiles>
  static __device__ typename Bits::Values values(const PackedTiles<Bits, kTiles>& packed, int tile, uint32_t column,
                                                 uint32_t piece) {
    using Words = typename Bits::Words;
    const uint32_t place = column + piece * Bits::kPieceColumns, start = packed.row[tile] * packed.columns + column;
    const uint32_t in_piece = lane_of_row() * Bits::kPieceColumns / 4;
    if (!kWhole && place + in_piece / kChunk * kChunk >= packed.columns) return {};
    const auto* values = packed.values + (start / Bits::kColumns + lane_of_row() * Bits::kStoredOfLane);
    typename Bits::Values got{load_once(reinterpret_cast<const Words*>(values) + piece * 4)};
    if constexpr (Bits::kStoredAs == kInt4) got.scale = packed.scale(tile, column, piece);
    return got;
  }

  template <typename Bits, int kTiles>
  static __device__ Words2 places(const PackedTiles<Bits, kTiles>& packed, int tile, uint32_t column, uint32_t i) {
    const uint32_t half = lane_of_row() / 2, start = packed.row[tile] * packed.columns + column;
    if (!kWhole && column + (half * 2 + i) * kChunk >= packed.columns) return {kAnyPlaces, kAnyPlaces};
    return load_once(reinterpret_cast<const Words2*>(packed.indices + (start / 8 + half * 16)) + i);
  }
};

// Reads number by number. The columns must be a multiple of 4.
struct Unaligned {
  static __device__ uint32_t word(const uint16_t* numbers, uint32_t place, uint32_t size) {
    return place < size ? numbers[0] | uint32_t{numbers[1]} << 16 : 0;
  }
  static __device__ uint32_t word(const uint8_t* codes, uint32_t place, uint32_t size) {
    uint32_t word = 0;
    PROXSPARSE_UNROLL
    for (uint32_t byte = 0; byte < 4; ++byte) {
      if (place + byte < size) word |= uint32_t{codes[byte]} << 8 * byte;
    }
    return word;
  }

  // The nibbles of 8 blocks.
  static __device__ uint32_t places(const uint8_t* indices, uint32_t start, uint32_t first, uint32_t blocks) {
    uint32_t word = kAnyPlaces;
    PROXSPARSE_UNROLL
    for (uint32_t byte = 0; byte < 4; ++byte) {
      const uint32_t block = first + 2 * byte, mask = block + 1 < blocks ? 0xffu : block < blocks ? 0x0fu : 0u;
      if (mask) word = (word & ~(mask << 8 * byte)) | (indices[start + block / 2] & mask) << 8 * byte;
    }
    return word;
  }

  template <typename Bits, int kTiles>
  static __device__ typename Bits::Values values(const PackedTiles<Bits, kTiles>& packed, int tile, uint32_t column,
                                                 uint32_t piece) {
    const uint32_t size = packed.columns / Bits::kColumns, start = column + piece * Bits::kPieceColumns;
    const uint32_t first = start / Bits::kColumns + lane_of_row() * Bits::kStoredOfLane;
    const auto* values = packed.values + (packed.row[tile] * size + first);
    typename Bits::Values got{};
    PROXSPARSE_UNROLL
    for (uint32_t i = 0; i < sizeof(got.words) / 4; ++i) {
      constexpr uint32_t kStored = 4 / sizeof(typename Bits::Stored);
      got.words.word[i] = word(values + i * kStored, first + i * kStored, size);
    }
    if constexpr (Bits::kStoredAs == kInt4) {
      if (first < size) got.scale = packed.scale(tile, column, piece);
    }
    return got;
  }

  template <typename Bits, int kTiles>
  static __device__ Words2 places(const PackedTiles<Bits, kTiles>& packed, int tile, uint32_t column, uint32_t i) {
    const uint32_t blocks = packed.columns / 4, start = packed.row[tile] * ((packed.columns + 7) / 8);
    const uint32_t first = (column + (lane_of_row() / 2 * 2 + i) * kChunk) / 4;
    return {places(packed.indices, start, first, blocks), places(packed.indices, start, first + 8, blocks)};
  }
};

// Loads a whole step of all tiles of a warp.
template <typename Reader, typename Bits, int kTiles>
__device__ void load_step(LaneWeights<Bits> (&weights)[kTiles], const PackedTiles<Bits, kTiles>& packed,
                          uint32_t column) {
  PROXSPARSE_UNROLL
  for (uint32_t i = 0; i < 2 + Bits::kPieces; ++i) {  // in the order of use, places first
    PROXSPARSE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (i < 2)
        weights[tile].places[i] = Reader::places(packed, tile, column, i);
      else
        weights[tile].values[i - 2] = Reader::values(packed, tile, column, i - 2);
    }
  }
}

}  // namespace proxsparse::gpu
