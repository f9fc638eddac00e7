// The number formats (../formats.h) with the conversion instructions of a GPU. load is exact; store rounds to nearest,
// ties to even. Two neighbours of 16 bits are converted at once, as a word with the first in its lower half.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../formats.h"
#include "launch.h"
#include "warp.h"

namespace proxsparse::gpu {

struct FloatPair {
  float low, high;
};

#ifdef __CUDA_ARCH__
#define PROXSPARSE_PAIR_TO_WORD(instruction, pair, word) \
  asm(instruction " %0, %1, %2;" : "=r"(word) : "f"((pair).high), "f"((pair).low))
#endif

struct BFloat16 : proxsparse::BFloat16 {
  static __device__ uint16_t store(float value) { return static_cast<uint16_t>(store_pair({value, 0})); }
  static __device__ FloatPair load_pair(uint32_t word) {
    return {std::bit_cast<float>(word << 16), std::bit_cast<float>(word & 0xffff0000u)};
  }
  static __device__ uint32_t store_pair(FloatPair pair) {
    uint32_t word;
#ifdef __CUDA_ARCH__
    PROXSPARSE_PAIR_TO_WORD("cvt.rn.bf16x2.f32", pair, word);
#else
    word = round(std::bit_cast<uint32_t>(pair.low)) >> 16 | (round(std::bit_cast<uint32_t>(pair.high)) & 0xffff0000u);
#endif
    return word;
  }
};

struct Float16 : proxsparse::Float16 {
#ifdef __CUDA_ARCH__
  static __device__ float load(uint16_t stored) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
  }
#endif
  static __device__ uint16_t store(float value) { return static_cast<uint16_t>(store_pair({value, 0})); }
  static __device__ FloatPair load_pair(uint32_t word) {
    return {load(static_cast<uint16_t>(word)), load(static_cast<uint16_t>(word >> 16))};
  }
  static __device__ uint32_t store_pair(FloatPair pair) {
    uint32_t word;
#ifdef __CUDA_ARCH__
    PROXSPARSE_PAIR_TO_WORD("cvt.rn.f16x2.f32", pair, word);
#else
    const uint32_t high = std::bit_cast<uint16_t>(static_cast<_Float16>(pair.high));
    word = high << 16 | std::bit_cast<uint16_t>(static_cast<_Float16>(pair.low));
#endif
    return word;
  }
};

// ------------------------------------------------------------------------- the numbers of a lane

template <typename T, int kCount>
__device__ inline void unpack(Native<T>, const Piece<T, kCount>& piece, T (&value)[kCount]) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; ++i) value[i] = piece.words.word[i];
}

template <typename Format, int kCount, typename T>
__device__ inline void unpack(Format, const Piece<uint16_t, kCount>& piece, T (&value)[kCount]) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    const FloatPair pair = Format::load_pair(piece.words.word[i / 2]);
    value[i] = pair.low, value[i + 1] = pair.high;
  }
}

// A word whose sign bits are set where the number is not zero: 0x7fff + 15 bits carries into bit 15 unless all are 0.
__device__ inline uint32_t signs_of_not_zero(uint32_t pair) { return (pair & 0x7fff7fffu) + 0x7fff7fffu; }

// Rounds to nearest; zeros are +0.
template <typename T, int kCount>
__device__ inline void pack(Native<T>, const T (&value)[kCount], Piece<T, kCount>& piece) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; ++i) piece.words.word[i] = value[i] + T(0);
}

template <typename Format, int kCount, typename T>
__device__ inline void pack(Format, const T (&value)[kCount], Piece<uint16_t, kCount>& piece) {
  PROXSPARSE_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t pair = Format::store_pair({static_cast<float>(value[i]), static_cast<float>(value[i + 1])});
    piece.words.word[i / 2] = pair & (signs_of_not_zero(pair) | 0x7fff7fffu);
  }
}

// ------------------------------------------------------------------------- the four weights of a block

template <typename T>
__device__ inline Block<T> magnitudes(Native<T>, const T* block) {
  return {std::abs(block[0]), std::abs(block[1]), std::abs(block[2]), std::abs(block[3])};
}

template <typename Format>
__device__ inline Block<float> magnitudes(Format, const uint32_t* block) {
  const FloatPair first = Format::load_pair(block[0] & 0x7fff7fff);
  const FloatPair second = Format::load_pair(block[1] & 0x7fff7fff);
  return {first.low, first.high, second.low, second.high};
}

// Gives each weight the `magnitude`, which is at most |weight|; the sign remains. A weight that does not change keeps
// its bits, and a weight that becomes zero is +0.
template <typename T>
__device__ inline void shrink(T& weight, T magnitude) {
  if (magnitude < std::abs(weight)) weight = std::copysign(magnitude, weight) + T(0);
}

template <typename T>
__device__ inline void shrink(Native<T>, T* block, Block<T> magnitude) {
  shrink(block[0], magnitude.w1);
  shrink(block[1], magnitude.w2);
  shrink(block[2], magnitude.w3);
  shrink(block[3], magnitude.w4);
}

// The same for a pair of weights; where nothing changes, the rounded magnitude is that of the weight.
__device__ inline void shrink_pair(uint32_t& pair, uint32_t magnitudes) {
  const uint32_t keeps_sign = signs_of_not_zero(magnitudes) | ~signs_of_not_zero(pair);
  pair = magnitudes | (pair & keeps_sign & 0x80008000u);
}

template <typename Format>
__device__ inline void shrink(Format, uint32_t* block, Block<float> magnitude) {
  shrink_pair(block[0], Format::store_pair({magnitude.w1, magnitude.w2}));
  shrink_pair(block[1], Format::store_pair({magnitude.w3, magnitude.w4}));
}

// launch(format), for the format of a dtype.
template <typename Launch>
cudaError_t with_format(Dtype dtype, Launch launch) {
  switch (dtype) {
    case kFloat32:
      return launch(Float32());
    case kFloat64:
      return launch(Float64());
    case kBFloat16:
      return launch(BFloat16());
    case kFloat16:
      return launch(Float16());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace proxsparse::gpu
