"""`PrefixCache`: full blocks that stay where they are when nobody reads them any more, until their place is needed.

    enter ──▶ held by 1 … n leases ◀── hold / leave ──▶ idle ── evict ──▶ free

Idle blocks are room for whoever needs it: a running request never waits for one. Every tier has its own order of
eviction. A block whose tokens are not those that were asked for is not used, whatever its name says.
"""

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ambidex.core.errors import InternalError
from ambidex.core.ids import Tier
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.block_keys import BlockKey, BlockKeys, root_key
from ambidex.kv.eviction import EvictionOrder
from ambidex.kv.lease import CachedBlock, KVLease
from ambidex.kv.tiers import TieredBlocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheLimits:
    """What a prefix cache may keep.

    `max_idle_percent` of the blocks of all tiers may be idle in it; 0: there is no cache. `identity` names all that K
    and V depend on beside the tokens: the model and the formats. `is_saved`: blocks that become idle wait to be copied
    elsewhere.
    """

    max_idle_percent: int = 0
    identity: str = ""
    is_saved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """Counts since the start, and the blocks that are idle on each tier now."""

    num_evicted_blocks: int
    num_mismatches: int
    num_listed_blocks: int
    num_idle_blocks: dict[Tier, int]


class PrefixCache:
    """Names of full blocks, who holds them, and which of the idle ones goes first.

    Args:
        max_idle: blocks of all tiers that may be idle at the same time.
    """

    def __init__(self, tiers: TieredBlocks, limits: PrefixCacheLimits, *, block_size: int, max_idle: int) -> None:
        self._tiers = tiers
        self._identity = limits.identity
        self._block_size = block_size
        self._max_idle = max_idle
        self._listed: dict[bytes, CachedBlock] = {}
        tickets = itertools.count()
        self._orders = {tier: EvictionOrder(tickets) for tier in tiers.tiers}
        self._idle: set[CachedBlock] = set()
        self._unsaved: deque[CachedBlock] | None = deque(maxlen=max_idle) if limits.is_saved else None
        self._releases = itertools.count(1)
        self._num_doubles = 0
        self._num_evicted = 0
        self._num_mismatches = 0

    @property
    def is_on(self) -> bool:
        """Blocks are kept."""
        return self._max_idle > 0

    @property
    def num_evictable(self) -> int:
        """Idle blocks of all tiers that could be evicted now."""
        return sum(map(len, self._orders.values()))

    @property
    def num_doubles(self) -> int:
        """Places on the accelerator tier that leases count more than once, because they share a block there."""
        return self._num_doubles

    def num_evictable_on(self, tier: Tier) -> int:
        """Idle blocks of one tier that could be evicted now."""
        return len(self._orders[tier]) if tier in self._orders else 0

    @property
    def has_unsaved(self) -> bool:
        """Blocks may wait to be copied elsewhere."""
        return bool(self._unsaved)

    def next_unsaved(self) -> CachedBlock | None:
        """The block that has waited longest to be copied elsewhere, and waits no more; None if there is none.

        Nobody writes to it, and it stays where it is until the next step.
        """
        while self._unsaved:
            block = self._unsaved.popleft()
            if block.is_listed:
                return block
        return None

    def put_back_unsaved(self, block: CachedBlock) -> None:
        """The block could not be copied now."""
        if self._unsaved is not None:
            self._unsaved.appendleft(block)

    def stats(self) -> PrefixCacheStats:
        """What has come of it so far."""
        return PrefixCacheStats(
            num_evicted_blocks=self._num_evicted,
            num_mismatches=self._num_mismatches,
            num_listed_blocks=len(self._listed),
            num_idle_blocks={tier: usage.cached for tier, usage in self._tiers.usage().items()},
        )

    def make_keys(self, tenant: str, salt: str) -> BlockKeys:
        """Names for the blocks of a new request, none of them made yet."""
        return BlockKeys(root_key(self._identity, tenant, salt), self._block_size, tenant)

    def find(self, names: Sequence[BlockKey]) -> list[CachedBlock]:
        """The longest beginning of these blocks that is there, with the very same tokens; others are dropped."""
        found = []
        for name in names:
            block = self._listed.get(name.key)
            if block is None:
                break
            if block.name.tokens != name.tokens or block.name.parent != name.parent:
                self._num_mismatches += 1
                logger.warning("a cached block holds other tokens than its name says: it is not used any more")
                self._drop(block)
                break
            found.append(block)
        return found

    def enter(self, name: BlockKey, place: BlockRef, block_idx: int, lease: KVLease, tenant: str) -> None:
        """A lease's own block is full: it can be found from now on, unless another one can be found in its stead."""
        if name.key not in self._listed:
            block = CachedBlock(name, place, block_idx, tenant, {lease})
            self._listed[name.key] = lease.cached[block_idx] = block

    def hold(self, block: CachedBlock, lease: KVLease) -> None:
        """A lease reads the block from now on."""
        if not block.holders:
            self._idle.discard(block)
            self._shut(block)
            self._tiers.revive(block.place)
        elif block.place.tier is Tier.GPU:
            self._num_doubles += 1
        block.holders.add(lease)
        lease.cached[block.block_idx] = block

    def leave(self, lease: KVLease) -> None:
        """A lease that ends reads its cached blocks no more; those that nobody else reads become idle, or free."""
        stamp = next(self._releases)
        for block in lease.cached.values():
            block.holders.remove(lease)
            if block.holders:
                self._num_doubles -= block.place.tier is Tier.GPU
            elif not block.is_listed:
                self._tiers.release(block.place)
            else:
                block.last_used = stamp
                self._tiers.retire(block.place)
                self._idle.add(block)
                self._open(block)
                if self._unsaved is not None and not block.is_noted:
                    block.is_noted = True
                    self._unsaved.append(block)
        lease.cached.clear()
        while len(self._idle) > self._max_idle and (first := self._first_of_all()) is not None:
            self.evict(first)

    def distrust(self, lease: KVLease) -> None:
        """Something went wrong with a lease's request: its blocks are not found any more."""
        for block in lease.cached.values():
            self._unlist(block)

    def first_on(self, tier: Tier) -> CachedBlock | None:
        """The idle block of a tier that is evicted next; None if there is none."""
        return self._orders[tier].first() if tier in self._orders else None

    def try_evict(self, tier: Tier) -> bool:
        """Make an idle block of the tier free; False if there is none."""
        block = self.first_on(tier)
        if block is not None:
            self.evict(block)
        return block is not None

    def evict(self, block: CachedBlock) -> None:
        """An idle block that does not move becomes free."""
        self._shut(block)
        self._forget_idle(block)
        self._tiers.drop(block.place)
        self._num_evicted += 1

    def clear(self, tenant: str | None = None) -> int:
        """Forget all blocks, or those of one tenant; returns how many there were.

        Idle ones become free, held ones are no longer found.
        """
        blocks = [block for block in self._listed.values() if tenant is None or block.tenant == tenant]
        for block in blocks:
            self._drop(block)
        return len(blocks)

    def begin_move(self, block: CachedBlock, move: BlockMove) -> None:
        """A move of the block has begun: it stays readable, but cannot be evicted."""
        self._shut(block)
        block.move = move
        for lease in block.holders:
            lease.moving[block.block_idx] = move

    def end_move(self, block: CachedBlock, *, is_committed: bool) -> None:
        """The move has ended: the block lies at its target, or stays where it is."""
        move, block.move = block.move, None
        if move is None:
            raise InternalError(f"the move of a cached block at {block.place} ends, but it does not move")
        for lease in block.holders:
            del lease.moving[block.block_idx]
        if is_committed:
            self._num_doubles -= max(0, len(block.holders) - 1) * (block.place.tier is Tier.GPU)
            block.place = move.target
            self._num_doubles += max(0, len(block.holders) - 1) * (block.place.tier is Tier.GPU)
            for lease in block.holders:
                lease.blocks[block.block_idx] = move.target
                lease.table = ()
                if move.target.tier is not Tier.GPU:
                    lease.on_accelerator.discard(block.block_idx)
        if block in self._idle:
            self._open(block)

    def check(self) -> None:
        """Idle blocks are those of the tiers' counts, and every held block is known to its holders.

        Raises:
            InternalError: they are not.
        """
        idle = {block.place for block in self._idle}
        num_cached = sum(usage.cached for usage in self._tiers.usage().values())
        if not len(idle) == len(self._idle) == num_cached:
            raise InternalError(f"{num_cached} blocks are cached, but {len(self._idle)} are known as idle")
        if any(block.holders or not block.is_listed for block in self._idle):
            raise InternalError("a cached block is idle, but held or not listed")
        if any(self._listed.get(block.name.key) is not block for block in self._idle):
            raise InternalError("an idle block cannot be found")
        for block in self._listed.values():
            if not block.holders and block not in self._idle:
                raise InternalError("a listed block is neither held nor idle")
            if any(lease.cached.get(block.block_idx) is not block for lease in block.holders):
                raise InternalError("a cached block has a holder that does not know it")
        num_open = sum(block.ticket is not None for block in self._idle)
        if (
            num_open != self.num_evictable
            or num_open + sum(block.move is not None for block in self._idle) != num_cached
        ):
            raise InternalError(f"{self.num_evictable} idle blocks can be evicted, {num_open} should be")

    def _drop(self, block: CachedBlock) -> None:
        """A block is not found any more; an idle one becomes free."""
        if block.ticket is not None:
            self.evict(block)
        elif block in self._idle:  # it moves: both ends become free when the move ends
            self._forget_idle(block)
            self._tiers.revive(block.place)
            self._tiers.release(block.place)
        else:
            self._unlist(block)

    def _open(self, block: CachedBlock) -> None:
        """Idle and still: it may be evicted."""
        if block.move is None:
            self._orders[block.place.tier].add(block)

    def _shut(self, block: CachedBlock) -> None:
        if block.ticket is not None:
            self._orders[block.place.tier].remove(block)

    def _forget_idle(self, block: CachedBlock) -> None:
        self._idle.remove(block)
        self._unlist(block)

    def _unlist(self, block: CachedBlock) -> None:
        if block.is_listed:
            del self._listed[block.name.key]
            block.is_listed = False

    def _first_of_all(self) -> CachedBlock | None:
        firsts = [first for order in self._orders.values() if (first := order.first()) is not None]
        return min(firsts, key=lambda block: (block.last_used, -block.block_idx), default=None)
