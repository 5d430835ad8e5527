"""Rows of 4-bit integers in groups of 16 dims that have a step and a zero each, all in the scale of an int8 row.

    whole, scale = the row in int8                                     quantize.py
    step = max(1, ⌈(max − min) / 15⌉)     over the whole numbers of a group
    zero = min(min, 127 − 15 · step)      so that no number is above 127
    number = ⌊(2 · (whole − zero) + step) / (2 · step)⌋                0 … 15
    row ≈ scale · (zero + step · number), error at most scale · (step + 1) / 2

so an int4 row is an int8 row in fewer bytes, and whatever attends over int8 attends over what it is unpacked to. A byte
holds the numbers of two dims, 16 apart: byte 16 i + j those of dims 32 i + j (its low half) and 32 i + 16 + j. Beside
a row stand words of 4 bytes: the scale, then for each two groups step, zero, step, zero, a byte each.

Source: round-to-nearest in groups with a zero, FlexGen (arXiv:2303.06865), section 4.
"""

from typing import Final

import torch
from torch import Tensor

from ambidex.kernels.reference.quantize import quantize_rows

GROUP: Final = 16
_PAIR: Final = 2 * GROUP
_MOST: Final = 15
_LARGEST: Final = 127


def num_words(row_numbers: int) -> int:
    """Words beside a padded row of so many numbers."""
    return 1 + row_numbers // _PAIR


def pack_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] in a floating format → bytes and words.

    Returns:
        [..., R / 2] uint8 and [..., W] fp32, R = D padded with zeros to a multiple of 32, W = 1 + R / 32. All words but
        the first are bytes, whatever number they would be.
    """
    whole, scales = quantize_rows(rows)
    padding = -whole.shape[-1] % _PAIR
    padded = torch.nn.functional.pad(whole.int(), (0, padding))
    groups = padded.reshape(*scales.shape, padded.shape[-1] // GROUP, GROUP)  # [..., G, 16]
    least, most = groups.amin(-1), groups.amax(-1)
    steps = ((most - least + _MOST - 1) // _MOST).clamp_min(1)  # [..., G]
    zeros = torch.minimum(least, _LARGEST - _MOST * steps)
    numbers = (2 * (groups - zeros[..., None]) + steps[..., None]) // (2 * steps[..., None])
    num_pairs = padded.shape[-1] // _PAIR
    pairs = numbers.reshape(*scales.shape, num_pairs, 2, GROUP)  # [..., G / 2, 2, 16]
    packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2).to(torch.uint8)
    grids = torch.stack((steps, zeros & 255), -1).to(torch.uint8).reshape(*scales.shape, num_pairs, 4)
    words = torch.empty((*scales.shape, 1 + num_pairs), dtype=torch.float32, device=rows.device)
    words[..., 0] = scales
    words.view(torch.int32)[..., 1:] = grids.contiguous().view(torch.int32)[..., 0]
    return packed, words


def unpack_whole(packed: Tensor, words: Tensor) -> Tensor:
    """Bytes [..., R / 2] uint8 and words [..., W] fp32 → the int8 row [..., R], whose scale is the first word."""
    *outer, num_bytes = packed.shape
    grids = words[..., 1:].contiguous().view(torch.uint8).reshape(*outer, num_bytes // GROUP, 2, 2).int()
    steps, zeros = grids[..., 0], grids[..., 1]
    zeros = zeros - 256 * (zeros > _LARGEST)
    halves = packed.int().reshape(*outer, num_bytes // GROUP, 1, GROUP)
    numbers = torch.cat((halves & 15, halves >> 4), -2)  # [..., G / 2, 2, 16]
    return (zeros[..., None] + steps[..., None] * numbers).flatten(-3).to(torch.int8)


def unpack_rows(packed: Tensor, words: Tensor, head_dim: int) -> Tensor:
    """The same as rows [..., D] fp32."""
    rows: Tensor = unpack_whole(packed, words)[..., :head_dim] * words[..., :1]
    return rows
