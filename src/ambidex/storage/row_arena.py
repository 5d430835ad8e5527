"""`RowArena`: host memory for rows of K and V of all requests, taken once and given from request to request.

    a layer of K, or of V      | a | free | b | c | free |      rows of all heads of a request side by side: [Hkv, n, D]

Layers lie one behind the other, so each lies where the mapping has it (`storage/row_home.py`), whoever has its rows. On
a GPU all of it is pinned from the start; else its pages come into being as rows are written, and stay. A request gets
the smallest hole that is large enough. Where the holes are too small, though together they are not, some requests move
up to make one of several: those that have the fewest rows.
"""

import ctypes
from bisect import insort
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from ambidex.core.errors import InternalError, TierFullError
from ambidex.core.ids import KVPart
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.host_rows import HostRows, RowMemory
from ambidex.storage.row_home import IN_DRAM, RowHome

_ALIGNED_BYTES: Final = 16
"""Kernels on a GPU read rows in pieces of so many."""


class RowArena:
    """Room for so many rows of all layers.

    Args:
        shape: L, Hkv, D.
        num_rows: of all requests together.
        dtype: of the numbers.
        device: who reads them besides the host.
        home: where they lie, and who is asked to pin them.

    Raises:
        TierFullError: there is no such memory, or it cannot be pinned.
    Cost: on a GPU, and of what lies in the CXL tier, touches the memory.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        home: RowHome = IN_DRAM,
    ) -> None:
        num_layers, num_heads, head_dim = shape
        self.home = home
        self.num_rows = num_rows
        self._device = device
        self._head_bytes = head_dim * dtype.itemsize
        layers = (num_layers, num_rows * num_heads * head_dim)
        k, v = home.allocate(KVPart.K, layers, dtype), home.allocate(KVPart.V, layers, dtype)
        k_there, v_there = k, v
        if device.type == "cuda":
            if num_heads * self._head_bytes % _ALIGNED_BYTES:
                raise TierFullError(f"rows of {self._head_bytes} bytes do not begin where a GPU can read them")
            for part in (k, v):
                reason = home.memory.pin(part, self)
                if reason is not None:
                    raise TierFullError(f"rows of requests cannot be pinned: {reason}")
            k_there, v_there = view_on_gpu(k), view_on_gpu(v)
        self._memory = RowMemory(k, v, k_there, v_there, num_rows=num_rows, num_heads=num_heads, head_dim=head_dim)
        self._open: list[HostRows] = []  # in the order in which they lie
        self.num_moved = 0
        """Rows that have moved so far."""

    @property
    def num_taken(self) -> int:
        """Rows that requests have room for."""
        return sum(rows.capacity for rows in self._open)

    def open(self, capacity: int) -> HostRows:
        """Rows of another request; they may hold anything.

        Raises:
            InternalError: there is no room for so many.
        Cost: where all holes are too small, waits for the device and moves rows.
        """
        if self.num_taken + capacity > self.num_rows:
            raise InternalError(f"{capacity} rows are asked for: {self.num_taken} of {self.num_rows} are taken")
        holes = self._holes()
        fitting = [(size, start) for start, size in holes if size >= capacity]
        start = min(fitting)[1] if fitting else self._join_holes(holes, capacity)
        rows = HostRows(self._memory, start, capacity, home=self.home, device=self._device)
        insort(self._open, rows, key=lambda other: other.start)
        return rows

    def close(self, rows: HostRows) -> None:
        """Give back what `open` gave. NOTE: the device may still read them; see `settle`."""
        self._open.remove(rows)

    def settle(self) -> None:
        """Wait for what the device was given: rows that it reads may soon be written by the host, or be another's."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _holes(self) -> list[tuple[int, int]]:
        """Start and size of what lies before each request's rows, and behind the last; may be none."""
        starts = [*(rows.start for rows in self._open), self.num_rows]
        ends = [0, *(rows.start + rows.capacity for rows in self._open)]
        return [(end, start - end) for start, end in zip(starts, ends, strict=True)]

    def _join_holes(self, holes: Sequence[tuple[int, int]], capacity: int) -> int:
        """Make a hole that is large enough and move as few rows as may be; where it begins."""
        best: tuple[int, int, int] | None = None
        for first in range(len(holes)):
            room = num_moved = 0
            for last in range(first, len(holes)):
                room += holes[last][1]
                if room >= capacity:
                    best = min(best or (num_moved, first, last), (num_moved, first, last))
                    break
                num_moved += self._open[last].length if last < len(self._open) else 0
        assert best is not None, "all holes together are large enough"
        _, first, last = best
        self.settle()
        end = holes[first][0]
        for rows in self._open[first:last]:
            self._move_up(rows, end)
            end += rows.capacity
        return end

    def _move_up(self, rows: HostRows, start: int) -> None:
        """Move the rows of a request to a place before theirs, which they may overlap. Nobody reads them meanwhile."""
        length, pitch = rows.length * self._head_bytes, rows.capacity * self._head_bytes
        sources = [layer.data_ptr() for part in (rows.k, rows.v) for layer in part]
        rows.lie_at(start)
        targets = [layer.data_ptr() for part in (rows.k, rows.v) for layer in part]
        num_heads, num_layers = rows.k.shape[1], len(rows.k)

        def move(source: int, target: int) -> None:
            for head in range(num_heads):  # upwards: where they overlap, later heads are still to be read
                ctypes.memmove(target + head * pitch, source + head * pitch, length)

        with (
            self.home.moving(num_layers, num_heads * length),
            ThreadPoolExecutor(torch.get_num_threads()) as threads,
        ):
            list(threads.map(move, sources, targets))
        self.num_moved += rows.length
