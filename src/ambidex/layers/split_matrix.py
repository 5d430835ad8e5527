"""`SplitMatrix`: a matrix whose numbers lie in pieces, on several tiers; it takes a parameter's place in its layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix, Weight


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a matrix, or some columns, from `start` on.

    Quantised rows lie in groups, so `data` may hold others beside them: the piece's begin at `first` and are `num`.
    """

    start: int
    data: Weight
    """[n, K] for rows, [N, n] for columns."""
    first: int = 0
    num: int | None = None


class SplitMatrix:
    """A matrix [N, K] in pieces that together are the whole.

    It has no product of its own: what divided the weights of a place in the model computes there (`mlp/`).

    Args:
        shape: (N, K).
        pieces: in any order; all plain numbers, or all quantised and of one kind.
        axis: 0: pieces are rows; 1: they are columns.
    Raises:
        ShapeError: the pieces are not the whole.
    """

    def __init__(self, shape: tuple[int, int], pieces: Sequence[Piece], *, axis: int) -> None:
        self.shape = shape
        self.axis = axis
        self.pieces = tuple(sorted(pieces, key=lambda piece: piece.start))
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.data.shape[1 - axis] != shape[1 - axis]:
                raise ShapeError(f"a piece {tuple(piece.data.shape)} at {piece.start} does not continue at {end}")
            end += self._size(piece)
        if end != shape[axis]:
            raise ShapeError(f"the pieces of a matrix {shape} end at {end} along axis {axis}")

    @property
    def kind(self) -> str | None:
        """The GGUF type of the pieces; None: plain numbers."""
        data = self.pieces[0].data
        return data.kind if isinstance(data, QuantizedMatrix) else None

    def cut(self, start: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where rows `start` … of plain numbers belong.

        Args:
            values: [n, K].
        Returns:
            Places of the pieces, and the values that belong there, of the same shape.
        """
        stop = start + values.shape[0]
        for piece in self.pieces:
            data, size = piece.data, self._size(piece)
            assert isinstance(data, Tensor), "quantised rows are packed"
            if self.axis == 1:
                yield data[start:stop], values[:, piece.start : piece.start + size]
                continue
            first, last = max(start, piece.start), min(stop, piece.start + size)
            if first < last:
                yield data[first - piece.start : last - piece.start], values[first - start : last - start]

    def pack(self, start: int, rows: NDArray[np.uint8]) -> None:
        """Write quantised rows `start` …, once each.

        Args:
            rows: [n, bytes of a row] as they lie in the file.
        """
        stop = start + rows.shape[0]
        for piece in self.pieces:
            data, size = piece.data, self._size(piece)
            assert isinstance(data, QuantizedMatrix), "plain numbers are copied"
            if self.axis == 1:
                num_numbers, num_bytes = BLOCKS[data.kind]
                columns = slice(piece.start // num_numbers * num_bytes, (piece.start + size) // num_numbers * num_bytes)
                data.pack(start, np.ascontiguousarray(rows[:, columns]))
                continue
            first, last = max(start, piece.start), min(stop, piece.start + size)
            if first < last:
                data.pack(piece.first + first - piece.start, np.ascontiguousarray(rows[first - start : last - start]))

    def dense(self) -> Tensor:
        """The whole matrix on the CPU, as new memory."""
        parts = []
        for piece in self.pieces:
            values = piece.data.dense() if isinstance(piece.data, QuantizedMatrix) else piece.data.cpu()
            parts.append(values[piece.first : piece.first + self._size(piece)] if self.axis == 0 else values)
        return torch.cat(parts, dim=self.axis)

    def _size(self, piece: Piece) -> int:
        """Rows or columns of a piece."""
        return piece.data.shape[self.axis] if piece.num is None else piece.num
