"""Gumbel noise that is a hash of a seed, a query's position, its head and the key: the same on every device."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_MASK: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Noise:
    """What scores s are turned to before a softmax: (s + ζ) / tau, ζ being `gumbel_noise` of the seed."""

    seed: int
    tau: float


def seed_words(seed: int) -> tuple[int, int]:
    """Two 32-bit words of a seed."""
    scattered = seed * 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: seeds that are near do not stay so
    return scattered & _MASK, scattered >> 32 & _MASK


def gumbel_noise(layer_seed: int, positions: Tensor, num_heads: int, num_keys: int) -> Tensor:
    """Gumbel(0, 1) noise of queries for each head and key: [Hq, n, num_keys] fp32 on the device of `positions`.

    Args:
        layer_seed: any number; noise of different ones has nothing in common.
        positions: [n] int64, of the queries.
    """
    return uniform_noise(layer_seed, positions, num_heads, num_keys).log_().neg_().log_().neg_()


def uniform_noise(layer_seed: int, positions: Tensor, num_heads: int, num_keys: int) -> Tensor:
    """What `gumbel_noise` is −log(−log(u)) of: above 0 and below 1, and exact."""
    device = positions.device
    low, high = seed_words(layer_seed)
    heads = torch.arange(num_heads, device=device)[:, None]
    # Two words for each head and query, made in different ways: rows that share one do not share their noise.
    first = hash_(hash_(positions ^ low) ^ heads)[:, :, None]
    second = hash_(hash_(heads ^ high) ^ positions)[:, :, None]
    bits = hash_(hash_(torch.arange(num_keys, device=device) ^ first) ^ second)  # [Hq, n, S]
    return (bits >> 9).float().add_(0.5).mul_(2.0**-23)


def hash_(words: Tensor) -> Tensor:
    """A one-to-one map of 32-bit words, in int64, whose bits depend on all bits of the word; in place.

    No product is above 2^63: the result is the same on every device.
    Source: github.com/skeeto/hash-prospector, the constants (16, 21f0aaad, 15, 735a2d97, 15).
    """
    words ^= words >> 16
    words *= 0x21F0AAAD
    words &= _MASK
    words ^= words >> 15
    words *= 0x735A2D97
    words &= _MASK
    words ^= words >> 15
    return words
