"""`KVManager` and `KVLease`: the only KV names that the scheduler knows.

The manager obeys the residency policy twice in a step: when a lease grows (where do the new blocks go?) and when the
step's blocks are known (which old ones leave the accelerator tier?). A move that fails is a block that stays where it
is: counted, and free to be chosen again in a later step.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ambidex.core.errors import ConfigError, InternalError
from ambidex.core.ids import MoveId, RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.pool import PoolUsage
from ambidex.kv.residency import Residency, ResidentBlocks
from ambidex.kv.tiers import TieredBlocks

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KVLease:
    """The blocks of one request, in the order of its tokens; opaque outside this module."""

    request_id: RequestId
    blocks: list[BlockRef] = field(default_factory=list)
    on_accelerator: set[int] = field(default_factory=set)
    moving: dict[int, BlockMove] = field(default_factory=dict)
    context_len: int = 0
    next_len: int = 0
    table: tuple[BlockRef, ...] = ()
    """What the last step was told of `blocks`: the same object as long as nothing changes, so that it compares at once.
    Empty when a block has come or moved since."""


class KVManager:
    """Gives blocks of several tiers to requests and keeps each block on the tier where it belongs.

    Args:
        capacities: blocks of each tier; tiers without blocks take no part.
        regions: how contexts are cut into sink, middle and recent blocks.

    Raises:
        ConfigError: no tier has a block.
    """

    def __init__(self, capacities: Mapping[Tier, int], regions: Regions) -> None:
        self._tiers = TieredBlocks(capacities)
        if not self._tiers.tiers:
            raise ConfigError(
                f"the KV tiers hold 0 blocks of {regions.block_size} tokens: at least 1 is needed; "
                f"raise --kv-gpu-tokens, --gpu-memory or --dram-memory"
            )
        self._num_blocks = sum(usage.total for usage in self._tiers.usage().values())
        self._below = tuple(tier for tier in self._tiers.tiers if tier is not Tier.GPU)
        self._block_size = regions.block_size
        self._residency = Residency(regions, capacities.get(Tier.GPU, 0))
        self._leases: dict[RequestId, KVLease] = {}
        self._movers: dict[MoveId, tuple[KVLease, int]] = {}
        self._num_failed_moves = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of all tiers."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of all tiers that can be taken now."""
        return self._tiers.num_free

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

    @property
    def num_failed_moves(self) -> int:
        """Moves that failed since the start."""
        return self._num_failed_moves

    def usage(self) -> dict[Tier, PoolUsage]:
        """Blocks by state, for each tier that has blocks."""
        return self._tiers.usage()

    def open(self, request_id: RequestId) -> KVLease:
        """An empty lease."""
        if request_id in self._leases:
            raise InternalError(f"request {request_id} already has a lease")
        lease = self._leases[request_id] = KVLease(request_id)
        return lease

    def release(self, lease: KVLease) -> None:
        """End a lease; its blocks become free, those that move when their move ends."""
        self._check_open(lease)
        del self._leases[lease.request_id]
        for move in lease.moving.values():
            del self._movers[move.move_id]
        for block in lease.blocks:
            self._tiers.release(block)
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
        if num_missing > self._tiers.num_free:
            return False
        lease.context_len, lease.next_len = num_tokens, max(num_known_tokens, num_tokens + 1)
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
        """Begin to move blocks from the accelerator tier that residency does not want there, as far as there is room.

        Args:
            num_computed_tokens: tokens of each lease that were computed before the coming step; only blocks that are
                full of them may move, since nobody writes to those any more.
        """
        moves: list[BlockMove] = []
        if not self._below:
            return ()
        for lease, resident in zip(self._leases.values(), self._choose(), strict=True):
            num_full = num_computed_tokens.get(lease, 0) // self._block_size
            for block_idx in sorted(lease.on_accelerator - lease.moving.keys()):
                if block_idx >= num_full or block_idx in resident:
                    continue
                move = self._try_demote(lease, block_idx)
                if move is None:
                    return tuple(moves)
                moves.append(move)
        return tuple(moves)

    def finish_moves(self, finished: Iterable[MoveId], failed: Iterable[MoveId]) -> None:
        """End moves: finished ones are committed, failed ones aborted and counted.

        Raises:
            InternalError: a move is not in flight.
        """
        for move_id in finished:
            self._tiers.commit_move(move_id)
            if mover := self._movers.pop(move_id, None):
                lease, block_idx = mover
                lease.blocks[block_idx] = lease.moving.pop(block_idx).target
                lease.table = ()
                lease.on_accelerator.discard(block_idx)
        num_failed = 0
        for move_id in failed:
            self._tiers.abort_move(move_id)
            num_failed += 1
            if mover := self._movers.pop(move_id, None):
                lease, block_idx = mover
                del lease.moving[block_idx]
        if num_failed:
            level = logging.INFO if self._num_failed_moves else logging.WARNING
            self._num_failed_moves += num_failed
            logger.log(level, "moves failed: %d (%d so far); their blocks stay", num_failed, self._num_failed_moves)

    def check(self) -> None:
        """Every tier conserves its blocks, and each used block belongs to exactly one lease or to a move's end.

        Raises:
            InternalError: a block is lost or is owned twice.
        """
        self._tiers.check()
        owned = [block for lease in self._leases.values() for block in lease.blocks]
        if len(set(owned)) != len(owned):
            raise InternalError("a block belongs to two leases")
        for tier, usage in self.usage().items():
            num_owned = sum(block.tier is tier for block in owned) + self._tiers.num_released(tier)
            if num_owned != usage.used:
                raise InternalError(f"tier {tier} has {usage.used} used blocks, but {num_owned} are owned")
        for lease in self._leases.values():
            indices = {block_idx for block_idx, block in enumerate(lease.blocks) if block.tier is Tier.GPU}
            if indices != lease.on_accelerator:
                raise InternalError(f"the lease of {lease.request_id} has lost track of its accelerator blocks")
            if any(lease.blocks[block_idx] != move.source for block_idx, move in lease.moving.items()):
                raise InternalError(f"the lease of {lease.request_id} names a block that is not the source of its move")

    def _choose(self) -> list[ResidentBlocks]:
        leases = self._leases.values()
        return self._residency.choose([lease.context_len for lease in leases], [lease.next_len for lease in leases])

    def _add_blocks(self, lease: KVLease, num_missing: int) -> None:
        resident = dict(zip(self._leases, self._choose(), strict=True))[lease.request_id]
        num_blocks = len(lease.blocks) + num_missing
        num_full = lease.context_len // self._block_size
        added: dict[int, BlockRef] = {}
        for block_idx in sorted(range(len(lease.blocks), num_blocks), key=resident.rank):
            # The last free place is left to the block that the next step opens, unless the block is unfinished itself.
            num_kept = int(block_idx < num_full and num_blocks < resident.num_blocks)
            is_near = block_idx in resident and self._tiers.num_free_on(Tier.GPU) > num_kept
            added[block_idx] = self._take_first((Tier.GPU, *self._below) if is_near else (*self._below, Tier.GPU))
        lease.on_accelerator.update(block_idx for block_idx, block in added.items() if block.tier is Tier.GPU)
        lease.blocks.extend(_in_order(added))
        lease.table = ()

    def _take_first(self, tiers: tuple[Tier, ...]) -> BlockRef:
        for tier in tiers:
            if block := self._tiers.try_take(tier):
                return block
        raise InternalError("no tier has a free block, although there were enough")

    def _try_demote(self, lease: KVLease, block_idx: int) -> BlockMove | None:
        for tier in self._below:
            if move := self._tiers.begin_move(lease.blocks[block_idx], tier):
                lease.moving[block_idx] = move
                self._movers[move.move_id] = lease, block_idx
                return move
        return None

    def _check_open(self, lease: KVLease) -> None:
        if self._leases.get(lease.request_id) is not lease:
            raise InternalError(f"the lease of {lease.request_id} has ended")


def _in_order(added: Mapping[int, BlockRef]) -> list[BlockRef]:
    """The blocks by index, with the ids of each tier ascending: attention reads side by side what lies side by side."""
    ids = {tier: iter(sorted(b.block_id for b in added.values() if b.tier is tier)) for tier in Tier}
    return [BlockRef(added[block_idx].tier, next(ids[added[block_idx].tier])) for block_idx in sorted(added)]
