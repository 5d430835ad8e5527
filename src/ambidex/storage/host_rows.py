"""`HostRows`: K and V of one request, row after row in host memory, where single rows are read by whoever needs them.

Pools in tile order serve attention over all keys; a single row lies there in many lines of memory (docs/kv_layout.md).
A policy that reads some rows of a context, or has the CPU score its keys with torch, finds them here instead. On a GPU
the memory is pinned, and kernels gather rows over the link where they lie. `RowArena` gives the memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.kernels.cpu.score_rows import KeyRows
from ambidex.storage.row_home import RowHome


@dataclass(frozen=True, slots=True)
class RowMemory:
    """K and V of all requests, each [L, num_rows · Hkv · D] in host memory; `k_there`, `v_there` the same memory as the
    device sees it."""

    k: Tensor
    v: Tensor
    k_there: Tensor
    v_there: Tensor
    num_rows: int
    num_heads: int
    head_dim: int

    def find(self, part: Tensor, start: int, capacity: int) -> Tensor:
        """The rows of one request in K or V, from row `start` on: [L, Hkv, capacity, D], each layer contiguous."""
        width = self.num_heads * self.head_dim
        found = part[:, start * width : (start + capacity) * width]
        return found.view(len(part), self.num_heads, capacity, self.head_dim)


class HostRows:
    """Rows of all layers.

    Args:
        memory: of all requests.
        start: of its rows, where these begin.
        capacity: rows there is room for.
        home: where they lie.
        device: who reads them besides the host.

    Attributes:
        k, v: [L, Hkv, capacity, D] in host memory, each layer contiguous; `k_there`, `v_there` the same memory as the
            device sees it. NOTE: between two steps rows may move, and these with them.
        keys: K of each layer as the CPU's scores take it.
        length: rows 0 … length − 1 are there, in all layers.
        layer_rows: rows of one head from where a layer begins to where the next one does.
        base: [Hkv, 1] on the device, where each head begins among the rows of a layer side by side.
    """

    def __init__(self, memory: RowMemory, start: int, capacity: int, *, home: RowHome, device: torch.device) -> None:
        self._memory = memory
        self.home = home
        self.capacity = capacity
        self.length = 0
        self.layer_rows = memory.num_rows * memory.num_heads
        self.base = torch.arange(memory.num_heads, device=device)[:, None] * capacity
        self.lie_at(start)

    def lie_at(self, start: int) -> None:
        """Begin elsewhere; who calls it moves what is there."""
        self.start = start
        memory = self._memory
        self.k, self.v, self.k_there, self.v_there = (
            memory.find(part, start, self.capacity) for part in (memory.k, memory.v, memory.k_there, memory.v_there)
        )
        self.keys = [KeyRows(layer) for layer in self.k]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the next row of all layers, [L, Hkv, D] each on the device; the host may read it once the step is over.

        Cost: two launches; waits for nothing.
        """
        assert self.length < self.capacity, "a request has no more tokens than were announced"
        self.k_there[:, :, self.length] = k
        self.v_there[:, :, self.length] = v
        self.length += 1
