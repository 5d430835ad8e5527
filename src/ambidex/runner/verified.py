"""The executor of `--verify`: keys and values in host memory are checked before a step reads them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from ambidex.core.errors import IntegrityError
from ambidex.core.ids import RequestId
from ambidex.core.step import ScheduledRequest, StepPlan, StepResult
from ambidex.storage.checksums import BlockChecksums

SAMPLE_BYTES: Final = 16 * 2**20
"""Bytes that are checked before a step, at least one block: some 10 ms at 1.5 GB/s."""


class VerifiedExecutor:
    """Another executor. Of the complete blocks in host memory that a step reads, a sample is checked first; the next
    step goes on where it ended, so that all are checked in turn. Requests that read a changed block fail before
    anything is computed from it.

    Args:
        execute: carries out a step.
        checksums: of the pool in host memory.
        device: the accelerator, which may still be writing when a step has been carried out.
        sample_bytes: of a step.
    """

    def __init__(
        self,
        execute: Callable[[StepPlan], StepResult],
        checksums: BlockChecksums,
        *,
        device: torch.device,
        sample_bytes: int = SAMPLE_BYTES,
    ) -> None:
        self._execute = execute
        self._checksums = checksums
        self._device = device
        self._num_sampled = max(1, sample_bytes // checksums.pool.spec.bytes_per_block)
        self._last_checked = -1

    def execute(self, plan: StepPlan) -> StepResult:
        """Check, compute, and note the checksums of blocks that became complete."""
        owners = self._owners(plan)
        sample = self._next_sample(sorted(owners))
        failures: dict[RequestId, str] = {}
        num_corrupt = 0
        for block_id in sample:
            try:
                self._checksums.check(block_id)
            except IntegrityError as error:
                num_corrupt += 1
                failures |= dict.fromkeys(owners[block_id], str(error))
        plan = replace(plan, requests=tuple(r for r in plan.requests if r.request_id not in failures))
        for request in plan.requests:
            for block_id, _ in self._written(request):
                self._checksums.forget(block_id)
        result = self._execute(plan)
        self._note_complete(plan, result)
        return replace(
            result,
            failures={**result.failures, **failures},
            num_verified_blocks=len(sample),
            num_corrupt_blocks=num_corrupt,
        )

    def _owners(self, plan: StepPlan) -> Mapping[int, list[RequestId]]:
        """Who reads which of the blocks that have a checksum; several requests may share one."""
        owners: dict[int, list[RequestId]] = {}
        for request in plan.requests:
            for block in request.blocks[: request.start // self._block_size]:
                if block.tier is self._checksums.pool.tier and block.block_id in self._checksums:
                    owners.setdefault(block.block_id, []).append(request.request_id)
        return owners

    def _next_sample(self, block_ids: list[int]) -> list[int]:
        """The blocks whose turn it is: those behind the last one that was checked, then from the beginning."""
        behind = [block_id for block_id in block_ids if block_id > self._last_checked]
        sample = (behind + block_ids)[: min(self._num_sampled, len(block_ids))]
        if sample:
            self._last_checked = sample[-1]
        return sample

    def _written(self, request: ScheduledRequest) -> Iterator[tuple[int, bool]]:
        """Blocks of the pool that a step writes for a request, and whether they are complete then."""
        end = request.start + len(request.token_ids)
        for index in range(request.start // self._block_size, len(request.blocks)):
            if request.blocks[index].tier is self._checksums.pool.tier:
                yield request.blocks[index].block_id, (index + 1) * self._block_size <= end

    def _note_complete(self, plan: StepPlan, result: StepResult) -> None:
        undone = result.failures.keys() | result.out_of_memory.keys()
        complete = [
            block_id
            for request in plan.requests
            if request.request_id not in undone
            for block_id, is_complete in self._written(request)
            if is_complete
        ]
        if complete and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for block_id in complete:
            self._checksums.note(block_id)

    @property
    def _block_size(self) -> int:
        return self._checksums.pool.spec.block_size
