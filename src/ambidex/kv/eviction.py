"""`EvictionOrder`: which idle block of a tier goes first. A policy: it picks and does not act.

Least recently used first; of one context the last block first, since blocks behind a missing one cannot be found.
"""

import heapq
from collections.abc import Iterator

from ambidex.kv.lease import CachedBlock

_NUM_STALE = 64
"""Left turns that are kept beside as many as there are blocks, before the order is swept."""


class EvictionOrder:
    """Idle blocks of one tier. A block that leaves and comes again gets a new ticket; old ones are skipped.

    Args:
        tickets: numbers that no other ticket has, of whatever tier.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        self._heap: list[tuple[int, int, int, CachedBlock]] = []
        self._tickets = tickets
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def add(self, block: CachedBlock) -> None:
        """A block may be evicted from now on."""
        block.ticket = next(self._tickets)
        heapq.heappush(self._heap, (block.last_used, -block.block_idx, block.ticket, block))
        self._num_blocks += 1
        if len(self._heap) > 2 * self._num_blocks + _NUM_STALE:
            self._heap = [item for item in self._heap if item[3].ticket == item[2]]
            heapq.heapify(self._heap)

    def remove(self, block: CachedBlock) -> None:
        """A block may not be evicted any more."""
        block.ticket = None
        self._num_blocks -= 1

    def first(self) -> CachedBlock | None:
        """The block to evict next; None if there is none."""
        while self._heap and self._heap[0][3].ticket != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None
