// A tile of a packed 2:4 weight in the registers of a warp: 8 rows by a step of 256 columns.
//
// The columns are divided into chunks of 64, each 16 blocks. Lane 4g+q reads blocks 4q+j, j = 0 to 3, of row g: 16
// bytes of values. In the operand of mma_sp, even j are row g and odd j are row g+8; j = 0 and 1 are block q, j = 2 and
// 3 are block q+4.
//
// A step is 4 chunks. mma_sp reads the places of chunks 0 and 1 from lanes q = 0 and 1, and those of chunks 2 and 3
// from lanes q = 2 and 3; j = 0 and 1 from the even lane, j = 2 and 3 from the odd one. So each lane reads 16 of the 32
// bytes and uses half of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "sparse_mma.h"
#include "warp.h"

namespace proxsparse::gpu {

constexpr int kTile = 8;                                                // rows of W
constexpr uint32_t kChunk = 64, kChunks = 4, kStep = kChunk * kChunks;  // columns

// The start of the tiles of a warp. Rows after the last one are read as the last one, and their results are not used.
template <int kTiles>
struct PackedTiles {
  const uint16_t* values;
  const uint8_t* indices;
  uint32_t columns, row[kTiles];

  __device__ PackedTiles(const GemvCall& call, int first) : columns(static_cast<uint32_t>(call.in_features)) {
    first = std::min(first, call.out_features - 1);
    values = static_cast<const uint16_t*>(call.values) + int64_t{first} * (call.in_features / 2);
    indices = call.indices + int64_t{first} * ((call.in_features + 7) / 8);
    PROXSPARSE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      row[i] = static_cast<uint32_t>(std::min(i * kTile + lane() / 4, call.out_features - first - 1));
    }
  }
};

// The part of a step of a tile that one lane holds: 4 blocks of every chunk, and the places of two chunks.
struct LaneWeights {
  Words4 values[kChunks];
  Words2 places[2];
};

__device__ inline uint32_t lane_of_row() { return static_cast<uint32_t>(lane()) % 4; }

// From the places of a chunk (nibble 4r+j for block j of lane r), those with the two j that mma_sp reads from this
// lane: the first j for all r in the lower half, the second in the upper half.
__device__ inline uint32_t places_of_lane(Words2 chunk) {
  const uint32_t both = __byte_perm(chunk.word[0], chunk.word[1], lane() % 2 ? 0x7531 : 0x6420);
  const uint32_t differ = (both ^ both >> 4) & 0x00f000f0u;
  return __byte_perm(both ^ differ ^ differ << 4, 0, 0x3120);
}

// The readers below load the values of one chunk of a step that begins at `column`, and one of the two words of places.

// Reads 16 bytes at once. The columns must be a multiple of 64; values and indices must be 16-byte aligned.
template <bool kWhole>  // the whole step lies in the row; otherwise some of its chunks may be after the end
struct Aligned {
  template <int kTiles>
  static __device__ Words4 values(const PackedTiles<kTiles>& packed, int tile, uint32_t column, uint32_t chunk) {
    if (!kWhole && column + chunk * kChunk >= packed.columns) return {};
    const uint32_t start = packed.row[tile] * packed.columns + column;
    const auto* values = reinterpret_cast<const Words4*>(packed.values + (start / 2 + lane_of_row() * 8));
    return load_once(values + chunk * (kChunk / 16));
  }

  template <int kTiles>
  static __device__ Words2 places(const PackedTiles<kTiles>& packed, int tile, uint32_t column, uint32_t i) {
    const uint32_t half = lane_of_row() / 2, start = packed.row[tile] * packed.columns + column;
    if (!kWhole && column + (half * 2 + i) * kChunk >= packed.columns) return {kAnyPlaces, kAnyPlaces};
    return load_once(reinterpret_cast<const Words2*>(packed.indices + (start / 8 + half * 16)) + i);
  }
};

// Reads number by number. The columns must be a multiple of 4.
struct Unaligned {
  static __device__ uint32_t pair(const uint16_t* numbers, uint32_t place, uint32_t size) {
    return place < size ? numbers[0] | uint32_t{numbers[1]} << 16 : 0;
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

  template <int kTiles>
  static __device__ Words4 values(const PackedTiles<kTiles>& packed, int tile, uint32_t column, uint32_t chunk) {
    const uint32_t size = packed.columns / 2, first = (column + chunk * kChunk) / 2 + lane_of_row() * 8;
    const uint16_t* values = packed.values + (packed.row[tile] * size + first);
    return {pair(values, first, size), pair(values + 2, first + 2, size), pair(values + 4, first + 4, size),
            pair(values + 6, first + 6, size)};
  }

  template <int kTiles>
  static __device__ Words2 places(const PackedTiles<kTiles>& packed, int tile, uint32_t column, uint32_t i) {
    const uint32_t blocks = packed.columns / 4, start = packed.row[tile] * ((packed.columns + 7) / 8);
    const uint32_t first = (column + (lane_of_row() / 2 * 2 + i) * kChunk) / 4;
    return {places(packed.indices, start, first, blocks), places(packed.indices, start, first + 8, blocks)};
  }
};

// Loads a whole step of all tiles of a warp.
template <typename Reader, int kTiles>
__device__ void load_step(LaneWeights (&weights)[kTiles], const PackedTiles<kTiles>& packed, uint32_t column) {
  PROXSPARSE_UNROLL
  for (uint32_t i = 0; i < 2 + kChunks; ++i) {  // in the order of use, places first
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
