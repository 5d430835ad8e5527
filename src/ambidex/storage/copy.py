"""`CopyEngine`: carries out the block moves of a step. What moves, and what a failure means, is decided in `kv/`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from ambidex.core.errors import CopyError
from ambidex.core.ids import MoveId, Tier
from ambidex.core.step import BlockMove
from ambidex.storage.kv_pool import KVPool

logger = logging.getLogger(__name__)


class CopyBlock(Protocol):
    """Copies K and V of one block, all layers; raises CopyError or RuntimeError (torch's) if it cannot."""

    def __call__(self, source: KVPool, source_id: int, target: KVPool, target_id: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutcome:
    """Which moves of a step arrived and which did not; together they are all that were asked for."""

    finished: tuple[MoveId, ...]
    failed: tuple[MoveId, ...]


def copy_block(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
    """Copy one block between two pools; where their orders or formats differ, it is laid out anew on the way.

    Cost: one copy of K and one of V; across devices the host waits for them.
    Raises:
        CopyError: a block id lies outside its pool.
    """
    for pool, block_id in ((source, source_id), (target, target_id)):
        if not 0 <= block_id < pool.num_blocks:
            raise CopyError(f"block {block_id} is not on tier {pool.tier}, which has {pool.num_blocks} blocks")
    if source.spec == target.spec:
        for to, part in zip(target.tensors, source.tensors, strict=True):
            to[:, :, target_id].copy_(part[:, :, source_id])
    else:
        target.write_block(target_id, *source.read_block(source_id))


class CopyEngine:
    """Moves blocks between the pools.

    On CUDA the copies run on a stream of their own, behind what the current stream was given before; `run` returns when
    they are done, so whoever reads a target afterwards, on the host or on any stream, finds it complete.

    Args:
        pools: the pool of each tier.
        copy: how one block is copied; a test may hand in one that fails.
    """

    def __init__(self, pools: Mapping[Tier, KVPool], *, copy: CopyBlock = copy_block) -> None:
        self._pools = dict(pools)
        self._copy = copy
        self._last_failure = ""
        devices = {pool.device for pool in self._pools.values() if pool.device.type == "cuda"}
        self._stream: torch.cuda.Stream | None = None
        if devices:
            self._stream = torch.cuda.Stream(devices.pop())  # type: ignore[no-untyped-call]  # torch has no types here

    def run(self, moves: Sequence[BlockMove]) -> MoveOutcome:
        """Carry out the moves, each for itself: one that fails is reported and the others go on.

        Cost: copies `len(moves)` blocks and waits for them.
        """
        if not moves:
            return MoveOutcome(finished=(), failed=())
        with self._on_stream():
            failed = {move.move_id for move in moves if not self._try_copy(move)}
        if not self._try_sync():
            failed = {move.move_id for move in moves}
        return MoveOutcome(
            finished=tuple(move.move_id for move in moves if move.move_id not in failed),
            failed=tuple(move.move_id for move in moves if move.move_id in failed),
        )

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _try_copy(self, move: BlockMove) -> bool:
        source, target = move.source, move.target
        try:
            self._copy(self._pool(source.tier), source.block_id, self._pool(target.tier), target.block_id)
        except (CopyError, RuntimeError) as error:
            # A link that is down fails every copy of every step: the same words are said once.
            level = logging.DEBUG if str(error) == self._last_failure else logging.WARNING
            self._last_failure = str(error)
            logger.log(level, "move %d of block %d from %s to %s failed: %s",
                       move.move_id, source.block_id, source.tier, target.tier, error)  # fmt: skip
            return False
        return True

    def _try_sync(self) -> bool:
        if self._stream is None:
            return True
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            logger.warning("the copy stream failed: %s", error)
            return False
        return True

    def _pool(self, tier: Tier) -> KVPool:
        if tier not in self._pools:
            raise CopyError(f"there is no pool of tier {tier}")
        return self._pools[tier]
