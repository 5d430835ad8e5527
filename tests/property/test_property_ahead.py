"""Steps that are planned ahead put every block where it would lie if each step were planned behind the last one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.request import Request, SamplingParams
from ambidex.core.step import StepPlan
from ambidex.kv.manager import KVManager
from ambidex.sched.scheduler import Scheduler
from fake_executor import VOCAB_SIZE, FakeExecutor

MAX_CONTEXT_LEN = 40


@dataclass(frozen=True, kw_only=True)
class World:
    """Requests that all start at once and end by their lengths, and the tiers that they meet."""

    seed: int
    block_size: int
    gpu: int
    dram: int
    cxl: int
    sink: int
    recent: int | None
    num_requests: int


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 4),
    gpu=st.integers(1, 20),
    dram=st.integers(1, 40),
    cxl=st.sampled_from([0, 0, 10]),
    sink=st.integers(0, 4),
    recent=st.none() | st.integers(0, 8),
    num_requests=st.integers(1, 4),
)


def steps(world: World, *, is_ahead: bool) -> Iterator[tuple[StepPlan, Scheduler]]:
    """Each plan as it is carried out, and its scheduler."""
    rng = random.Random(world.seed)
    regions = Regions(block_size=world.block_size, num_sink_tokens=world.sink, recent_window=world.recent)
    capacities = {Tier.GPU: world.gpu, Tier.DRAM: world.dram, Tier.CXL: world.cxl}
    kv = KVManager(capacities, regions)
    scheduler = Scheduler(
        kv, max_tokens_per_step=64, max_running_requests=world.num_requests, max_context_len=MAX_CONTEXT_LEN
    )
    executor = FakeExecutor(block_size=world.block_size, rng=random.Random(0))
    for place in range(world.num_requests):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))
        params = SamplingParams(max_output_tokens=rng.randint(1, 20), ignore_eos=True)
        scheduler.add(
            Request(
                request_id=RequestId(f"r{place}"), prompt_token_ids=prompt, params=params,
                max_total_tokens=MAX_CONTEXT_LEN, stop_ids=frozenset(),
            )
        )  # fmt: skip
    next_plan: StepPlan | None = None
    while scheduler.has_work:
        plan, next_plan = next_plan or scheduler.schedule(), None
        yield plan, scheduler
        if is_ahead:
            next_plan = scheduler.schedule_ahead()
        scheduler.update(plan, executor.execute(plan))
        kv.check()


@settings(max_examples=300, deadline=None)
@given(world=WORLDS)
def test_blocks_lie_where_they_would_if_each_step_were_planned_behind_the_last_one(world: World) -> None:
    num_ahead = 0
    for (plan, _), (other, in_turn) in zip_longest(steps(world, is_ahead=True), steps(world, is_ahead=False)):
        if in_turn.num_waiting or in_turn.num_preemptions:
            event("somebody waits")  # and starts with the step that is planned when it can, which may be one later
            return
        num_ahead += any(chunk.is_pending for chunk in plan.requests)
        places, wanted = (
            [(chunk.request_id, chunk.start, [block.tier for block in chunk.blocks]) for chunk in each.requests]
            for each in (plan, other)
        )
        assert places == wanted
        assert [(move.source.tier, move.target.tier) for move in plan.moves] == [
            (move.source.tier, move.target.tier) for move in other.moves
        ]
    event(f"steps ahead: {min(num_ahead, 10)}")
