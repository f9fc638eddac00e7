"""The storage of weights as words, so that a lane loads 16 bytes and rounds two 16-bit weights at once.

A word is a uint32 with two bfloat16 or float16 weights (the first in its lower half) or one float32, or a uint64 with
one float64. A block of four weights is two or four words. `x0, x1, x2, x3` are the four weights of every block, each a
tensor [BLOCKS] in the dtype of the arithmetic (float64 for float64, float32 otherwise).
"""

import torch
import triton
import triton.language as tl

# Triton's interpreter truncates where the GPU rounds to nearest.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Inline assembly works only on NVIDIA's GPUs. The interpreter and AMD's GPUs use plain Triton.
PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)


@triton.constexpr_function
def is_half(dtype):
    """Whether two numbers share a word."""
    return dtype.primitive_bitwidth == 16


@triton.constexpr_function
def word_of(dtype):
    """The dtype of a word."""
    return tl.uint64 if dtype.primitive_bitwidth == 64 else tl.uint32


@triton.constexpr_function
def arithmetic_of(dtype):
    """The dtype of the arithmetic."""
    return tl.float64 if dtype.primitive_bitwidth == 64 else tl.float32


@triton.constexpr_function
def words_in(blocks, dtype):
    """The number of words in `blocks` blocks of four weights."""
    return 2 * blocks if dtype.primitive_bitwidth == 16 else 4 * blocks


@triton.constexpr_function
def sign_mask(dtype):
    return {16: 0x80008000, 32: 0x80000000, 64: 0x8000000000000000}[dtype.primitive_bitwidth]


@triton.constexpr_function
def magnitude_mask(dtype):
    return (2**64 - 1 if dtype.primitive_bitwidth == 64 else 2**32 - 1) ^ sign_mask(dtype)


@triton.jit
def sign_bits(dtype: tl.constexpr):
    """A word in which only the sign bits are set."""
    return tl.full((), sign_mask(dtype), word_of(dtype))


@triton.jit
def magnitude_bits(dtype: tl.constexpr):
    """A word in which all other bits are set: ~sign_bits(dtype), which the interpreter of Triton 3.6 cannot compute."""
    return tl.full((), magnitude_mask(dtype), word_of(dtype))


@triton.jit
def split4(x, BLOCKS: tl.constexpr):
    """[4 * BLOCKS] -> the four members of every block, [BLOCKS] each."""
    even, odd = tl.split(tl.reshape(x, (BLOCKS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join4(x0, x1, x2, x3, BLOCKS: tl.constexpr):
    """The inverse of `split4`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (4 * BLOCKS,))


@triton.jit
def unpack_halves(word, dtype: tl.constexpr):
    """The two 16-bit numbers of every word, in float32."""
    if dtype == tl.bfloat16:  # the upper half of a float32
        low, high = (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def rounded_bits(x, dtype: tl.constexpr):
    """The 16 bits, in a uint32, of the bfloat16 or float16 nearest to a float32, ties to even. Not for NaN."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        nearest = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return nearest


@triton.jit
def pack_halves(low, high, dtype: tl.constexpr):
    """Two float32 numbers, rounded to nearest, in one word. A NaN stays a NaN; PTX gives it the bits 0x7fff."""
    if not PTX:
        word = rounded_bits(low, dtype) | (rounded_bits(high, dtype) << 16)
    else:
        ASM: tl.constexpr = f"cvt.rn.{'bf16x2' if dtype == tl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"
        word = tl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1)
    return word


@triton.jit
def unpack(words, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """The words of BLOCKS blocks -> (x0, x1, x2, x3)."""
    if is_half(dtype):
        first, second = tl.split(tl.reshape(words, (BLOCKS, 2)))
        x0, x1 = unpack_halves(first, dtype)
        x2, x3 = unpack_halves(second, dtype)
    else:
        x0, x1, x2, x3 = split4(words.to(dtype, bitcast=True), BLOCKS)
    return x0, x1, x2, x3


@triton.jit
def pack(x0, x1, x2, x3, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """The inverse of `unpack`, rounding to nearest (ties to even)."""
    if is_half(dtype):
        first, second = pack_halves(x0, x1, dtype), pack_halves(x2, x3, dtype)
        words = tl.reshape(tl.join(first, second), (2 * BLOCKS,))
    else:
        words = join4(x0, x1, x2, x3, BLOCKS).to(word_of(dtype), bitcast=True)
    return words


@triton.jit
def with_signs_of(old, magnitudes, dtype: tl.constexpr):
    """Packed magnitudes with the signs of the numbers in `old`. A zero is +0.0, except where the old number is -0.0.

    All numbers of a word at once: the sign bit of 0x7fff + magnitude is set unless the magnitude is 0, and that of
    0x8000 - |old| is set only if |old| is 0. Neither sum affects the neighbouring number.
    """
    signs, others = sign_bits(dtype), magnitude_bits(dtype)
    keeps_sign = (magnitudes + others) | (signs - (old & others))
    return magnitudes | (old & keeps_sign & signs)


# ---------------------------------------------------------------------------------------------- single numbers


@triton.jit
def widened(x, arithmetic: tl.constexpr):
    """x in the dtype of the arithmetic, exactly."""
    if x.dtype == tl.bfloat16:  # by bits, because the interpreter flushes small numbers to zero
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(arithmetic)


@triton.jit
def bfloat16_of(bits):
    """The bfloat16 with the given 16 bits (in a uint32); a zero is +0.0."""
    bits = tl.where((bits & 0x7FFF) == 0, 0, bits)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_nearest(x, dtype: tl.constexpr):
    """x in `dtype`, rounded to nearest, ties to even; zeros are +0.0."""
    if dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = rounded_bits(x, dtype) if INTERPRETED else x.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        y = bfloat16_of(tl.where(x == x, bits, 0x7FC0))
    else:
        y = x.to(dtype)
        y = tl.where(y == 0, 0.0, y).to(dtype)
    return y


@triton.jit
def round_stochastically(x, random):
    """x in bfloat16: the upper half of (bits of x in float32) + `random`, 0 <= random < 2^16; zeros are +0.0.

    A NaN is handled separately, because the sum could carry into its sign.
    """
    x = x.to(tl.float32)
    upper = (x.to(tl.uint32, bitcast=True) + random) >> 16
    return bfloat16_of(tl.where(x == x, upper, 0x7FC0))
