"""Matrices that stay quantised as a GGUF file has them, laid out anew for native products (csrc/ops/quant.h)."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import memory
from ambidex.kernels.cpu.native import check_loaded

with suppress(ImportError):  # `native` says so when the module is used
    from ambidex import _native

BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""GGUF types that have a native product: numbers of a block, and bytes of a block. Source: ggml, ggml-common.h."""

GROUP_ROWS: Final = 16
"""Rows that lie together; the last group is filled up with zeros."""


def packed_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a packed matrix: those of its blocks in the file, for a multiple of `GROUP_ROWS` rows."""
    return math.ceil(shape[0] / GROUP_ROWS) * _group_bytes(kind, shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix [N, K] of quantised numbers, which a layer may have as its weight instead of a tensor.

    It lies in CPU memory; on a GPU, where it may lie, too, there is a product and `pack`, and nothing else.

    Args:
        kind: one of `BLOCKS`.
        shape: (N, K); K is a multiple of the kind's block.
        data: [ceil(N / 16), bytes of 16 rows] uint8.
    """

    kind: str
    shape: tuple[int, int]
    data: Tensor

    @classmethod
    def zeros(cls, kind: str, shape: tuple[int, int]) -> "QuantizedMatrix":
        """A matrix to be filled by `pack`; memory that was not written yet takes none.

        Raises:
            ShapeError: there is no native product of that kind, or rows are no whole blocks.
        """
        if kind not in BLOCKS or shape[1] % BLOCKS[kind][0]:
            raise ShapeError(f"expected whole blocks of {', '.join(BLOCKS)}, got {kind} of shape {shape}")
        num_groups = math.ceil(shape[0] / GROUP_ROWS)
        return cls(kind, shape, torch.zeros((num_groups, _group_bytes(kind, shape[1])), dtype=torch.uint8))

    def pack(self, first_row: int, rows: NDArray[np.uint8]) -> None:
        """Write rows `first_row` …, once each.

        Args:
            rows: [n, bytes of a row] as they lie in the file, contiguous.
        Raises:
            ShapeError: the rows do not fit.
        """
        check_loaded()
        if first_row + rows.shape[0] > self.shape[0]:
            raise ShapeError(f"rows {first_row} to {first_row + rows.shape[0]} do not lie in {self.shape[0]} rows")
        if self.data.device.type != "cpu":
            self._pack_there(first_row, rows)
            return
        try:
            _native.pack_rows(self.data.numpy(), self.kind, rows, first_row)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"pack: {error}") from error

    def _pack_there(self, first_row: int, rows: NDArray[np.uint8]) -> None:
        """Pack rows here, and join them to what lies in GPU memory: their groups may hold other rows already."""
        offset = first_row % GROUP_ROWS
        here = QuantizedMatrix.zeros(self.kind, (offset + rows.shape[0], self.shape[1]))
        here.pack(offset, rows)
        first = first_row // GROUP_ROWS
        self.data[first : first + len(here.data)] |= here.data.to(self.data.device)

    def rows(self, indices: Tensor, *, isa: str | None = None) -> Tensor:
        """Some rows in fp32, the numbers that GGUF defines, bit for bit.

        Args:
            indices: [n] int64 in CPU memory.
            isa: one of `native.available_isas()`, for tests; None for the fastest.
        Returns:
            [n, K] fp32.
        Raises:
            ShapeError: an index is no row.
        Cost: in the calling thread, the GIL released.
        """
        check_loaded()
        values = memory.new_fp32((indices.shape[0], self.shape[1]))
        memory.keep(self)
        try:
            _native.unpack_rows(self.data.numpy(), self.kind, self.shape[0], indices.numpy(), values, isa=isa)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"rows: {error}") from error
        return torch.from_numpy(values)

    def dense(self) -> Tensor:
        """The whole matrix in fp32, as new memory."""
        return self.rows(torch.arange(self.shape[0]))

    def data_ptr(self) -> int:
        """The address of its memory, as tensors have it."""
        return self.data.data_ptr()


Weight = Tensor | QuantizedMatrix
"""What a layer may multiply with."""


def _group_bytes(kind: str, width: int) -> int:
    num_numbers, num_bytes = BLOCKS[kind]
    return GROUP_ROWS * width // num_numbers * num_bytes
