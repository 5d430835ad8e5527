"""`StepDraft`: a step while it is put together; `InFlight`: what is kept of its plan until that comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ambidex.core.ids import RequestId
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import BlockMove, BlockRef, NewRequest, ScheduledRequest, StepPlan
from ambidex.kv.manager import KVManager
from ambidex.sched.budget import TokenBudget
from ambidex.sched.entry import Entry


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan that has not come back."""

    entries: Mapping[RequestId, Entry]
    ends: Mapping[RequestId, int]
    """By request whose next token is sampled: the tokens that are computed of it then."""
    finished: Sequence[RequestId]
    """Requests that the executor may forget."""

    def is_of(self, plan: StepPlan) -> bool:
        """Whether it is this plan, by its requests."""
        return self.entries.keys() == {chunk.request_id for chunk in plan.requests}


@dataclass(slots=True)
class StepDraft:
    """A step that is being put together."""

    budget: TokenBudget
    chunks: list[ScheduledRequest] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    entries: dict[RequestId, Entry] = field(default_factory=dict)

    def add(self, entry: Entry, num_tokens: int, blocks: tuple[BlockRef, ...]) -> None:
        """Compute a request's tokens up to `num_tokens`; its blocks cover them."""
        request, start = entry.request, entry.request.num_computed_tokens
        is_sampled = num_tokens == request.num_tokens
        self.budget.take(num_tokens - start)
        self.entries[entry.request_id] = entry
        self.chunks.append(
            ScheduledRequest(
                request_id=entry.request_id,
                token_ids=request.token_ids(start, num_tokens),
                start=start,
                blocks=blocks,
                is_sampled=is_sampled,
                allowed_tokens=request.allowed_tokens if is_sampled else None,
            )
        )

    def add_pending(self, entry: Entry, num_tokens: int, blocks: tuple[BlockRef, ...]) -> None:
        """Compute the token of a request that the running step gives it, the last of `num_tokens`."""
        self.budget.take(1)
        self.entries[entry.request_id] = entry
        self.chunks.append(
            ScheduledRequest(
                request_id=entry.request_id,
                token_ids=(0,),
                start=num_tokens - 1,
                blocks=blocks,
                is_sampled=True,
                is_pending=True,
            )
        )

    @property
    def is_decode(self) -> bool:
        """There are requests, and each computes one token."""
        return bool(self.chunks) and all(len(chunk.token_ids) == 1 for chunk in self.chunks)

    def read_copies(self, kv: KVManager) -> None:
        """Read blocks from their copies, where there are any: once all blocks of the step are taken, for whose sake
        copies may have gone."""
        for place, chunk in enumerate(self.chunks):
            lease = self.entries[chunk.request_id].lease
            assert lease is not None, "a request of the step runs"
            blocks = kv.with_copies(lease, chunk.blocks, num_old=chunk.start // kv.block_size)
            if blocks is not chunk.blocks:
                self.chunks[place] = replace(chunk, blocks=blocks)

    def close(
        self,
        moves: tuple[BlockMove, ...],
        finished: Sequence[RequestId],
        selection: SelectionSetting | None = None,
        *,
        is_look: bool = False,
    ) -> tuple[StepPlan, InFlight]:
        """The plan, and what to keep of it.

        Args:
            finished: requests that the executor may forget.
            selection: what a policy that is steered shall select.
            is_look: the result shall say of which blocks keys were kept.
        """
        ends = {chunk.request_id: chunk.start + len(chunk.token_ids) for chunk in self.chunks if chunk.is_sampled}
        plan = StepPlan(
            requests=tuple(self.chunks),
            moves=moves,
            new_requests=tuple(self.new_requests),
            finished_requests=tuple(finished),
            selection=selection,
            is_look=is_look,
        )
        return plan, InFlight(self.entries, ends, plan.finished_requests)
