"""`BlockPool`: which blocks of one tier are free, used, cached or in flight. Identities only; the bytes live in the
data plane.

    free ── try_take ──▶ used ── give_back ──▶ free
                         used ── retire ──▶ cached ── revive ──▶ used
                                            cached ── drop ──▶ free
    free ── try_reserve ──▶ in flight ── commit ──▶ used, or cached
                            in flight ── cancel ──▶ free
                            in flight ── lend ──▶ free, and lent ── reclaim ──▶ free

A block in flight is the target of a move: nobody reads it, nobody may take it. A cached block holds tokens that no
request reads now. A lent block is free, and holds a copy of another one until somebody takes it: it must be reclaimed
for that, which `try_take` and `try_reserve` leave to the caller.
"""

import heapq
from dataclasses import dataclass

from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Blocks of one tier by state; `copies` of the free ones hold copies."""

    total: int
    free: int
    used: int
    in_flight: int
    cached: int = 0
    copies: int = 0


class BlockPool:
    """Blocks 0 … `num_blocks` - 1 of one tier; none is legal."""

    def __init__(self, tier: Tier, num_blocks: int) -> None:
        if num_blocks < 0:
            raise InternalError(f"tier {tier} is given {num_blocks} blocks")
        self._tier = tier
        self._num_blocks = num_blocks
        self._free = [BlockId(block_id) for block_id in range(num_blocks)]  # a heap: the lowest id is taken first
        self._used: set[BlockId] = set()
        self._cached: set[BlockId] = set()
        self._in_flight: set[BlockId] = set()
        self._lent: set[BlockId] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, lent ones when they are reclaimed."""
        return len(self._free) + len(self._lent)

    @property
    def num_lent(self) -> int:
        """Free blocks that hold copies."""
        return len(self._lent)

    @property
    def usage(self) -> PoolUsage:
        """Blocks by state."""
        return PoolUsage(
            total=self._num_blocks,
            free=self.num_free,
            used=len(self._used),
            in_flight=len(self._in_flight),
            cached=len(self._cached),
            copies=len(self._lent),
        )

    def is_used(self, block_id: BlockId) -> bool:
        """Whether the block holds tokens of a request."""
        return block_id in self._used

    def is_cached(self, block_id: BlockId) -> bool:
        """Whether the block holds tokens that no request reads now."""
        return block_id in self._cached

    def is_in_flight(self, block_id: BlockId) -> bool:
        """Whether the block is the target of a move."""
        return block_id in self._in_flight

    def try_take(self) -> BlockId | None:
        """A free block that is not lent, now used; None if there is none."""
        return self._take_into(self._used)

    def try_reserve(self) -> BlockId | None:
        """A free block that is not lent, now in flight; None if there is none."""
        return self._take_into(self._in_flight)

    def give_back(self, block_id: BlockId) -> None:
        """A used block becomes free."""
        self._leave(self._used, block_id, "used")
        heapq.heappush(self._free, block_id)

    def retire(self, block_id: BlockId) -> None:
        """A used block becomes cached."""
        self._leave(self._used, block_id, "used")
        self._cached.add(block_id)

    def revive(self, block_id: BlockId) -> None:
        """A cached block becomes used."""
        self._leave(self._cached, block_id, "cached")
        self._used.add(block_id)

    def drop(self, block_id: BlockId) -> None:
        """A cached block becomes free."""
        self._leave(self._cached, block_id, "cached")
        heapq.heappush(self._free, block_id)

    def commit(self, block_id: BlockId, *, as_cached: bool = False) -> None:
        """A block in flight becomes used, or cached."""
        self._leave(self._in_flight, block_id, "in flight")
        (self._cached if as_cached else self._used).add(block_id)

    def cancel(self, block_id: BlockId) -> None:
        """A block in flight becomes free."""
        self._leave(self._in_flight, block_id, "in flight")
        heapq.heappush(self._free, block_id)

    def lend(self, block_id: BlockId) -> None:
        """A block in flight becomes free, and holds a copy."""
        self._leave(self._in_flight, block_id, "in flight")
        self._lent.add(block_id)

    def reclaim(self, block_id: BlockId) -> None:
        """A lent block holds nothing any more."""
        self._leave(self._lent, block_id, "lent")
        heapq.heappush(self._free, block_id)

    def check(self) -> None:
        """Every block is in exactly one state.

        Raises:
            InternalError: a block is lost or is in two states.
        """
        blocks = sorted([*self._free, *self._lent, *self._used, *self._cached, *self._in_flight])
        if blocks != list(range(self._num_blocks)):
            raise InternalError(
                f"tier {self._tier} has {self._num_blocks} blocks, but {self.usage} hold {len(set(blocks))} of them"
            )

    def _take_into(self, state: set[BlockId]) -> BlockId | None:
        if not self._free:
            return None
        block_id = heapq.heappop(self._free)
        state.add(block_id)
        return block_id

    def _leave(self, state: set[BlockId], block_id: BlockId, name: str) -> None:
        if block_id not in state:
            raise InternalError(f"block {block_id} of tier {self._tier} is not {name}")
        state.remove(block_id)
