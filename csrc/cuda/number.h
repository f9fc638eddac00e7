// The number formats of a tensor: how each is stored, and the arithmetic it gets. load is exact; store rounds to
// nearest, ties to even. Two neighbours of 16 bits are converted at once: as a word, the first in its lower half.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../prox24_block.h"
#include "launch.h"
#include "warp.h"

namespace proxsparse::gpu {

template <typename T>
struct Native {  // float32 and float64 are computed in as they are
  using Storage = T;
  using Arithmetic = T;
  static __device__ T load(T stored) { return stored; }
  static __device__ T store(T value) { return value; }
};
using Float32 = Native<float>;
using Float64 = Native<double>;

struct Pair {
  float low, high;
};

#ifdef __CUDA_ARCH__
#define PROXSPARSE_PAIR_TO_WORD(instruction, pair, word) \
  asm(instruction " %0, %1, %2;" : "=r"(word) : "f"((pair).high), "f"((pair).low))
#endif

struct BFloat16 {  // the upper half of a float32
  using Storage = uint16_t;
  using Arithmetic = float;
  static __device__ float load(uint16_t stored) { return std::bit_cast<float>(uint32_t{stored} << 16); }
  static __device__ uint16_t store(float value) { return static_cast<uint16_t>(store_pair({value, 0})); }
  static __device__ Pair load_pair(uint32_t word) {
    return {std::bit_cast<float>(word << 16), std::bit_cast<float>(word & 0xffff0000u)};
  }
  static __device__ uint32_t store_pair(Pair pair) {
    uint32_t word;
#ifdef __CUDA_ARCH__
    PROXSPARSE_PAIR_TO_WORD("cvt.rn.bf16x2.f32", pair, word);
#else
    const uint32_t low = std::bit_cast<uint32_t>(pair.low), high = std::bit_cast<uint32_t>(pair.high);
    word = (low + 0x7fff + (low >> 16 & 1)) >> 16 | ((high + 0x7fff + (high >> 16 & 1)) & 0xffff0000u);
#endif
    return word;
  }
};

struct Float16 {  // IEEE half precision; beyond its largest number follows infinity
  using Storage = uint16_t;
  using Arithmetic = float;
  static __device__ float load(uint16_t stored) {
    float value;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
#else
    value = std::bit_cast<_Float16>(stored);
#endif
    return value;
  }
  static __device__ uint16_t store(float value) { return static_cast<uint16_t>(store_pair({value, 0})); }
  static __device__ Pair load_pair(uint32_t word) {
    return {load(static_cast<uint16_t>(word)), load(static_cast<uint16_t>(word >> 16))};
  }
  static __device__ uint32_t store_pair(Pair pair) {
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
    const Pair pair = Format::load_pair(piece.words.word[i / 2]);
    value[i] = pair.low, value[i + 1] = pair.high;
  }
}

// Added to 15 bits, 0x7fff carries into the place of the sign just where they are not all zero.
__device__ inline uint32_t signs_of_not_zero(uint32_t pair) { return (pair & 0x7fff7fffu) + 0x7fff7fffu; }

// Rounded to nearest; zeros are +0.
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
  const Pair first = Format::load_pair(block[0] & 0x7fff7fff);
  const Pair second = Format::load_pair(block[1] & 0x7fff7fff);
  return {first.low, first.high, second.low, second.high};
}

// Each weight becomes `magnitude`, which is at most |weight|, with the sign it had; where nothing changes it keeps its
// bits, and what becomes zero is +0.
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

// The same for a pair, whose rounded magnitudes are its own where nothing changes.
__device__ inline void shrink_pair(uint32_t& pair, uint32_t magnitudes) {
  const uint32_t keeps_sign = signs_of_not_zero(magnitudes) | ~signs_of_not_zero(pair);
  pair = magnitudes | (pair & keeps_sign & 0x80008000u);
}

template <typename Format>
__device__ inline void shrink(Format, uint32_t* block, Block<float> magnitude) {
  shrink_pair(block[0], Format::store_pair({magnitude.w1, magnitude.w2}));
  shrink_pair(block[1], Format::store_pair({magnitude.w3, magnitude.w4}));
}

// launch(format), for the format of a type.
template <typename Launch>
cudaError_t with_format(Type type, Launch launch) {
  switch (type) {
    case Type::kFloat32:
      return launch(Float32());
    case Type::kFloat64:
      return launch(Float64());
    case Type::kBFloat16:
      return launch(BFloat16());
    case Type::kFloat16:
      return launch(Float16());
  }
  return cudaErrorInvalidValue;
}

}  // namespace proxsparse::gpu
