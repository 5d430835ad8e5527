"""`TieredBlocks`: the pools of all tiers and the two-phase moves between them. Counts and moves; picks nothing.

    begin_move     source: used or cached, moving    target: free → in flight
    commit_move    source: → free                    target: → what the source was
    abort_move     source: as before                 target: → free

    begin_copy     as begin_move
    commit_move    source: as before                 target: → free, and holds a copy of the source

A copy lies in a free block until somebody takes that block: copies never cost anyone a place. The last one of their
order goes first. A copy ends with its source: when that is released, retired, dropped, or moves.

A moving source stays readable, but cannot be moved again. Releasing it is legal (its request was cancelled): then
source and target both become free when the move ends, whichever way, because a copy may still read the one and write
the other.
"""

from collections.abc import Callable, Iterable, Mapping

from ambidex.core.errors import InternalError
from ambidex.core.ids import MoveId, Tier
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.pool import BlockPool, PoolUsage


class TieredBlocks:
    """Blocks on several tiers.

    Args:
        capacities: blocks of each tier; tiers without blocks take no part.
    """

    def __init__(self, capacities: Mapping[Tier, int]) -> None:
        self._pools = {tier: BlockPool(tier, capacities[tier]) for tier in Tier if capacities.get(tier, 0)}
        self._moves: dict[MoveId, BlockMove] = {}
        self._moving: dict[BlockRef, MoveId] = {}
        self._released: set[MoveId] = set()
        self._num_begun = 0
        self._copies: dict[BlockRef, BlockRef] = {}  # by source, in their order
        self.num_copied = 0
        """Copies that were made so far; those that are not there any more have ended."""
        self.tell_left: Callable[[BlockRef], None] | None = None
        """Is told of each used block that holds its tokens no more, or for nobody."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that have blocks, fastest first."""
        return tuple(self._pools)

    @property
    def num_free(self) -> int:
        """Free blocks of all tiers."""
        return sum(pool.num_free for pool in self._pools.values())

    @property
    def copies(self) -> Mapping[BlockRef, BlockRef]:
        """Where the copies are, by the block that they are of; the first go last."""
        return self._copies

    def num_free_on(self, tier: Tier) -> int:
        """Free blocks of one tier, those that hold copies included."""
        return self._pools[tier].num_free if tier in self._pools else 0

    @property
    def num_moves(self) -> int:
        """Moves in flight."""
        return len(self._moves)

    def num_moving_from(self, tier: Tier) -> int:
        """Blocks of a tier that leave it when their moves are committed."""
        return sum(move.source.tier is tier and not move.keeps_source for move in self._moves.values())

    def usage(self) -> dict[Tier, PoolUsage]:
        """Blocks by state, for each tier that has blocks."""
        return {tier: pool.usage for tier, pool in self._pools.items()}

    def try_take(self, tier: Tier) -> BlockRef | None:
        """A free block of the tier, now used; None if it has none. If need be a copy goes."""
        if tier not in self._pools:
            return None
        self._clear_one(tier)
        block_id = self._pools[tier].try_take()
        return None if block_id is None else BlockRef(tier, block_id)

    def release(self, block: BlockRef) -> None:
        """A used block becomes free; at once, or when its move ends."""
        self._leave(block)
        move_id = self._moving.get(block)
        if move_id is None:
            self._pools[block.tier].give_back(block.block_id)
        elif move_id in self._released:
            raise InternalError(f"{block} is released twice while it moves")
        else:
            self._released.add(move_id)

    def retire(self, block: BlockRef) -> None:
        """A used block becomes cached, also while it moves."""
        self._leave(block)
        self._pools[block.tier].retire(block.block_id)

    def revive(self, block: BlockRef) -> None:
        """A cached block becomes used, also while it moves."""
        self._pools[block.tier].revive(block.block_id)

    def drop(self, block: BlockRef) -> None:
        """A cached block that does not move becomes free."""
        if block in self._moving:
            raise InternalError(f"{block} is dropped while it moves")
        self._pools[block.tier].drop(block.block_id)

    def begin_move(self, source: BlockRef, target_tier: Tier) -> BlockMove | None:
        """Reserve a block of `target_tier` for a copy of `source`; None if there is none, then nothing changes.

        Raises:
            InternalError: the source holds no tokens, is already moving or lies on that tier.
        """
        if target_tier in self._pools:
            self._clear_one(target_tier)
        return self._begin(source, target_tier, keeps_source=False)

    def begin_copy(self, source: BlockRef, target_tier: Tier) -> BlockMove | None:
        """Reserve a free block of `target_tier` that holds no other copy for one of `source`, a used block; None if
        there is none, then nothing changes.

        Raises:
            InternalError: the source is not used, is moving, lies on that tier, or has a copy.
        """
        if source in self._copies or source.tier not in self._pools or not self._is_used(source):
            raise InternalError(f"{source} is to be copied, but is not used or has a copy")
        return self._begin(source, target_tier, keeps_source=True)

    def drop_copy(self, source: BlockRef) -> None:
        """The copy of a block is one no more.

        Raises:
            InternalError: there is none.
        """
        if source not in self._copies:
            raise InternalError(f"{source} has no copy that could be dropped")
        target = self._copies.pop(source)
        self._pools[target.tier].reclaim(target.block_id)

    def order_copies(self, sources: Iterable[BlockRef]) -> None:
        """From now on the copies of these come first, in this order; others behind them."""
        named = {source: self._copies[source] for source in sources if source in self._copies}
        self._copies = {**named, **self._copies}

    def commit_move(self, move_id: MoveId) -> None:
        """The copy is complete: the target is what the source was, which is free (both are, if it was released). Of a
        move that keeps its source, the target is a copy, if the source is used.

        Raises:
            InternalError: no such move is in flight.
        """
        move = self._moves.get(move_id)
        if move is not None and move.keeps_source:
            if move_id in self._released or not self._is_used(move.source):
                self.abort_move(move_id)
                return
            self._end(move_id)
            self._pools[move.target.tier].lend(move.target.block_id)
            self._copies[move.source] = move.target
            self.num_copied += 1
            return
        move, was_released = self._end(move_id)
        if not was_released:
            self._leave(move.source)
        source, target = self._pools[move.source.tier], self._pools[move.target.tier]
        is_cached = source.is_cached(move.source.block_id)
        (source.drop if is_cached else source.give_back)(move.source.block_id)
        if was_released:
            target.cancel(move.target.block_id)
        else:
            target.commit(move.target.block_id, as_cached=is_cached)

    def abort_move(self, move_id: MoveId) -> None:
        """The copy failed: the target is free, the source as before (free if it was released).

        Raises:
            InternalError: no such move is in flight.
        """
        move, was_released = self._end(move_id)
        self._pools[move.target.tier].cancel(move.target.block_id)
        if was_released:
            self._pools[move.source.tier].give_back(move.source.block_id)

    def num_released(self, tier: Tier) -> int:
        """Blocks of the tier that are used only until their move ends."""
        return sum(self._moves[move_id].source.tier is tier for move_id in self._released)

    def check(self) -> None:
        """Each pool conserves its blocks and the blocks in flight are the targets of the moves in flight.

        Raises:
            InternalError: they do not.
        """
        for pool in self._pools.values():
            pool.check()
        for move in self._moves.values():
            source, target = move.source, move.target
            if not self._holds_tokens(source) or self._moving[source] != move.move_id:
                raise InternalError(f"the source of {move} holds nothing or moves elsewhere")
            if not self._pools[target.tier].is_in_flight(target.block_id):
                raise InternalError(f"the target of {move} is not in flight")
        num_in_flight = sum(usage.in_flight for usage in self.usage().values())
        if not num_in_flight == len(self._moves) == len(self._moving) or not self._released <= self._moves.keys():
            raise InternalError(f"{num_in_flight} blocks are in flight for {len(self._moves)} moves")
        num_lent = sum(usage.copies for usage in self.usage().values())
        if not len(set(self._copies.values())) == len(self._copies) == num_lent:
            raise InternalError(f"{num_lent} free blocks hold copies of {len(self._copies)} blocks")
        if any(not self._is_used(source) or source.tier is target.tier for source, target in self._copies.items()):
            raise InternalError("there is a copy of a block that nobody uses, or on its own tier")

    def _begin(self, source: BlockRef, target_tier: Tier, *, keeps_source: bool) -> BlockMove | None:
        if not self._holds_tokens(source):
            raise InternalError(f"{source} is to be moved, but holds nothing")
        if source in self._moving or source.tier is target_tier:
            raise InternalError(f"{source} is already moving or already on tier {target_tier}")
        block_id = self._pools[target_tier].try_reserve() if target_tier in self._pools else None
        if block_id is None:
            return None
        move = BlockMove(
            move_id=MoveId(self._num_begun),
            source=source,
            target=BlockRef(target_tier, block_id),
            keeps_source=keeps_source,
        )
        self._num_begun += 1
        self._moves[move.move_id] = move
        self._moving[source] = move.move_id
        return move

    def _clear_one(self, tier: Tier) -> None:
        """See to it that a free block of the tier, if there is one, holds no copy."""
        pool = self._pools[tier]
        if pool.num_free == pool.num_lent > 0:
            self.drop_copy(next(source for source in reversed(self._copies) if self._copies[source].tier is tier))

    def _leave(self, block: BlockRef) -> None:
        """A used block's tokens go, or nobody reads them any more."""
        if block in self._copies:
            self.drop_copy(block)
        if self.tell_left is not None:
            self.tell_left(block)

    def _is_used(self, block: BlockRef) -> bool:
        return self._pools[block.tier].is_used(block.block_id)

    def _holds_tokens(self, block: BlockRef) -> bool:
        pool = self._pools.get(block.tier)
        return pool is not None and (pool.is_used(block.block_id) or pool.is_cached(block.block_id))

    def _end(self, move_id: MoveId) -> tuple[BlockMove, bool]:
        if move_id not in self._moves:
            raise InternalError(f"move {move_id} ends, but is not in flight")
        move = self._moves.pop(move_id)
        del self._moving[move.source]
        was_released = move_id in self._released
        self._released.discard(move_id)
        return move, was_released
