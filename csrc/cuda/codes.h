// Codes of 8 and 4 bits (proxsparse/reference/quantize.py) as pairs of 16-bit numbers, exactly and without a conversion
// instruction, whose rate is a quarter of that of the others: the bits of a code become the last bits of a number whose
// last bit is worth 1, and the value of the other bits is subtracted.
#pragma once

#include <cmath>
#include <cstdint>

#include "number.h"

namespace proxsparse::gpu {

// a * b + c for each of the two numbers of a word, rounded once. Where no GPU computes it, a * b must be exact in fp32.
template <typename Format>
__device__ inline uint32_t multiply_add_pair(Format, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t word;
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<Format, BFloat16>)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
#else
  const FloatPair x = Format::load_pair(a), y = Format::load_pair(b), z = Format::load_pair(c);
  word = Format::store_pair({std::fma(x.low, y.low, z.low), std::fma(x.high, y.high, z.high)});
#endif
  return word;
}

// The sum of two pairs.
template <typename Format>
__device__ inline uint32_t add_pair(Format format, uint32_t a, uint32_t b) {
  constexpr uint32_t kOne = std::is_same_v<Format, BFloat16> ? 0x3f803f80u : 0x3c003c00u;
  return multiply_add_pair(format, a, kOne, b);
}

// The product of two pairs.
template <typename Format>
__device__ inline uint32_t multiply_pair(Format format, uint32_t a, uint32_t b) {
  return multiply_add_pair(format, a, b, 0x80008000u);  // -0, so that a product of -0 keeps its sign
}

// (bits & mask) ^ flipped. The compiler would use two instructions, with a constant in each.
__device__ inline uint32_t and_xor(uint32_t bits, uint32_t mask, uint32_t flipped) {
#ifdef __CUDA_ARCH__
  uint32_t word;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(word) : "r"(bits), "r"(mask), "r"(flipped));
  return word;
#else
  return (bits & mask) ^ flipped;
#endif
}

// Bytes 2 `pair` and 2 `pair` + 1, int8, as two numbers.
__device__ inline uint32_t pair_of_int8(BFloat16 format, uint32_t bytes, uint32_t pair) {
  // With 128 in the upper byte: 128 + the lower seven bits, minus 128 where the sign bit is 0, and minus 256 where it
  // is 1, because the sign bit of the code is the last bit of the exponent.
  const uint32_t word = __byte_perm(bytes, 0x43434343u, pair ? 0x4342 : 0x4140);
  constexpr uint32_t kMinusOne = 0xbf80bf80u;
  return multiply_add_pair(format, word & 0xff80ff80u, kMinusOne, word & 0xff7fff7fu);
}
__device__ inline uint32_t pair_of_int8(Float16 format, uint32_t bytes, uint32_t pair) {
  const uint32_t word = __byte_perm(bytes ^ 0x80808080u, 0x64646464u, pair ? 0x4342 : 0x4140);  // 1024 + 128 + code
  return add_pair(format, word, 0xe480e480u);                                                   // -1152
}

// The two codes of byte `byte`, 4 bits each, in two's complement, as two numbers.
template <typename Format>
__device__ inline uint32_t pair_of_int4(Format format, uint32_t bytes, uint32_t byte) {
  // 128 in bfloat16, 1024 in float16, plus 8, which the code changes to 8 + code
  constexpr uint32_t kZero = std::is_same_v<Format, BFloat16> ? 0x43084308u : 0x64086408u;
  const uint32_t codes = __byte_perm(bytes, bytes >> 4, byte | (4 + byte) << 8);
  return add_pair(format, and_xor(codes, 0x000f000fu, kZero), kZero | 0x80008000u);
}

}  // namespace proxsparse::gpu
