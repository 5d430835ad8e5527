"""`Scheduler`: who computes which tokens in the next step, and what follows from what the step gave.

One counter a request, `num_computed_tokens`, catches up with `num_tokens`; prefill, its chunks, decode and computing
again after a preemption are the same thing. Running requests come first, in the order in which they started, then
those that had to yield, then the others, as `FairQueue` orders them. When blocks run out, the running request that
started last yields: its blocks are freed and it computes again later, before any other starts. The one that needs the
blocks never yields itself: if it started last, it keeps what it has and sits the step out. So the request that started
first always advances, and each ends.

A request begins behind the blocks that the prefix cache has of it, also when it begins again after it has yielded.

Where a policy keeps rows of K and V beside the blocks, a request starts only if there is room for those of all its
tokens to come, and keeps that room until it ends, also while it has yielded.

A request for whose chunk the accelerator had no memory tries again with half of it, down to one block, then fails.

Each plan must come back through `update` before the next `schedule`, an empty one too (as `StepResult()` if there is
nothing to report). A move that a result does not name stays in flight, and its blocks with it. `schedule_ahead` makes
one more plan before the last one has come back, if nothing but its tokens is missing (`ahead.py`).
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable

from ambidex.core.errors import ContextLengthError, InternalError, RequestError
from ambidex.core.hot import HotFigures
from ambidex.core.ids import RequestId
from ambidex.core.request import FinishReason, Request, RequestStatus
from ambidex.core.step import BlockMove, NewRequest, SampledToken, ScheduledRequest, StepPlan, StepResult
from ambidex.kv.block_keys import BlockKeys
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager, PrefixHit
from ambidex.kv.prefix_cache import PrefixCacheStats
from ambidex.sched.admission import Admission, AdmissionState, decide_admission
from ambidex.sched.ahead import find_next_lens
from ambidex.sched.budget import TokenBudget
from ambidex.sched.draft import InFlight, StepDraft
from ambidex.sched.entry import Entry
from ambidex.sched.feedback import SelectionFeedback
from ambidex.sched.hot import HotBlocks
from ambidex.sched.queue import RequestQueues

logger = logging.getLogger(__name__)

Restore = Callable[[Request, BlockKeys, PrefixHit], bool]


class Scheduler:
    """Continuous batching over a `KVManager`.

    Args:
        max_tokens_per_step: token budget of one step; longer prompts are computed in chunks.
        max_running_requests: requests that hold blocks at the same time.
        max_context_len: prompt and answer of a request together, in tokens, whatever the request allows.
        max_kept_rows: tokens of all requests of which a policy can keep rows beside the blocks, at least the context
            limit; None: none does.
        seed: from it and the order of arrival follow the seeds of requests that bring none.
        feedback: steers the policy that chooses keys; None: nobody does.
        hot: has blocks in host memory copied to the accelerator; None: nobody does.
        restore: brings more of a request's prefix into the prefix cache than was found there, if it can; None: nobody
            does.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_tokens_per_step: int,
        max_running_requests: int,
        max_context_len: int,
        max_kept_rows: int | None = None,
        seed: int = 0,
        feedback: SelectionFeedback | None = None,
        hot: HotBlocks | None = None,
        restore: Restore | None = None,
    ) -> None:
        self._kv = kv
        self._feedback = feedback
        self._hot = hot
        self._restore = restore
        self._max_tokens_per_step = max_tokens_per_step
        self._max_running_requests = max_running_requests
        self._max_context_len = max_context_len
        self._max_kept_rows = max_kept_rows
        self._num_kept_rows = 0
        self._seed = seed
        self._queues = RequestQueues()
        self._in_flight: deque[InFlight] = deque()  # one plan, or one and the one that follows it
        self._gone: list[RequestId] = []  # announced to the executor, to be forgotten by it
        self._failed: list[Request] = []  # failed while scheduling, to be reported by `update`
        self._lacks_blocks = False  # so somebody waits
        self._num_preemptions = 0
        self._num_cached_tokens = 0
        self._num_smaller_chunks = 0

    @property
    def has_work(self) -> bool:
        """Whether another step is needed: to compute, to end moves, to tell the executor whom to forget, or to take in
        what one gave."""
        return bool(
            self.num_running or self.num_waiting or self._gone or self._failed or self._kv.num_moves or self._in_flight
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return self._queues.num_running

    @property
    def num_preemptions(self) -> int:
        """Times that a running request had to yield."""
        return self._num_preemptions

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefix cache has spared from being computed."""
        return self._num_cached_tokens

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache holds and has done."""
        return self._kv.cache_stats()

    def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held."""
        return self._kv.drop_cached(tenant)

    def check(self) -> None:
        """The books of all tiers are right.

        Raises:
            InternalError: they are not.
        """
        self._kv.check()

    @property
    def num_smaller_chunks(self) -> int:
        """Times that the accelerator had no memory for a chunk, so that a smaller one was tried."""
        return self._num_smaller_chunks

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, or a request of that name has not ended.
            ContextLengthError: the prompt leaves no room for an answer.
        """
        if not request.prompt_token_ids:
            raise RequestError(f"the prompt of request {request.request_id} has 0 tokens: at least 1 is needed")
        limit = min(request.max_total_tokens, self._max_context_len)
        if len(request.prompt_token_ids) >= limit:
            raise ContextLengthError(len(request.prompt_token_ids), limit)
        if self._queues.find(request.request_id):
            raise RequestError(f"request {request.request_id} has not ended: choose another name")
        entry = self._queues.add(request)
        entry.keys = self._kv.make_keys(tenant=request.tenant, salt=request.cache_salt)

    def abort(self, request_id: RequestId) -> bool:
        """End a request now, in whatever state it is; False if none of that name is left."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: RequestId, reason: FinishReason, error: str | None = None) -> bool:
        """End a request for a reason of the caller's (a stop string); False if none of that name is left.

        A token that the current step still computes for it is dropped.
        """
        entry = self._queues.find(request_id)
        if entry:
            self._end(entry, reason, error)
        return entry is not None

    def schedule(self) -> StepPlan:
        """Decide on the next step.

        Raises:
            InternalError: the last plan has not come back through `update`.
        """
        if self._in_flight:
            raise InternalError("schedule() is called before the last plan came back through update()")
        draft = StepDraft(TokenBudget(self._max_tokens_per_step))
        self._continue_running(draft)
        self._start_waiting(draft)
        num_computed = {_lease(entry): entry.request.num_computed_tokens for entry in self._queues.running()}
        moves, is_look = self._kv.begin_demotions(num_computed), False
        if self._hot is not None:
            copies, is_look = self._hot.begin_step(num_computed, is_decode=draft.is_decode and not self._lacks_blocks)
            moves = (*moves, *copies)
            if not is_look:
                draft.read_copies(self._kv)
        if not draft.chunks and (self.num_running or self.num_waiting) and not self._kv.num_moves:
            raise InternalError(f"no request can run: {self._kv.usage()}")
        return self._close(draft, moves, is_look=is_look)

    def schedule_ahead(self) -> StepPlan | None:
        """Decide on the step behind the one whose plan is under way, before its tokens are known.

        Returns:
            A plan of `is_pending` requests, without moves or new requests; None if the next step depends on more than
            the tokens of this one. What is computed for a request that ends with its token is dropped by `update`.
        Raises:
            InternalError: not exactly one plan is under way.
        """
        if len(self._in_flight) != 1:
            raise InternalError(f"schedule_ahead() is called while {len(self._in_flight)} plans are under way")
        if self._failed or self._may_start_one():
            return None
        if self._hot is not None and self._kv.copies:  # they come and are named in steps that are planned in turn
            return None
        lens = find_next_lens(self._queues.running(), self._in_flight[0].ends, self._kv, self._max_len)
        if lens is None:
            return None
        draft = StepDraft(TokenBudget(self._max_tokens_per_step))
        if len(lens) > draft.budget.num_left:
            return None
        for entry, num_tokens in lens:
            if not self._kv.try_extend(_lease(entry), num_tokens, num_known_tokens=num_tokens):
                raise InternalError(f"request {entry.request_id} does not fit, although there were enough blocks")
            draft.add_pending(entry, num_tokens, self._kv.table(_lease(entry), num_tokens))
        return self._close(draft, ())

    @property
    def feedback(self) -> SelectionFeedback | None:
        """What steers the policy that chooses keys; None: nobody does."""
        return self._feedback

    @property
    def hot_figures(self) -> HotFigures | None:
        """What came of copying hot blocks; None: nobody does."""
        return None if self._hot is None else self._hot.figures

    def withdraw(self) -> None:
        """The plan of `schedule_ahead`, if there is one behind the one under way, is not carried out."""
        if len(self._in_flight) == 2:
            self._gone[:0] = self._in_flight.pop().finished

    def update(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in what a step gave; returns the requests that got a token or ended in it, aborted ones excepted.

        A stop token is appended to `output_token_ids` like any other: whoever shows the answer leaves it out when
        `finish_reason` is STOP. It ends the answer only behind `min_output_tokens` other tokens.

        Raises:
            InternalError: the result does not fit the plan, or the plan is not the one that is to come back next.
        """
        if not self._in_flight or not self._in_flight[0].is_of(plan):
            raise InternalError("update() is called with a plan that is not the next one of schedule()")
        in_step = self._in_flight.popleft().entries
        _check_result(plan, result)
        if self._feedback is not None:
            self._feedback.update(result.stages)
        self._kv.finish_moves(result.finished_moves, result.failed_moves)
        if self._hot is not None:
            self._hot.end_step(plan, result)
        changed, self._failed = self._failed, []
        for chunk in plan.requests:
            entry = in_step[chunk.request_id]
            if entry.request.status is not RequestStatus.RUNNING:  # ended while the step ran
                continue
            if chunk.is_pending and entry.request.num_computed_tokens != chunk.start:  # its token did not come
                continue
            error = result.failures.get(chunk.request_id)
            if (reason := result.out_of_memory.get(chunk.request_id)) is not None and error is None:
                if self._try_smaller(entry, chunk, reason):
                    continue
                error = (
                    f"no memory left on the accelerator for {_tokens(len(chunk.token_ids))} of this request: {reason}"
                )
            if error is not None:
                self._end(entry, FinishReason.ERROR, error)
            else:
                self._advance(entry, chunk, result.tokens.get(chunk.request_id))
            if chunk.is_sampled or error is not None:
                changed.append(entry.request)
        return changed

    def _continue_running(self, draft: StepDraft) -> None:
        for entry in self._queues.running():
            if entry.request.status is not RequestStatus.RUNNING or not draft.budget.num_left:
                return  # it yielded to an older one, and so did all behind it; or there is nothing left to give
            num_tokens = _next_len(entry, draft)
            if self._kv.num_missing_blocks(None, num_tokens) > self._kv.num_blocks:
                self._fail(entry)
            elif self._make_room(entry, num_tokens):
                draft.add(entry, num_tokens, self._kv.table(_lease(entry), num_tokens))

    def _start_waiting(self, draft: StepDraft) -> None:
        self._lacks_blocks = False
        while entry := self._queues.first_waiting:
            prefix = self._kv.find_prefix(entry.keys, entry.request.token_ids, entry.request.num_tokens)
            decision = decide_admission(self._admission_state(entry, prefix, draft.budget))
            if decision is Admission.NEVER_FITS:
                self._fail(entry)
                continue
            if decision is not Admission.ADMIT:
                self._lacks_blocks = decision is Admission.NO_BLOCKS
                return
            if self._restore is not None and entry.keys is not None and not entry.is_restored:
                entry.is_restored = True
                if self._restore(entry.request, entry.keys, prefix):
                    continue  # look again: more of it is there now
            entry.lease = self._kv.open(entry.request_id, prefix)
            self._queues.start(entry)
            self._skip(entry, prefix.num_tokens)
            num_tokens = _next_len(entry, draft)
            if not self._try_extend(entry, num_tokens):
                raise InternalError(f"request {entry.request_id} was admitted, but does not fit")
            draft.add(entry, num_tokens, self._kv.table(_lease(entry), num_tokens))
            if not entry.is_announced:
                draft.new_requests.append(self._announce(entry))

    def _make_room(self, entry: Entry, num_tokens: int) -> bool:
        while not self._try_extend(entry, num_tokens):
            victim = self._queues.last_running
            if victim is None or victim is entry:
                return False
            self._preempt(victim)
        return True

    def _try_extend(self, entry: Entry, num_tokens: int) -> bool:
        return self._kv.try_extend(_lease(entry), num_tokens, num_known_tokens=entry.request.num_tokens)

    def _close(self, draft: StepDraft, moves: tuple[BlockMove, ...], *, is_look: bool = False) -> StepPlan:
        finished, self._gone = self._gone, []
        selection = self._feedback.setting if self._feedback is not None else None
        plan, in_flight = draft.close(moves, finished, selection, is_look=is_look)
        self._in_flight.append(in_flight)
        return plan

    def _may_start_one(self) -> bool:
        """Whether the first waiting request could start, or could only be refused."""
        entry = self._queues.first_waiting
        if entry is None:
            return False
        if self._queues.num_running >= self._max_running_requests:
            return False
        prefix = self._kv.find_prefix(entry.keys, entry.request.token_ids, entry.request.num_tokens)
        state = self._admission_state(entry, prefix, TokenBudget(self._max_tokens_per_step))
        return decide_admission(state) not in (Admission.NO_BLOCKS, Admission.NO_ROWS)

    def _skip(self, entry: Entry, num_tokens: int) -> None:
        """The first tokens of a request that starts are there already."""
        request = entry.request
        request.num_computed_tokens = num_tokens
        self._num_cached_tokens += num_tokens
        if not entry.is_announced:
            request.num_cached_tokens = num_tokens
            self._queues.charge(entry, request.num_tokens - num_tokens)

    def _admission_state(self, entry: Entry, prefix: PrefixHit, budget: TokenBudget) -> AdmissionState:
        return AdmissionState(
            num_needed_blocks=self._kv.num_missing_blocks(None, entry.request.num_tokens),
            num_cached_blocks=len(prefix.blocks),
            num_reserved_blocks=sum(self._num_reserved_blocks(running) for running in self._queues.running()),
            num_free_blocks=self._kv.num_free_blocks - prefix.num_idle,
            num_total_blocks=self._kv.num_blocks,
            num_running=self._queues.num_running,
            max_running=self._max_running_requests,
            num_budget_tokens=budget.num_left,
            num_needed_rows=0 if entry.is_announced else self._num_rows(entry),
            num_free_rows=(self._max_kept_rows or 0) - self._num_kept_rows,
        )

    def _num_rows(self, entry: Entry) -> int:
        """Rows that a policy keeps of a request from when it is announced until it ends."""
        return 0 if self._max_kept_rows is None else self._max_len(entry.request)

    def _num_reserved_blocks(self, entry: Entry) -> int:
        num_soon = entry.request.num_tokens + self._kv.block_size
        num_at_most = self._max_len(entry.request) - 1  # the last token of an answer is never computed
        return self._kv.num_missing_blocks(entry.lease, min(num_soon, num_at_most))

    def _announce(self, entry: Entry) -> NewRequest:
        entry.is_announced = True
        self._num_kept_rows += self._num_rows(entry)
        request = entry.request
        seed = request.params.seed if request.params.seed is not None else _derive_seed(self._seed, entry.arrival)
        return NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            seed=seed,
            max_tokens=self._max_len(request),
            stop_ids=request.stop_ids,
        )

    def _preempt(self, entry: Entry) -> None:
        self._queues.requeue(entry)
        self._release(entry)
        entry.is_restored = False
        entry.request.num_computed_tokens = 0
        entry.request.num_preemptions += 1
        self._num_preemptions += 1
        logger.info("request %s yields its KV blocks and computes again later", entry.request_id)

    def _advance(self, entry: Entry, chunk: ScheduledRequest, token: SampledToken | None) -> None:
        request = entry.request
        request.num_computed_tokens = chunk.start + len(chunk.token_ids)
        self._kv.keep_computed(_lease(entry), entry.keys, request.token_ids, request.num_computed_tokens)
        if not chunk.is_sampled or token is None:
            return
        request.output_token_ids.append(token.token_id)
        self._queues.charge(entry, 1)
        reason = self._finish_reason(request)
        if reason:
            self._end(entry, reason)

    def _try_smaller(self, entry: Entry, chunk: ScheduledRequest, reason: str) -> bool:
        """Let the request go on with half the chunk, in whole blocks; False if it was one block or less."""
        num_tokens, size = len(chunk.token_ids), self._kv.block_size
        if num_tokens <= size:
            return False
        entry.max_chunk = max(size, num_tokens // 2 // size * size)
        self._num_smaller_chunks += 1
        level = logging.WARNING if self._num_smaller_chunks == 1 else logging.INFO
        logger.log(
            level, "request %s goes on with chunks of %s: no memory on the accelerator for %d: %s",
            entry.request_id, _tokens(entry.max_chunk), num_tokens, reason,
        )  # fmt: skip
        return True

    def _finish_reason(self, request: Request) -> FinishReason | None:
        num_output = len(request.output_token_ids)
        if request.output_token_ids[-1] in request.stop_ids and num_output > request.params.min_output_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self._max_len(request) else None

    def _max_len(self, request: Request) -> int:
        limit = min(request.max_total_tokens, self._max_context_len)
        if request.params.max_output_tokens is None:
            return limit
        return min(limit, len(request.prompt_token_ids) + request.params.max_output_tokens)

    def _fail(self, entry: Entry) -> None:
        num_needed = self._kv.num_missing_blocks(None, entry.request.num_tokens)
        error = (
            f"a context of {entry.request.num_tokens} tokens needs {num_needed} KV blocks, all tiers together have "
            f"{self._kv.num_blocks} of {self._kv.block_size} tokens: raise `kv_gpu_tokens` or `dram_memory`"
        )
        self._end(entry, FinishReason.ERROR, error)
        self._failed.append(entry.request)

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        self._queues.remove(entry)
        self._release(entry, is_trusted=reason is not FinishReason.ERROR)
        entry.request.finish_reason = reason
        entry.request.error = error
        if entry.is_announced:
            self._num_kept_rows -= self._num_rows(entry)
            self._gone.append(entry.request_id)

    def _release(self, entry: Entry, *, is_trusted: bool = True) -> None:
        if entry.lease:
            self._kv.release(entry.lease, is_trusted=is_trusted)
            entry.lease = None


def _next_len(entry: Entry, draft: StepDraft) -> int:
    num_computed = entry.request.num_computed_tokens
    num_wanted = entry.request.num_tokens - num_computed
    return num_computed + draft.budget.offer(min(num_wanted, entry.max_chunk or num_wanted))


def _tokens(num: int) -> str:
    return f"{num} token{'s' * (num != 1)}"


def _lease(entry: Entry) -> KVLease:
    if entry.lease is None:
        raise InternalError(f"request {entry.request_id} runs without a lease")
    return entry.lease


def _check_result(plan: StepPlan, result: StepResult) -> None:
    unable = result.failures.keys() | result.out_of_memory.keys()
    answered = result.tokens.keys() | unable
    missing = {chunk.request_id for chunk in plan.requests if chunk.is_sampled} - answered
    unasked = result.tokens.keys() - {chunk.request_id for chunk in plan.requests if chunk.is_sampled}
    unknown = unable - {chunk.request_id for chunk in plan.requests}
    if missing or unasked or unknown:
        raise InternalError(
            f"the result does not fit the plan: no token for {sorted(missing)}, a token unasked for {sorted(unasked)}, "
            f"a failure of unknown {sorted(unknown)}"
        )


def _derive_seed(seed: int, arrival: int) -> int:
    digest = hashlib.blake2b(f"{seed} {arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # 63 bits: what a signed 64-bit seed holds
