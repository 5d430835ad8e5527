"""The scheduler under random traffic, with tiny pools and an executor that fails and lags: every request ends, with the
tokens that it would have got alone, and every block comes back."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.request import FinishReason, Request, RequestStatus, SamplingParams
from ambidex.core.step import StepPlan
from ambidex.kv.manager import KVManager
from ambidex.kv.prefix_cache import PrefixCacheLimits
from ambidex.sched import hot
from ambidex.sched.scheduler import Scheduler
from fake_executor import VOCAB_SIZE, FakeExecutor, expected_answer

MAX_CONTEXT_LEN = 24
STOP_IDS = frozenset({0, 1})


@pytest.fixture(scope="module", autouse=True)
def hasty_copies() -> Iterator[None]:
    """Answers are short: every second step may be a look, and what was kept once is hot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot, "LEAST_INTERVAL", 2)
        patch.setattr(hot, "LOOKS", 1)
        yield


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A random load and the engine that it meets."""

    seed: int
    block_size: int
    gpu: int
    spare: int
    sink: int
    recent: int | None
    max_tokens_per_step: int
    max_running_requests: int
    num_requests: int
    arrivals: float
    aborts: float
    move_failures: float
    move_delays: float
    request_failures: float
    cache_percent: int
    num_tenants: int
    num_priorities: int
    memory_shortages: float
    aheads: float
    hot: int | None = None


TRAFFIC = st.builds(
    Traffic,
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 4),
    gpu=st.integers(0, 8),
    spare=st.integers(0, 6),
    sink=st.integers(0, 4),
    recent=st.none() | st.integers(0, 8),
    max_tokens_per_step=st.integers(1, 20),
    max_running_requests=st.integers(1, 5),
    num_requests=st.integers(1, 10),
    arrivals=st.sampled_from([0.3, 1.0]),
    aborts=st.sampled_from([0.0, 0.1]),
    move_failures=st.sampled_from([0.0, 0.3, 1.0]),
    move_delays=st.sampled_from([0.0, 0.5]),
    request_failures=st.sampled_from([0.0, 0.02]),
    cache_percent=st.sampled_from([0, 30, 100]),
    num_tenants=st.integers(1, 3),
    num_priorities=st.integers(1, 2),
    memory_shortages=st.sampled_from([0.0, 0.0, 0.1]),
    aheads=st.sampled_from([0.0, 0.5, 1.0]),
    hot=st.none() | st.integers(1, 8),
)


@dataclass
class Run:
    """One run of a load until nothing is left to do."""

    traffic: Traffic
    requests: list[Request] = field(default_factory=list)
    aborted: set[RequestId] = field(default_factory=set)
    reported: set[RequestId] = field(default_factory=set)
    started: list[RequestId] = field(default_factory=list)
    plans: list[list[tuple[RequestId, int, int]]] = field(default_factory=list)
    num_copies_read: int = 0
    next_plan: StepPlan | None = None

    def __post_init__(self) -> None:
        traffic = self.traffic
        self.rng = random.Random(traffic.seed)
        regions = Regions(block_size=traffic.block_size, num_sink_tokens=traffic.sink, recent_window=traffic.recent)
        num_blocks = -(-(MAX_CONTEXT_LEN - 1) // traffic.block_size) + traffic.spare
        gpu = min(traffic.gpu, num_blocks)
        limits = PrefixCacheLimits(max_idle_percent=traffic.cache_percent)
        self.kv = KVManager({Tier.GPU: gpu, Tier.DRAM: num_blocks - gpu}, regions, limits)
        self.scheduler = Scheduler(
            self.kv,
            max_tokens_per_step=traffic.max_tokens_per_step,
            max_running_requests=traffic.max_running_requests,
            max_context_len=MAX_CONTEXT_LEN,
            hot=None if traffic.hot is None else hot.HotBlocks(self.kv, most=traffic.hot, most_moves=2),
        )
        self.executor = FakeExecutor(
            block_size=traffic.block_size,
            rng=random.Random(traffic.seed + 1),
            move_failures=traffic.move_failures,
            move_delays=traffic.move_delays,
            request_failures=traffic.request_failures,
            memory_shortages=traffic.memory_shortages,
            looks=random.Random(traffic.seed),
        )

    def finish(self) -> None:
        """Step until the scheduler has no work; a generous limit of steps stands for "no deadlock"."""
        for _ in range(20 * self.traffic.num_requests * MAX_CONTEXT_LEN):
            while len(self.requests) < self.traffic.num_requests and self.rng.random() < self.traffic.arrivals:
                self._add()
            if len(self.requests) == self.traffic.num_requests and not self.scheduler.has_work:
                return
            self._step()
        raise AssertionError("the scheduler has work for ever")

    def _add(self) -> None:
        longest = self.rng.choice([4, 4, MAX_CONTEXT_LEN - 1])  # short prompts outgrow their blocks: preemption
        prompt_len = self.rng.randint(1, longest)
        max_output = self.rng.choice([None, None, 3])
        prompt = tuple(self.rng.randrange(VOCAB_SIZE) for _ in range(prompt_len))
        if self.requests and self.rng.random() < 0.6:  # a beginning that another request had, prompt and answer
            other = self.rng.choice(self.requests)
            shared = (*other.prompt_token_ids, *other.output_token_ids)[: self.rng.randint(1, prompt_len)]
            prompt = shared + prompt[len(shared) :]
        request = Request(
            request_id=RequestId(f"r{len(self.requests)}"),
            prompt_token_ids=prompt,
            params=SamplingParams(max_output_tokens=max_output, min_output_tokens=self.rng.choice([0, 1])),
            max_total_tokens=self.rng.choice([prompt_len + 1, MAX_CONTEXT_LEN, MAX_CONTEXT_LEN]),
            stop_ids=self.rng.choice([frozenset(), frozenset(), STOP_IDS]),
            tenant=str(self.rng.randrange(self.traffic.num_tenants)),
            priority=self.rng.randrange(self.traffic.num_priorities),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def _step(self) -> None:
        self._maybe_abort()
        plan, self.next_plan = self.next_plan or self.scheduler.schedule(), None
        self._check_plan(plan)
        self._maybe_abort()
        if self.rng.random() < self.traffic.aheads:
            self._plan_ahead()
        self._maybe_abort()
        result = self.executor.execute(plan)
        self._maybe_abort()
        changed = self.scheduler.update(plan, result)
        self.kv.check()
        for request in changed:
            if request.status is RequestStatus.FINISHED:
                assert request.request_id not in self.reported, "an end is reported twice"
                self.reported.add(request.request_id)

    def _plan_ahead(self) -> None:
        """Plan the next step before this one is carried out; now and then it is withdrawn."""
        plan = self.scheduler.schedule_ahead()
        if plan is None:
            return
        assert all(chunk.is_pending and chunk.is_sampled for chunk in plan.requests)
        assert plan.requests
        assert not plan.moves
        assert not plan.new_requests
        if self.rng.random() < 0.2:
            self.scheduler.withdraw()
        else:
            self.next_plan = plan
        self.kv.check()

    def _maybe_abort(self) -> None:
        if self.requests and self.rng.random() < self.traffic.aborts:
            request = self.rng.choice(self.requests)
            is_alive = request.status is not RequestStatus.FINISHED
            assert self.scheduler.abort(request.request_id) == is_alive
            if is_alive:
                self.aborted.add(request.request_id)
            self.kv.check()

    def _check_plan(self, plan: StepPlan) -> None:
        self.kv.check()
        assert plan.num_tokens <= self.traffic.max_tokens_per_step
        assert self.scheduler.num_running <= self.traffic.max_running_requests
        ids = [chunk.request_id for chunk in plan.requests]
        assert len(set(ids)) == len(ids)
        self.started += [request.request_id for request in plan.new_requests]
        self.plans.append([(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.requests])
        self._check_copies(plan)
        places = [self.started.index(request_id) for request_id in ids]
        assert places == sorted(places), "requests are not served in the order in which they started"
        if self.traffic.num_tenants == self.traffic.num_priorities == 1:
            arrivals = [int(request_id[1:]) for request_id in self.started]
            assert arrivals == sorted(arrivals), "requests do not start in order of arrival"

    def _check_copies(self, plan: StepPlan) -> None:
        """A look reads none, other steps all, in the places of their blocks; there are never too many."""
        copies = self.kv.copies
        assert len(copies) <= (self.traffic.hot or 0)
        assert all(copy.tier is Tier.GPU and source.tier is not Tier.GPU for source, copy in copies.items())
        read = {block for chunk in plan.requests for block in chunk.blocks}
        assert not read & (copies.keys() if not plan.is_look else set(copies.values()))
        self.num_copies_read += len(read & set(copies.values()))


@settings(max_examples=150, deadline=None)
@given(traffic=TRAFFIC)
def test_scheduler_under_random_traffic_ends_each_request_with_its_tokens(traffic: Traffic) -> None:
    run = Run(traffic)
    run.finish()

    for request in run.requests:
        assert request.status is RequestStatus.FINISHED
        limit = min(request.max_total_tokens, MAX_CONTEXT_LEN)
        output, reason = expected_answer(request.prompt_token_ids, request.params, request.stop_ids, limit)
        if request.request_id in run.aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        elif request.finish_reason is FinishReason.ERROR:
            if request.error == "made to fail":
                assert traffic.request_failures > 0
            else:
                assert traffic.memory_shortages > 0
                assert "made to be short" in (request.error or "")
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.finish_reason) == (output, reason)
    assert run.reported | run.aborted == {request.request_id for request in run.requests}
    assert not run.executor.known, "the executor was not told of every end"
    assert run.kv.num_free_blocks == run.kv.num_blocks
    assert run.kv.num_moves == 0
    num_idle = sum(run.kv.cache_stats().num_idle_blocks.values())
    assert num_idle <= -(-run.kv.num_blocks * traffic.cache_percent // 100)
    assert run.kv.cache_stats().num_mismatches == 0
    for request in run.requests:
        assert request.num_cached_tokens < len(request.prompt_token_ids)
        assert request.num_cached_tokens % traffic.block_size == 0
    assert run.kv.drop_cached() == num_idle
    assert sum(usage.free for usage in run.kv.usage().values()) == run.kv.num_blocks


@settings(max_examples=40, deadline=None)
@given(
    spare=st.integers(3, 6),
    block_size=st.integers(2, 4),
    sink=st.integers(0, 4),
    recent=st.none() | st.integers(0, 8),
    prompt_len=st.integers(1, 40),
    max_tokens_per_step=st.integers(1, 40),
)
def test_newest_block_of_a_lone_request_always_lies_on_the_accelerator(
    spare: int, block_size: int, sink: int, recent: int | None, prompt_len: int, max_tokens_per_step: int
) -> None:
    regions = Regions(block_size=block_size, num_sink_tokens=sink, recent_window=recent)
    # Room for the sink and three more: the newest block, the one finished in this step, and the one that is leaving.
    num_sink_blocks = -(-sink // block_size)
    kv = KVManager({Tier.GPU: num_sink_blocks + spare, Tier.DRAM: 40}, regions)
    scheduler = Scheduler(
        kv, max_tokens_per_step=max_tokens_per_step, max_running_requests=1, max_context_len=prompt_len + 20
    )
    params = SamplingParams(max_output_tokens=20)
    scheduler.add(
        Request(
            request_id=RequestId("r"),
            prompt_token_ids=(5,) * prompt_len,
            params=params,
            max_total_tokens=prompt_len + 20,
        )
    )
    executor = FakeExecutor(block_size=block_size)
    while scheduler.has_work:
        plan = scheduler.schedule()
        for chunk in plan.requests:
            if (chunk.start + len(chunk.token_ids)) % block_size:  # the newest block is unfinished
                assert chunk.blocks[-1].tier is Tier.GPU
        scheduler.update(plan, executor.execute(plan))


@settings(max_examples=100, deadline=None)
@given(traffic=TRAFFIC)
def test_copies_of_hot_blocks_change_nothing_of_who_computes_when(traffic: Traffic) -> None:
    """No request starts, waits or yields for their sake: they lie where nobody needs a block."""
    calm = replace(
        traffic, request_failures=0.0, move_failures=0.0, move_delays=0.0, memory_shortages=0.0, aheads=0.0, aborts=0.0,
        block_size=1, gpu=traffic.gpu + 5, recent=(traffic.recent or 0) % 3, spare=traffic.spare + 3,
    )  # fmt: skip
    runs = [Run(replace(calm, hot=most)) for most in (None, traffic.hot or 4)]
    for run in runs:
        run.finish()
    event(f"copies are read: {runs[1].num_copies_read > 0}")
    assert runs[0].plans == runs[1].plans
    assert runs[0].scheduler.num_preemptions == runs[1].scheduler.num_preemptions
    assert [each.output_token_ids for each in runs[0].requests] == [each.output_token_ids for each in runs[1].requests]
