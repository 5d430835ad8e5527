"""The hash of `kernels/noise.py` in 32-bit words, whose products wrap as those do that are cut to 32 bits."""

import triton
import triton.language as tl


@triton.jit
def _hash(words):
    """See `kernels.noise.hash_`."""
    words ^= words >> 16
    words *= 0x21F0AAAD
    words ^= words >> 15
    words *= 0x735A2D97
    words ^= words >> 15
    return words


@triton.jit
def noise_words(positions, heads, noise_low, noise_high):
    """Two words of queries and heads, uint32 of the shape that both have together."""
    positions, heads = positions.to(tl.uint32), heads.to(tl.uint32)
    first = _hash(_hash(positions ^ noise_low.to(tl.uint32)) ^ heads)
    second = _hash(_hash(heads ^ noise_high.to(tl.uint32)) ^ positions)
    return first, second


@triton.jit
def noise_uniform(keys, first, second):
    """Numbers above 0 and below 1, of keys and words of one shape; −log(−log(u)) is `kernels.noise.gumbel_noise`."""
    bits = _hash(_hash(keys.to(tl.uint32) ^ first) ^ second)
    # 1 + m · 2^-23 less 1 − 2^-24 is (m + 1/2) · 2^-23, and exact: no integer is converted.
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
