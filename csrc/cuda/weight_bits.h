// How the kept values of a packed 2:4 weight are stored: 16-bit numbers, or codes of 8 or 4 bits with scales. For each
// format: which blocks of a step of 256 columns a lane reads, and how they become an operand of mma_sp. packed_tile.h
// defines chunks, lanes q and blocks j. The numbers of x have the same order, see block_of_lane.
#pragma once

#include <cmath>
#include <cstdint>

#include "codes.h"
#include "launch.h"
#include "sparse_mma.h"
#include "warp.h"

namespace proxsparse::gpu {

constexpr uint32_t kChunk = 64, kChunks = 4, kStep = kChunk * kChunks;  // columns

__device__ inline uint32_t lane_of_row() { return static_cast<uint32_t>(lane()) % 4; }

// The columns are divided into chunks in their order. Block j of lane q is block 4q+j of a chunk: 16 bytes for j = 0 to
// 3, one piece of a lane for each chunk.
struct Bits16 {
  static constexpr Codes kStoredAs = kPlain;
  using Stored = uint16_t;
  using Words = Words4;
  struct Values {
    Words words;
  };
  static constexpr uint32_t kColumns = 2;                                  // of W for each stored number
  static constexpr uint32_t kPieces = 4, kPieceColumns = kChunk;           // of a step, for the four lanes of a row
  static constexpr uint32_t kStoredOfLane = kPieceColumns / kColumns / 4;  // in a piece

  // The block of 32, half a step, whose number in the order of the operands is that of this lane: 16c + 4q + j.
  static __device__ uint32_t block_of_lane() { return static_cast<uint32_t>(lane()); }

  // The byte with the two j that mma_sp reads from this lane, for each lane of the row.
  static __device__ uint32_t place_bytes(const Words2 (&places)[2], uint32_t chunk) {
    return __byte_perm(places[chunk % 2].word[0], places[chunk % 2].word[1], lane() % 2 ? 0x7531 : 0x6420);
  }
  static constexpr uint32_t last_chunk_of_places(uint32_t word) { return 2 + word; }

  template <typename Format>
  static __device__ const Words& operand(Format, const Values (&values)[kPieces], uint32_t chunk) {
    return values[chunk].words;
  }
};

// The order for codes. A piece of a lane is 8 blocks, 32 consecutive columns, so that it has 16 bytes with 8 bits, and
// 8 with 4 bits; two pieces are a step. Blocks 0, 1, 4 and 5 of the piece are j = 0 to 3 of its first chunk, the others
// those of its second chunk. Then the places that a lane needs are 2 bytes of each of the 4 words of the half step.
template <uint32_t kColumnsOfStored>
struct CodeOrder {
  using Stored = uint8_t;
  static constexpr uint32_t kColumns = kColumnsOfStored;
  static constexpr uint32_t kPieces = 2, kPieceColumns = 2 * kChunk;
  static constexpr uint32_t kStoredOfLane = kPieceColumns / kColumns / 4;

  static __device__ uint32_t block_of_lane() {  // 8q + 4(j/2) + 2c + j%2 for lane 16c + 4q + j
    const uint32_t number = static_cast<uint32_t>(lane());
    return number / 2 % 8 * 4 + number / 16 * 2 + number % 2;
  }

  static __device__ uint32_t place_bytes(const Words2 (&places)[2], uint32_t chunk) {
    const unsigned halves = lane() % 2 ? 0x7632 : 0x5410;
    const uint32_t first = __byte_perm(places[0].word[0], places[0].word[1], halves);
    const uint32_t second = __byte_perm(places[1].word[0], places[1].word[1], halves);
    return __byte_perm(first, second, chunk % 2 ? 0x7531 : 0x6420);
  }
  static constexpr uint32_t last_chunk_of_places(uint32_t) { return 3; }
};

// int8; the sum of a row is multiplied by its scale at the end, so that the products are exact.
struct Bits8 : CodeOrder<2> {
  static constexpr Codes kStoredAs = kInt8;
  using Words = Words4;
  struct Values {
    Words words;
  };

  template <typename Format>
  static __device__ Words4 operand(Format format, const Values (&values)[kPieces], uint32_t chunk) {
    const auto& word = values[chunk / 2].words.word;
    const uint32_t low = word[chunk % 2], high = word[2 + chunk % 2];
    return {pair_of_int8(format, low, 0), pair_of_int8(format, low, 1), pair_of_int8(format, high, 0),
            pair_of_int8(format, high, 1)};
  }
};

// Two codes of 4 bits in a byte, which is a block, and a scale for every 64 columns, which are two lanes of a piece. A
// product of mma_sp has four of these scales in its sum, so the weights are multiplied by them, and rounded as
// dequantize_nm rounds them. To scale sums instead, a lane would have to read 4 bytes at a time.
struct Bits4 : CodeOrder<4> {
  static constexpr Codes kStoredAs = kInt4;
  using Words = Words2;
  struct Values {
    Words words;
    uint32_t scale;  // in the lower half
  };

  template <typename Format>
  static __device__ Words4 operand(Format format, const Values (&values)[kPieces], uint32_t chunk) {
    const auto& [words, scale] = values[chunk / 2];
    const uint32_t both = __byte_perm(scale, 0, 0x1010);
    Words4 operand;
    PROXSPARSE_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t codes = pair_of_int4(format, words.word[j / 2], chunk % 2 * 2 + j % 2);
      operand.word[j] = multiply_pair(format, codes, both);
    }
    return operand;
  }
};

}  // namespace proxsparse::gpu
