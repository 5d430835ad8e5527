"""An executor without a model: it keeps one number for each token slot and answers with a hash of what it reads there.

So a token depends on the whole history as found through the block tables: a wrong table, a lost copy or a reused block
gives another token than `expected_answer`, which knows nothing of scheduling. It is adversarial where the contract
allows it: targets of moves hold garbage until the step's end, and for ever if the copy fails; moves end late if asked.
"""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import replace

from ambidex.core.ids import MoveId, RequestId, Tier
from ambidex.core.request import FinishReason, SamplingParams
from ambidex.core.step import BlockMove, BlockRef, SampledToken, ScheduledRequest, StepPlan, StepResult

VOCAB_SIZE = 23
GARBAGE = -1


def next_token(history: Iterable[int]) -> int:
    """The token that follows a history."""
    return hashlib.blake2b(repr(tuple(history)).encode(), digest_size=2).digest()[0] % VOCAB_SIZE


def expected_answer(
    prompt: tuple[int, ...], params: SamplingParams, stop_ids: frozenset[int], max_len: int
) -> tuple[list[int], FinishReason]:
    """The answer of a request that nothing disturbs, and why it ends."""
    output: list[int] = []
    max_output = min(params.max_output_tokens or max_len, max_len - len(prompt))
    while len(output) < max_output:
        output.append(next_token((*prompt, *output)))
        if output[-1] in stop_ids and len(output) > params.min_output_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


class FakeExecutor:
    """Executes plans.

    Args:
        move_failures, move_delays: share of moves that fail, and of steps in which a move goes on to the next one.
        request_failures: share of a step's requests that fail.
        memory_shortages: share of chunks for which there is no memory; what they stored is not what they should have.
        looks: draws the keys that a look says were kept of each block that it reads in host memory; None: it says
            nothing.
    """

    def __init__(
        self,
        *,
        block_size: int,
        rng: random.Random | None = None,
        move_failures: float = 0.0,
        move_delays: float = 0.0,
        request_failures: float = 0.0,
        memory_shortages: float = 0.0,
        looks: random.Random | None = None,
    ) -> None:
        self._block_size = block_size
        self._rng = rng or random.Random(0)
        self._move_failures, self._move_delays = move_failures, move_delays
        self._request_failures = request_failures
        self._memory_shortages = memory_shortages
        self._looks = looks
        self._slots: dict[BlockRef, list[int]] = {}
        self._moves: dict[MoveId, BlockMove] = {}
        self.known: set[RequestId] = set()
        self.num_moves = 0
        self._last: StepResult = StepResult()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens; asserts what a plan promises."""
        self._meet(plan)
        self._begin_moves(plan)
        self._check_blocks(plan)
        tokens, failures, out_of_memory = {}, {}, {}
        for chunk in plan.requests:
            if self._rng.random() < self._memory_shortages:
                self._spoil(chunk)
                out_of_memory[chunk.request_id] = "made to be short"
                continue
            token = self._compute(chunk)
            if self._rng.random() < self._request_failures:
                failures[chunk.request_id] = "made to fail"
            elif chunk.is_sampled:
                tokens[chunk.request_id] = SampledToken(token_id=token)
        finished, failed = self._end_moves()
        self._last = StepResult(
            tokens=tokens,
            failures=failures,
            out_of_memory=out_of_memory,
            finished_moves=tuple(finished),
            failed_moves=tuple(failed),
            kept_keys=self._look(plan) if plan.is_look and self._looks is not None else None,
            seconds={"total": 1.0},
        )
        return self._last

    def _look(self, plan: StepPlan) -> dict[BlockRef, int]:
        assert self._looks is not None
        read = [block for chunk in plan.requests for block in chunk.blocks[: chunk.start // self._block_size]]
        kept = {block: self._looks.choice([0, 0, 1, 9]) for block in dict.fromkeys(read) if block.tier is not Tier.GPU}
        return {block: num for block, num in kept.items() if num}

    def _meet(self, plan: StepPlan) -> None:
        assert self.known >= set(plan.finished_requests), "a request ends that was never announced"
        self.known -= set(plan.finished_requests)
        new = [request.request_id for request in plan.new_requests]
        assert not self.known & set(new), "a request is announced twice"
        self.known |= set(new)
        assert self.known >= {chunk.request_id for chunk in plan.requests}, "an unknown request is scheduled"

    def _begin_moves(self, plan: StepPlan) -> None:
        for move in plan.moves:
            assert move.move_id not in self._moves
            self._moves[move.move_id] = move
            self._slots[move.target] = [GARBAGE] * self._block_size
        self.num_moves += len(plan.moves)

    def _check_blocks(self, plan: StepPlan) -> None:
        blocks = [block for chunk in plan.requests for block in chunk.blocks]
        assert all(len(set(chunk.blocks)) == len(chunk.blocks) for chunk in plan.requests), (
            "a context has a block twice"
        )
        targets = {move.target for move in self._moves.values()}
        assert len(targets) == len(self._moves), "a block is the target of two moves"
        assert not targets & set(blocks), "the target of an uncommitted move is read"
        sources = {move.source for move in self._moves.values()}
        written = [block for chunk in plan.requests for block in chunk.blocks[chunk.start // self._block_size :]]
        read = [block for chunk in plan.requests for block in chunk.blocks[: chunk.start // self._block_size]]
        assert len(set(written)) == len(written), "a block has two writers"
        assert not set(written) & set(read), "a block is written while another request reads it"
        assert not sources & set(written), "a block is written while it moves"

    def _compute(self, chunk: ScheduledRequest) -> int:
        if chunk.is_pending:
            last = self._last.tokens.get(chunk.request_id)  # None: it failed, and this is computed in vain
            chunk = replace(chunk, token_ids=(last.token_id if last is not None else 0,))
        end = chunk.start + len(chunk.token_ids)
        assert chunk.token_ids, "a request is scheduled for nothing"
        assert len(chunk.blocks) == -(-end // self._block_size), "the blocks do not cover the tokens"
        history = [
            self._slots[chunk.blocks[at // self._block_size]][at % self._block_size] for at in range(chunk.start)
        ]
        for at, token in enumerate(chunk.token_ids, start=chunk.start):
            slots = self._slots.setdefault(chunk.blocks[at // self._block_size], [GARBAGE] * self._block_size)
            slots[at % self._block_size] = token
        return next_token([*history, *chunk.token_ids])

    def _spoil(self, chunk: ScheduledRequest) -> None:
        for at in range(chunk.start, chunk.start + len(chunk.token_ids)):
            slots = self._slots.setdefault(chunk.blocks[at // self._block_size], [GARBAGE] * self._block_size)
            slots[at % self._block_size] = GARBAGE

    def _end_moves(self) -> tuple[list[MoveId], list[MoveId]]:
        finished, failed = [], []
        for move_id, move in list(self._moves.items()):
            if self._rng.random() < self._move_delays:
                continue
            del self._moves[move_id]
            if self._rng.random() < self._move_failures:
                failed.append(move_id)
            else:
                self._slots[move.target] = list(self._slots[move.source])
                finished.append(move_id)
        return finished, failed
