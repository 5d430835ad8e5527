"""`SplitMatrix`: a matrix whose numbers lie in pieces, on several tiers; it takes a parameter's place in its layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a matrix, or some columns, from `start` on."""

    start: int
    data: Tensor
    """[n, K] for rows, [N, n] for columns."""


class SplitMatrix:
    """A matrix [N, K] in pieces that together are the whole.

    It has no product of its own: what divided the weights of a place in the model computes there (`mlp/`).

    Args:
        shape: (N, K).
        pieces: in any order.
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
            end += piece.data.shape[axis]
        if end != shape[axis]:
            raise ShapeError(f"the pieces of a matrix {shape} end at {end} along axis {axis}")

    @property
    def dtype(self) -> torch.dtype:
        """Of all pieces."""
        return self.pieces[0].data.dtype

    def cut(self, start: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where rows `start` … belong.

        Args:
            values: [n, K].
        Returns:
            Places of the pieces, and the values that belong there, of the same shape.
        """
        stop = start + values.shape[0]
        for piece in self.pieces:
            size = piece.data.shape[self.axis]
            if self.axis == 1:
                yield piece.data[start:stop], values[:, piece.start : piece.start + size]
                continue
            first, last = max(start, piece.start), min(stop, piece.start + size)
            if first < last:
                yield piece.data[first - piece.start : last - piece.start], values[first - start : last - start]

    def dense(self) -> Tensor:
        """The whole matrix on the CPU, as new memory."""
        return torch.cat([piece.data.cpu() for piece in self.pieces], dim=self.axis)
