"""Rows of quantised numbers as a GGUF file holds them, and what they mean."""

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix

SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of a block at which its fp16 scales begin."""


def random_rows(kind: str, num_rows: int, num_blocks: int, seed: int) -> NDArray[np.uint8]:
    """Rows [N, bytes] of random integers; scales are finite, of either sign, some subnormal."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, num_blocks, BLOCKS[kind][1]), dtype=np.uint8)
    for at in SCALES[kind]:
        blocks[..., at + 1] &= 0xBF  # below 2
    return blocks.reshape(num_rows, -1)


def dequantize(kind: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers as the package gguf has them, [N, K]."""
    with np.errstate(all="ignore"):
        return quants.dequantize(rows, GGMLQuantizationType[kind])


def packed(kind: str, rows: NDArray[np.uint8]) -> QuantizedMatrix:
    num_numbers, num_bytes = BLOCKS[kind]
    matrix = QuantizedMatrix.zeros(kind, (rows.shape[0], rows.shape[1] // num_bytes * num_numbers))
    matrix.pack(0, rows)
    return matrix
