"""`Screen`: an 8-bit copy of the matrix in front of a ReLU, which proves most rows inactive without reading them.

    w = ŵ + e                     ŵ: Q8_0, 34 bytes for 32 numbers; ‖e‖ of each row is known
    x · w + b  ≤  x̃ · ŵ + b  +  ‖x‖ · (‖e‖ + (d + r) · ‖ŵ‖)         x̃: x as the native product rounds it

A row whose right side is not above 0 gives 0 behind the ReLU, whatever the rounding of its exact product: it is left
out. Rows that may be active are multiplied exactly. So the answer is that of all rows, bit for bit in those rows; the
copy reads half of the bytes and the candidates the rest.

    d   what rounding x does: |x̃ − x| ≤ 2^-16 · the largest of 32 numbers, so ‖x̃ − x‖ ≤ √32 · 2^-16 · ‖x‖
    r   what summing in fp32 does to both products, in whatever order: K · 2^-24 each
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix, packed_bytes
from ambidex.kernels.linear import LinearContext, LinearOp

KIND: Final = "Q8_0"
_BLOCK: Final = BLOCKS[KIND][0]
_MOST: Final = 127
_NORM_SLACK: Final = 1.0 + 2.0**-12
"""Norms are sums in fp32 too: of at most 2^16 numbers, each sum within that factor."""
_CHUNK_ROWS: Final = 128
"""Copied at a time: a few megabytes in fp32, which caches hold and all threads have a part of."""


class Screen:
    """The copy of some rows, chunk by chunk.

    Args:
        weights: [n, K] of each chunk, plain numbers in CPU memory.
        linear: what the products share.
    """

    def __init__(self, weights: Sequence[Tensor], linear: LinearContext) -> None:
        self._width = weights[0].shape[1]
        self.matrices = [QuantizedMatrix.zeros(KIND, (len(rows), self._width)) for rows in weights]
        self.margins = torch.empty(sum(map(len, weights)))  # [Σ n], times ‖x‖
        self._starts = [0]
        for rows in weights:
            self._starts.append(self._starts[-1] + len(rows))
        self._linear = linear
        for matrix, rows, start in zip(self.matrices, weights, self._starts, strict=False):
            for first in range(0, len(rows), _CHUNK_ROWS):
                records, margins = self._copy(rows[first : first + _CHUNK_ROWS])
                matrix.pack(first, records)
                self.margins[start + first : start + first + len(records)] = margins

    @staticmethod
    def refusal(width: int) -> str | None:
        """Why rows of a width have no copy; None: they have."""
        return f"rows of {width} numbers are no whole blocks of {_BLOCK}" if width % _BLOCK else None

    def head(self, num_chunks: int) -> "ScreenPart":
        """The first chunks."""
        return ScreenPart(self, num_chunks)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Other rows have come to some slots [k]: rows [k, K]."""
        records, margins = self._copy(rows)
        self.margins[slots] = margins
        chunks = torch.searchsorted(torch.tensor(self._starts), slots, right=True) - 1
        for chunk, slot, record in zip(chunks.tolist(), slots.tolist(), records, strict=True):
            self.matrices[chunk].pack(slot - self._starts[chunk], record[None])

    def num_rows(self, num_chunks: int) -> int:
        """Rows of the first chunks."""
        return self._starts[num_chunks]

    @staticmethod
    def num_bytes(num_rows: int, width: int) -> int:
        """Of the copy of a chunk, with its margins."""
        return packed_bytes(KIND, (num_rows, width)) + 4 * num_rows

    def _copy(self, rows: Tensor) -> tuple[NDArray[np.uint8], Tensor]:
        """Rows [k, K] as GGUF has them, [k, bytes], and their margins [k]."""
        values = rows.float()
        blocks = values.view(len(rows), -1, _BLOCK)
        scales = (blocks.abs().amax(-1) / _MOST).half()
        steps = scales.float()[..., None]
        numbers = (blocks * torch.where(steps > 0, 1.0 / steps, 0.0)).round_().clamp_(-_MOST, _MOST)
        record = torch.cat([scales[..., None].view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)], dim=-1)
        copy = numbers.mul_(steps).view_as(values)
        size = torch.linalg.vector_norm(copy, dim=1)
        lost = torch.linalg.vector_norm(copy.sub_(values), dim=1)
        rounding = math.sqrt(_BLOCK) * 2.0**-16 + 2 * self._width * 2.0**-24
        return record.view(len(rows), -1).numpy(), (lost + rounding * size) * _NORM_SLACK**2


class ScreenPart:
    """The first chunks of a screen, with an op of their own."""

    def __init__(self, screen: Screen, num_chunks: int) -> None:
        self._matrices = screen.matrices[:num_chunks]
        self._margins = screen.margins[: screen.num_rows(num_chunks)]
        self._multiply = LinearOp(screen._linear)

    def candidates(self, x: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
        """Rows that may be above 0 for some token.

        Args:
            x: [T, K] fp32; biases: of each chunk.
        Returns:
            [k] int64, ascending.
        """
        products = self._multiply(x, self._matrices, biases)
        above = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        # A bias is added last, and rounds once more: by 2^-24 of the sum, below 2^-22 of what stands here.
        slack = above.abs().mul_(2.0**-22)
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        above = above.add_(slack).addcmul_(norms * _NORM_SLACK, self._margins.expand_as(above))
        return (~(above <= 0)).any(0).nonzero()[:, 0]  # what is no number is not ruled out
