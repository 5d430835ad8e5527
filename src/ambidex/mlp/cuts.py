"""How the rows of a place's matrices are cut into parts for the tiers: numbers only.

rows    0 ……… on_gpu | ……… on_cpu, in chunks | ……… streamed, in chunks ……… N
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ambidex.core.placement import WeightSplit

GRANULE: Final = 16
"""Rows that stay together: a multiple keeps columns of `out` aligned to 16 bytes or more, as tensor cores want them,
and is a group of quantised rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteShape:
    """A place of a model whose weights are divided.

    A row is one of the matrices that lie below each other, which are multiplied with the same x; or, in an MLP, a
    neuron, that is a row of each of `num_ins` matrices and a column of the one behind them.
    """

    num_in: int
    """Numbers of x."""
    num_rows: int
    num_ins: int = 1
    num_out: int = 0
    """Rows of the matrix behind neurons; 0: there is none."""

    @property
    def numbers_per_row(self) -> int:
        """Numbers of all matrices that belong to one row."""
        return self.num_in * self.num_ins + self.num_out

    @property
    def num_numbers(self) -> int:
        """Numbers of all matrices."""
        return self.numbers_per_row * self.num_rows

    @property
    def answer_width(self) -> int:
        """Numbers that the place gives for a token."""
        return self.num_out or self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The rows of each tier; those in host memory are chunks, small enough for a slot of the ring."""

    on_gpu: range
    on_cpu: tuple[range, ...]
    streamed: tuple[range, ...]

    @classmethod
    def of(cls, shape: SiteShape, split: WeightSplit, *, chunk_size: int) -> "Cuts":
        """Divide the rows of a place as a split says, rounded to whole granules, never more on the GPU than it says.

        Args:
            chunk_size: numbers of a chunk, at most, but for a single granule.
        """
        num_rows = shape.num_rows
        on_gpu = num_rows if split.on_gpu == 1.0 else _round_down(split.on_gpu * num_rows)
        rest = num_rows - on_gpu
        on_cpu = rest
        if split.streamed > 0:
            on_cpu = min(rest, _round_down(rest * split.on_cpu / (split.on_cpu + split.streamed) + GRANULE / 2))
        most = max(GRANULE, chunk_size // shape.numbers_per_row // GRANULE * GRANULE)
        return cls(
            on_gpu=range(on_gpu),
            on_cpu=tuple(_chunks(on_gpu, on_gpu + on_cpu, most)),
            streamed=tuple(_chunks(on_gpu + on_cpu, num_rows, most)),
        )


def _round_down(rows: float) -> int:
    return int(rows + 1e-6) // GRANULE * GRANULE


def _chunks(start: int, stop: int, most: int) -> Iterator[range]:
    """Ranges of nearly equal length, at most `most`, a multiple of GRANULE."""
    if start == stop:
        return
    num = -(-(stop - start) // most)
    size = -(-(stop - start) // num // GRANULE) * GRANULE
    size = min(most, max(size, GRANULE))
    for first in range(start, stop, size):
        yield range(first, min(first + size, stop))
