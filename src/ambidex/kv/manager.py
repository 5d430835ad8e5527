"""`KVManager`: gives blocks of all tiers to requests, and what they leave behind to those that begin alike.

The manager obeys the residency policy twice in a step: when a lease grows (where do the new blocks go?) and when the
step's blocks are known (which old ones leave the accelerator tier?). A move that fails is a block that stays where it
is: counted, and free to be chosen again in a later step.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ambidex.core.errors import ConfigError, InternalError
from ambidex.core.ids import MoveId, RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.block_keys import BlockKeys, TokenSource
from ambidex.kv.lease import CachedBlock, KVLease
from ambidex.kv.pool import PoolUsage
from ambidex.kv.prefix_cache import PrefixCache, PrefixCacheLimits, PrefixCacheStats
from ambidex.kv.residency import Residency, ResidentBlocks
from ambidex.kv.spill import find_oldest
from ambidex.kv.tiers import TieredBlocks

logger = logging.getLogger(__name__)


_RESERVE: Final = 8
"""One in so many blocks of the accelerator tier is kept free of idle blocks, if they can move: what a step needs at
once must not cost the beginning of a context that others may come back to."""
_NO_CACHE: Final = PrefixCacheLimits()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks with which a request may begin; opaque outside of `kv` but for the counts."""

    blocks: tuple[CachedBlock, ...] = ()
    num_tokens: int = 0
    num_idle: int = 0
    """Those of the blocks that count as free as long as nobody holds them."""


class KVManager:
    """Gives blocks of several tiers to requests and keeps each block on the tier where it belongs.

    Args:
        capacities: blocks of each tier; tiers without blocks take no part.
        regions: how contexts are cut into sink, middle and recent blocks.
        cache: what may be kept of requests that have ended.
        num_kept_free: blocks of DRAM that are kept free for what comes, as long as the oldest can go to the CXL tier.
        num_for_copies: blocks of the accelerator tier that contexts leave to copies as long as other tiers have room.

    Raises:
        ConfigError: no tier has a block.
    """

    def __init__(
        self,
        capacities: Mapping[Tier, int],
        regions: Regions,
        cache: PrefixCacheLimits = _NO_CACHE,
        *,
        num_kept_free: int = 1,
        num_for_copies: int = 0,
    ) -> None:
        self._tiers = TieredBlocks(capacities)
        if not self._tiers.tiers:
            raise ConfigError(
                f"the KV tiers hold 0 blocks of {regions.block_size} tokens: at least 1 is needed; "
                f"raise `kv_gpu_tokens`, `gpu_memory` or `dram_memory`"
            )
        self._num_blocks = sum(usage.total for usage in self._tiers.usage().values())
        self._below = tuple(tier for tier in self._tiers.tiers if tier is not Tier.GPU)
        self._spills = {Tier.DRAM, Tier.CXL} <= set(self._below)
        self._num_kept_free = min(num_kept_free, capacities.get(Tier.DRAM, 0) // 2)
        self._block_size = regions.block_size
        self._residency = Residency(regions, max(0, capacities.get(Tier.GPU, 0) - num_for_copies))
        self._cache = PrefixCache(
            self._tiers,
            cache,
            block_size=regions.block_size,
            max_idle=-(-self._num_blocks * cache.max_idle_percent // 100),
        )
        self._num_reserved = -(-capacities.get(Tier.GPU, 0) // _RESERVE) if cache.max_idle_percent else 0
        self._leases: dict[RequestId, KVLease] = {}
        self._movers: dict[MoveId, CachedBlock | tuple[KVLease, int]] = {}
        self._num_failed_moves = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all tiers."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of all tiers that can be taken now: free ones, and idle ones of the prefix cache."""
        return self._tiers.num_free + self._cache.num_evictable

    @property
    def max_context_len(self) -> int:
        """Tokens that all tiers together hold."""
        return self._num_blocks * self._block_size

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    @property
    def num_moves(self) -> int:
        """Moves in flight."""
        return self._tiers.num_moves

    def is_settled(self, next_lens: Mapping[KVLease, int]) -> bool:
        """Whether a step that makes leases so many tokens long moves no block: none moves now, `begin_demotions` would
        have nothing to do in it, and what it adds finds room on the accelerator.

        Cost: about a microsecond for each lease and for each ten of its blocks on the accelerator.
        """
        if self._tiers.num_moves:
            return False
        if not self._below:
            return True
        leases = self._leases.values()
        if self._spills and any(len(lease.on_accelerator) < len(lease.blocks) for lease in leases):
            return False
        missing = {lease: self.num_missing_blocks(lease, num_tokens) for lease, num_tokens in next_lens.items()}
        num_missing = sum(missing.values())
        num_kept = int(self._block_size == 1 and num_missing > 0)  # for the block that the step behind it opens
        if num_missing + num_kept > self._num_available_on(Tier.GPU):
            return False
        wants = [
            self._residency.wants(next_lens[lease], next_lens[lease] + 1) if lease in next_lens else lease.wants
            for lease in leases
        ]
        kept = self._residency.share(wants, num_doubles=self._cache.num_doubles)
        resident = dict(zip(leases, kept, strict=True))
        for lease, num_tokens in next_lens.items():
            if missing[lease] and len(lease.blocks) not in resident[lease]:
                return False
            if any(True for _ in self._find_unwanted(resident, lease, (num_tokens - 1) // self._block_size)):
                return False
        num_free = self._tiers.num_free_on(Tier.GPU) - num_missing
        return num_free >= self._num_reserved or self._cache.first_on(Tier.GPU) is None

    def _find_unwanted(
        self, resident: Mapping[KVLease, ResidentBlocks], lease: KVLease, num_full: int
    ) -> Iterator[int]:
        """Blocks among the first `num_full` of a lease that lie on the accelerator and are to leave it, in order."""
        kept = resident[lease]
        if kept.num_first + kept.num_last >= kept.num_blocks:  # all of it stays
            return
        for block_idx in sorted(lease.on_accelerator - lease.moving.keys()):
            cached = lease.cached.get(block_idx)
            readers = cached.holders if cached is not None else (lease,)
            if block_idx < num_full and not any(block_idx in resident[reader] for reader in readers):
                yield block_idx

    @property
    def num_failed_moves(self) -> int:
        """Moves that failed since the start."""
        return self._num_failed_moves

    def usage(self) -> dict[Tier, PoolUsage]:
        """Blocks by state, for each tier that has blocks."""
        return self._tiers.usage()

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache holds and has done."""
        return self._cache.stats()

    @property
    def has_unsaved(self) -> bool:
        """Blocks of the prefix cache may wait to be copied elsewhere."""
        return self._cache.has_unsaved

    def next_unsaved(self) -> CachedBlock | None:
        """The block that has waited longest; see `PrefixCache.next_unsaved`."""
        return self._cache.next_unsaved()

    def put_back_unsaved(self, block: CachedBlock) -> None:
        """The block could not be copied now."""
        self._cache.put_back_unsaved(block)

    def make_keys(self, *, tenant: str, salt: str) -> BlockKeys | None:
        """Names for the blocks of a new request, which only requests of the same tenant and salt find; None: there is
        no prefix cache."""
        return self._cache.make_keys(tenant, salt) if self._cache.is_on else None

    def find_prefix(self, keys: BlockKeys | None, tokens: TokenSource, num_tokens: int) -> PrefixHit:
        """The cached blocks with which a context of `num_tokens` tokens may begin; its last token is always computed.

        They are not held, and may go until `open` is called.
        """
        if keys is None:
            return PrefixHit()
        blocks = self._cache.find(keys.first((num_tokens - 1) // self._block_size, tokens))
        num_idle = sum(block.ticket is not None for block in blocks)
        return PrefixHit(tuple(blocks), len(blocks) * self._block_size, num_idle)

    def open(self, request_id: RequestId, prefix: PrefixHit = PrefixHit()) -> KVLease:
        """A lease that holds the blocks of a prefix that was found in this step, or none."""
        if request_id in self._leases:
            raise InternalError(f"request {request_id} already has a lease")
        lease = self._leases[request_id] = KVLease(request_id)
        for block in prefix.blocks:
            self._cache.hold(block, lease)
            if block.place.tier is Tier.GPU:
                lease.on_accelerator.add(block.block_idx)
            if block.move is not None:
                lease.moving[block.block_idx] = block.move
            lease.blocks.append(block.place)
        lease.num_named = len(prefix.blocks)
        return lease

    def keep_computed(self, lease: KVLease, keys: BlockKeys | None, tokens: TokenSource, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a lease are computed: its full blocks can be found by others from now on."""
        self._check_open(lease)
        num_full = num_tokens // self._block_size
        if keys is None or num_full <= lease.num_named:
            return
        names = keys.first(num_full, tokens)
        for block_idx in range(lease.num_named, num_full):
            if block_idx not in lease.moving:
                self._cache.enter(names[block_idx], lease.blocks[block_idx], block_idx, lease, keys.tenant)
        lease.num_named = num_full

    def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held. Running
        requests keep theirs."""
        return self._cache.clear(tenant)

    def release(self, lease: KVLease, *, is_trusted: bool = True) -> None:
        """End a lease; its blocks become free, those that move when their move ends, or stay in the prefix cache.

        Args:
            is_trusted: its blocks may serve others; False after a fault.
        """
        self._check_open(lease)
        del self._leases[lease.request_id]
        if not is_trusted:
            self._cache.distrust(lease)
        for block_idx, move in lease.moving.items():
            if block_idx not in lease.cached:
                del self._movers[move.move_id]
        for block_idx, block in enumerate(lease.blocks):
            if block_idx not in lease.cached:
                self._tiers.release(block)
        self._cache.leave(lease)
        lease.blocks.clear()

    def num_missing_blocks(self, lease: KVLease | None, num_tokens: int) -> int:
        """Blocks that the lease (None: an empty one) lacks to cover `num_tokens` tokens."""
        num_held = len(lease.blocks) if lease is not None else 0
        return max(0, -(-num_tokens // self._block_size) - num_held)

    def try_extend(self, lease: KVLease, num_tokens: int, *, num_known_tokens: int) -> bool:
        """Make the lease cover `num_tokens` tokens; all or nothing.

        Args:
            num_tokens: length of the context after the coming step.
            num_known_tokens: tokens that the request has already, computed or not: whether it goes on at once.
        Returns:
            False if there are too few free blocks; then nothing changes.
        """
        self._check_open(lease)
        num_missing = self.num_missing_blocks(lease, num_tokens)
        if num_missing > self.num_free_blocks:
            return False
        lease.context_len = num_tokens
        lease.wants = self._residency.wants(num_tokens, max(num_known_tokens, num_tokens + 1))
        if num_missing:
            self._add_blocks(lease, num_missing)
        return True

    def table(self, lease: KVLease, num_tokens: int) -> tuple[BlockRef, ...]:
        """Blocks that cover tokens 0 … `num_tokens` - 1, in order; a moving block is named by its source."""
        self._check_open(lease)
        if self.num_missing_blocks(lease, num_tokens):
            raise InternalError(f"the lease of {lease.request_id} does not cover {num_tokens} tokens")
        num_blocks = -(-num_tokens // self._block_size)
        if len(lease.table) != num_blocks:
            lease.table = tuple(lease.blocks[:num_blocks])
        return lease.table

    def begin_demotions(self, num_computed_tokens: Mapping[KVLease, int]) -> tuple[BlockMove, ...]:
        """Begin to move blocks from the accelerator tier that residency does not want there, as far as there is room;
        then idle ones, if little of the tier is free; and the oldest of DRAM to the CXL tier, if little of DRAM is.

        Args:
            num_computed_tokens: tokens of each lease that were computed before the coming step; only blocks that are
                full of them may move, since nobody writes to those any more.
        """
        moves: list[BlockMove] = []
        if not self._below:
            return ()
        resident = dict(zip(self._leases.values(), self._choose(), strict=True))
        for lease in resident:
            num_full = num_computed_tokens.get(lease, 0) // self._block_size
            for block_idx in self._find_unwanted(resident, lease, num_full):
                move = self._try_demote(lease, block_idx, self._below)
                if move is None:
                    return (*moves, *self._begin_spills(num_computed_tokens))
                moves.append(move)
        return (*moves, *self._begin_idle_demotions(), *self._begin_spills(num_computed_tokens))

    @property
    def copies(self) -> Mapping[BlockRef, BlockRef]:
        """Copies on the accelerator tier, by the block in host memory that each is of; the first of them go last."""
        return self._tiers.copies

    @property
    def num_copied(self) -> int:
        """Copies that were made since the start."""
        return self._tiers.num_copied

    @property
    def copy_room(self) -> int:
        """Places of the accelerator tier that copies may have now, with those that they have: free ones, but for what
        residency wants there and has not yet."""
        usage = self._tiers.usage().get(Tier.GPU)
        if usage is None:
            return 0
        num_wanted = sum(kept.num_first + kept.num_last for kept in self._choose()) - self._cache.num_doubles
        return max(0, usage.free + usage.in_flight - max(0, num_wanted - usage.used))

    def begin_copies(
        self, wanted: Sequence[BlockRef], num_computed_tokens: Mapping[KVLease, int], *, most: int
    ) -> tuple[BlockMove, ...]:
        """Begin to copy the first of these blocks to the accelerator tier, as far as there is room for copies.

        Those that are copied or move already are passed over, and those that no lease reads or that are not full.

        Args:
            num_computed_tokens: as in `begin_demotions`.
            most: moves that are begun.
        """
        in_flight = self._tiers.usage()[Tier.GPU].in_flight if Tier.GPU in self._tiers.tiers else 0
        most = min(most, self.copy_room - len(self.copies) - in_flight)
        left = set(wanted) - self.copies.keys() if most > 0 else set()
        if not left:
            return ()
        places = {
            block: (lease, block_idx)
            for lease in self._leases.values()
            for block_idx, block in enumerate(lease.blocks[: num_computed_tokens.get(lease, 0) // self._block_size])
            if block in left and block_idx not in lease.moving
        }
        moves: list[BlockMove] = []
        for block in wanted:
            if len(moves) == most:
                break
            if block in places:
                move = self._tiers.begin_copy(block, Tier.GPU)
                if move is None:
                    break
                self._note_move(*places[block], move)
                moves.append(move)
        return tuple(moves)

    def drop_copies(self, blocks: Iterable[BlockRef]) -> None:
        """Of these blocks, which have copies, none is needed any more."""
        for block in blocks:
            self._tiers.drop_copy(block)

    def order_copies(self, blocks: Iterable[BlockRef]) -> None:
        """When places are needed, the copies of these blocks go last, the first of them at the very last."""
        self._tiers.order_copies(blocks)

    def tell_left(self, tell: Callable[[BlockRef], None]) -> None:
        """Who is told from now on of blocks that do not hold their tokens any more, or that nobody reads."""
        self._tiers.tell_left = tell

    def with_copies(self, lease: KVLease, table: tuple[BlockRef, ...], *, num_old: int) -> tuple[BlockRef, ...]:
        """A table of the lease with the first `num_old` blocks named by their copies, where they have any; the same
        object as long as nothing changes."""
        copies = self._tiers.copies
        if not copies:
            return table
        known = (table, num_old, self._tiers.num_copied, len(copies))
        if lease.copied_from[0] is not table or lease.copied_from[1:] != known[1:]:
            found = (*(copies.get(block, block) for block in table[:num_old]), *table[num_old:])
            lease.copied_from = known
            if found != lease.copied_table:
                lease.copied_table = found
        return lease.copied_table

    def finish_moves(self, finished: Iterable[MoveId], failed: Iterable[MoveId]) -> None:
        """End moves: finished ones are committed, failed ones aborted and counted.

        Raises:
            InternalError: a move is not in flight.
        """
        for move_id in finished:
            self._tiers.commit_move(move_id)
            mover = self._movers.pop(move_id, None)
            if isinstance(mover, CachedBlock):
                is_copy = mover.move is not None and mover.move.keeps_source
                self._cache.end_move(mover, is_committed=not is_copy)
            elif mover is not None:
                lease, block_idx = mover
                move = lease.moving.pop(block_idx)
                if move.keeps_source:
                    continue
                lease.blocks[block_idx] = move.target
                lease.table = ()
                lease.on_accelerator.discard(block_idx)
        num_failed = 0
        for move_id in failed:
            self._tiers.abort_move(move_id)
            num_failed += 1
            mover = self._movers.pop(move_id, None)
            if isinstance(mover, CachedBlock):
                self._cache.end_move(mover, is_committed=False)
            elif mover is not None:
                lease, block_idx = mover
                del lease.moving[block_idx]
        if num_failed:
            level = logging.INFO if self._num_failed_moves else logging.WARNING
            self._num_failed_moves += num_failed
            logger.log(level, "moves failed: %d (%d so far); their blocks stay", num_failed, self._num_failed_moves)

    def check(self) -> None:
        """Every tier conserves its blocks; each used block belongs to one lease, to leases that share it, or to the end
        of a move; each cached one is idle in the prefix cache.

        Raises:
            InternalError: a block is lost or is owned twice.
        """
        self._tiers.check()
        self._cache.check()
        leases = self._leases.values()
        own = [block for lease in leases for idx, block in enumerate(lease.blocks) if idx not in lease.cached]
        shared = {cached for lease in leases for cached in lease.cached.values()}
        owned = [*own, *(cached.place for cached in shared)]
        if len(set(owned)) != len(owned):
            raise InternalError("a block belongs to two leases")
        for tier, usage in self.usage().items():
            num_owned = sum(block.tier is tier for block in owned) + self._tiers.num_released(tier)
            if num_owned != usage.used:
                raise InternalError(f"tier {tier} has {usage.used} used blocks, but {num_owned} are owned")
        num_doubles = sum(len(cached.holders) - 1 for cached in shared if cached.place.tier is Tier.GPU)
        if num_doubles != self._cache.num_doubles:
            raise InternalError(f"{num_doubles} places are counted twice, not {self._cache.num_doubles}")
        for lease in leases:
            _check_lease(lease)

    def _choose(self) -> list[ResidentBlocks]:
        wants = [lease.wants for lease in self._leases.values()]
        return self._residency.share(wants, num_doubles=self._cache.num_doubles)

    def _add_blocks(self, lease: KVLease, num_missing: int) -> None:
        resident = dict(zip(self._leases, self._choose(), strict=True))[lease.request_id]
        num_blocks = len(lease.blocks) + num_missing
        num_full = lease.context_len // self._block_size
        added: dict[int, BlockRef] = {}
        for block_idx in sorted(range(len(lease.blocks), num_blocks), key=resident.rank):
            # The last free place is left to the block that the next step opens, unless the block is unfinished itself.
            num_kept = int(block_idx < num_full and num_blocks < resident.num_blocks)
            is_near = block_idx in resident and self._num_available_on(Tier.GPU) > num_kept
            added[block_idx] = self._take_first((Tier.GPU, *self._below) if is_near else (*self._below, Tier.GPU))
        lease.on_accelerator.update(block_idx for block_idx, block in added.items() if block.tier is Tier.GPU)
        lease.blocks.extend(_in_order(added))
        lease.table = ()

    def _num_available_on(self, tier: Tier) -> int:
        return self._tiers.num_free_on(tier) + self._cache.num_evictable_on(tier)

    def _take_first(self, tiers: tuple[Tier, ...]) -> BlockRef:
        for tier in tiers:
            block = self._tiers.try_take(tier)
            if block is None and self._cache.try_evict(tier):
                block = self._tiers.try_take(tier)
            if block is not None:
                return block
        raise InternalError("no tier has a free block, although there were enough")

    def _try_demote(self, lease: KVLease, block_idx: int, tiers: tuple[Tier, ...]) -> BlockMove | None:
        for tier in tiers:
            if self._tiers.num_free_on(tier) or self._cache.try_evict(tier):
                move = self._tiers.begin_move(lease.blocks[block_idx], tier)
                if move is not None:
                    self._note_move(lease, block_idx, move)
                    return move
        return None

    def _note_move(self, lease: KVLease, block_idx: int, move: BlockMove) -> None:
        """A move of a lease's block has begun."""
        cached = lease.cached.get(block_idx)
        if cached is not None:
            self._cache.begin_move(cached, move)
        else:
            lease.moving[block_idx] = move
        self._movers[move.move_id] = cached or (lease, block_idx)

    def _begin_spills(self, num_computed_tokens: Mapping[KVLease, int]) -> list[BlockMove]:
        """Clear places of DRAM for newer blocks: idle blocks leave first, then the oldest of running requests."""
        moves: list[BlockMove] = []
        if not self._spills or not self._leases:  # an engine comes to rest
            return moves
        num_free = self._tiers.num_free_on(Tier.DRAM) + self._tiers.num_moving_from(Tier.DRAM)
        for _ in range(self._num_kept_free - num_free):
            if not self._tiers.num_free_on(Tier.CXL) and not self._cache.try_evict(Tier.CXL):
                break
            idle = self._cache.first_on(Tier.DRAM)
            if idle is not None:
                move = self._tiers.begin_move(idle.place, Tier.CXL)
                assert move is not None, "there is a free block"
                self._cache.begin_move(idle, move)
                self._movers[move.move_id] = idle
            else:
                oldest = find_oldest(
                    self._leases.values(), num_computed_tokens, tier=Tier.DRAM, block_size=self._block_size
                )
                move = self._try_demote(*oldest, (Tier.CXL,)) if oldest is not None else None
            if move is None:
                break
            moves.append(move)
        return moves

    def _begin_idle_demotions(self) -> list[BlockMove]:
        """Clear the reserve of the accelerator tier; only beside running requests, so that an engine comes to rest."""
        moves: list[BlockMove] = []
        num_free = self._tiers.num_free_on(Tier.GPU) + self._tiers.num_moves
        for _ in range(self._num_reserved - num_free if self._leases else 0):
            block = self._cache.first_on(Tier.GPU)
            move = self._try_demote_idle(block) if block is not None else None
            if move is None:
                break
            moves.append(move)
        return moves

    def _try_demote_idle(self, block: CachedBlock) -> BlockMove | None:
        """Move an idle block down, in place of one that was not used for longer if need be."""
        for tier in self._below:
            oldest = self._cache.first_on(tier)
            if not self._tiers.num_free_on(tier) and oldest is not None and oldest.last_used < block.last_used:
                self._cache.evict(oldest)
            move = self._tiers.begin_move(block.place, tier)
            if move is not None:
                self._cache.begin_move(block, move)
                self._movers[move.move_id] = block
                return move
        return None

    def _check_open(self, lease: KVLease) -> None:
        if self._leases.get(lease.request_id) is not lease:
            raise InternalError(f"the lease of {lease.request_id} has ended")


def _in_order(added: Mapping[int, BlockRef]) -> list[BlockRef]:
    """The blocks by index, with the ids of each tier ascending: attention reads side by side what lies side by side."""
    ids = {tier: iter(sorted(b.block_id for b in added.values() if b.tier is tier)) for tier in Tier}
    return [BlockRef(added[block_idx].tier, next(ids[added[block_idx].tier])) for block_idx in sorted(added)]


def _check_lease(lease: KVLease) -> None:
    indices = {block_idx for block_idx, block in enumerate(lease.blocks) if block.tier is Tier.GPU}
    if indices != lease.on_accelerator:
        raise InternalError(f"the lease of {lease.request_id} has lost track of its accelerator blocks")
    if any(lease.blocks[block_idx] != move.source for block_idx, move in lease.moving.items()):
        raise InternalError(f"the lease of {lease.request_id} names a block that is not the source of its move")
    for block_idx, cached in lease.cached.items():
        if lease.blocks[block_idx] != cached.place or cached.block_idx != block_idx or lease not in cached.holders:
            raise InternalError(f"the lease of {lease.request_id} and the prefix cache disagree on block {block_idx}")
        if (lease.moving.get(block_idx) is None) != (cached.move is None):
            raise InternalError(f"the lease of {lease.request_id} has lost track of a move of block {block_idx}")
