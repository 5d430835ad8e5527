"""`HostIds`: blocks of the CXL tier as blocks of the pool in host memory, behind those whose K lies in DRAM.

To the control plane they are two tiers, between which blocks move; their bytes are in one pool, whose pages lie on two
nodes, so that who reads or copies them knows one tier of the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.step import BlockMove, BlockRef, StepPlan, StepResult

Launched = TypeVar("Launched")


class HostIds:
    """Where the bytes of a block are.

    Args:
        num_near: blocks of the pool whose K lies in DRAM; the first of the CXL tier comes behind them.
    """

    def __init__(self, num_near: int) -> None:
        self._num_near = num_near
        self._tables: dict[RequestId, tuple[tuple[BlockRef, ...], tuple[BlockRef, ...]]] = {}

    def place(self, block: BlockRef) -> BlockRef:
        """The block of a pool that is meant."""
        if block.tier is not Tier.CXL:
            return block
        return BlockRef(Tier.DRAM, BlockId(self._num_near + block.block_id))

    def merge(self, plan: StepPlan) -> StepPlan:
        """The plan with every block of the CXL tier as one of the pool."""
        for request_id in plan.finished_requests:
            self._tables.pop(request_id, None)
        requests = tuple(
            replace(request, blocks=self._table(request.request_id, request.blocks)) for request in plan.requests
        )
        return replace(plan, requests=requests, moves=tuple(map(self._move, plan.moves)))

    def _move(self, move: BlockMove) -> BlockMove:
        return replace(move, source=self.place(move.source), target=self.place(move.target))

    def named(self, result: StepResult) -> StepResult:
        """The result with the blocks of the pool as the control plane names them."""
        if result.kept_keys is None:
            return result
        return replace(result, kept_keys={self._name(block): num for block, num in result.kept_keys.items()})

    def _name(self, block: BlockRef) -> BlockRef:
        if block.tier is not Tier.DRAM or block.block_id < self._num_near:
            return block
        return BlockRef(Tier.CXL, BlockId(block.block_id - self._num_near))

    def _table(self, request_id: RequestId, blocks: tuple[BlockRef, ...]) -> tuple[BlockRef, ...]:
        """The blocks of a request; the same object as long as it is handed the same."""
        known = self._tables.get(request_id)
        if known is None or known[0] is not blocks:
            known = self._tables[request_id] = (blocks, tuple(map(self.place, blocks)))
        return known[1]


class _Steps(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class MergedExecutor:
    """Another executor, which is told of one pool where the plan names two tiers."""

    def __init__(self, steps: _Steps, ids: HostIds) -> None:
        self._steps = steps
        self._ids = ids

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the plan."""
        return self._ids.named(self._steps.execute(self._ids.merge(plan)))

    def before(self, launch: Callable[[StepPlan], Launched]) -> Callable[[StepPlan], Launched]:
        """The same in front of another way to carry out plans."""
        return lambda plan: launch(self._ids.merge(plan))
