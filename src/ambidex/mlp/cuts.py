"""How the rows of a place's matrices are cut into parts for the tiers: numbers only.

rows    0 ……… on_gpu | … movable, in chunks | ……… on_cpu, in chunks | ……… streamed, in chunks ……… N
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ambidex.core.placement import WeightSplit
from ambidex.kernels.cpu.quantized import BLOCKS, packed_bytes

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
    kind: str | None = None
    """The GGUF type that all matrices of the place keep; None: they are plain numbers."""
    is_neuron_major: bool = False
    """The columns behind neurons lie one after the other, so that those of neurons that are skipped are not read."""

    @property
    def numbers_per_row(self) -> int:
        """Numbers of all matrices that belong to one row."""
        return self.num_in * self.num_ins + self.num_out

    @property
    def num_numbers(self) -> int:
        """Numbers of all matrices."""
        return self.numbers_per_row * self.num_rows

    @property
    def granule(self) -> int:
        """Rows that stay together: GRANULE, and for columns of quantised matrices a whole block of numbers."""
        return max(GRANULE, BLOCKS[self.kind][0]) if self.kind is not None and self.num_out else GRANULE

    def num_bytes(self, num_rows: int, number_bytes: int) -> int:
        """Bytes of some rows in one memory.

        Args:
            number_bytes: of a plain number.
        """
        if self.kind is None:
            return self.numbers_per_row * num_rows * number_bytes
        ins = self.num_ins * packed_bytes(self.kind, (num_rows, self.num_in))
        return ins + (packed_bytes(self.kind, (self.num_out, num_rows)) if self.num_out else 0)

    @property
    def answer_width(self) -> int:
        """Numbers that the place gives for a token."""
        return self.num_out or self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The rows of each tier; those in host memory are chunks, small enough for a slot of the ring.

    `movable` lie in both: their numbers on the GPU may be given up, and those in DRAM serve then.
    """

    on_gpu: range
    movable: tuple[range, ...] = ()
    on_cpu: tuple[range, ...]
    streamed: tuple[range, ...]

    @property
    def chunks(self) -> tuple[range, ...]:
        """All rows that lie in DRAM."""
        return self.movable + self.on_cpu + self.streamed

    @classmethod
    def of(
        cls,
        shape: SiteShape,
        split: WeightSplit,
        *,
        chunk_bytes: int,
        number_bytes: int,
        movable_share: float = 0.0,
    ) -> "Cuts":
        """Divide the rows of a place as a split says, rounded to whole granules, never more on the GPU than it says.

        Args:
            chunk_bytes: of a chunk, at most, but for a single granule.
            number_bytes: of a plain number.
            movable_share: of the rows on the GPU, that may leave it.
        """
        num_rows, granule = shape.num_rows, shape.granule
        on_gpu = num_rows if split.on_gpu == 1.0 else _round_down(split.on_gpu * num_rows, granule)
        rest = num_rows - on_gpu
        on_cpu = rest
        if split.streamed > 0:
            wanted = rest * split.on_cpu / (split.on_cpu + split.streamed)
            on_cpu = min(rest, _round_down(wanted + granule / 2, granule))
        most = max(1, chunk_bytes // shape.num_bytes(granule, number_bytes)) * granule
        kept = on_gpu - _round_down(on_gpu * movable_share, granule)
        return cls(
            on_gpu=range(kept),
            movable=tuple(_chunks(kept, on_gpu, most, granule)),
            on_cpu=tuple(_chunks(on_gpu, on_gpu + on_cpu, most, granule)),
            streamed=tuple(_chunks(on_gpu + on_cpu, num_rows, most, granule)),
        )


def _round_down(rows: float, granule: int) -> int:
    return int(rows + 1e-6) // granule * granule


def _chunks(start: int, stop: int, most: int, granule: int) -> Iterator[range]:
    """Ranges of nearly equal length, at most `most`, all but the last multiples of `granule`."""
    if start == stop:
        return
    num = -(-(stop - start) // most)
    size = -(-(stop - start) // num // granule) * granule
    size = min(most, max(size, granule))
    for first in range(start, stop, size):
        yield range(first, min(first + size, stop))
