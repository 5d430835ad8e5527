"""Which blocks are copied to the accelerator: the decision alone, and one request whose blocks it is about."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.hot import HotDecision, HotLook, HotState
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.request import Request, SamplingParams
from ambidex.core.step import BlockRef
from ambidex.kv.manager import KVManager
from ambidex.sched.hot import LEAST_INTERVAL, LOOKS, MOST, MOST_INTERVAL, HotBlocks, next_hot
from ambidex.sched.scheduler import Scheduler
from fake_executor import FakeExecutor, expected_answer

FIRST = HotState(most=MOST, interval=LEAST_INTERVAL)
BLOCKS = [BlockRef(Tier.DRAM, BlockId(number)) for number in range(12)]


def look(kept: dict[int, int], *, room: int = 3, step_s: float | None = None) -> HotLook:
    return HotLook(
        kept=tuple((BLOCKS[number], num) for number, num in kept.items()), room=room, look_s=1.0, step_s=step_s
    )


def wanted(state: HotState) -> list[int]:
    return [block.block_id for block in state.wanted]


def after(*looks: HotLook, state: HotState = FIRST) -> HotState:
    for each in looks:
        state = next_hot(state, each)
    return state


def test_what_is_kept_once_is_not_copied() -> None:
    assert wanted(after(look({0: 900, 1: 2}))) == []
    assert LOOKS == 2
    assert wanted(after(look({0: 900, 1: 2}), look({1: 1}))) == [1]


def test_the_hottest_are_copied_as_far_as_there_is_room() -> None:
    kept = {0: 5, 1: 50, 2: 20, 3: 30}
    assert wanted(after(look(kept), look(kept))) == [1, 3, 2]
    assert wanted(after(look(kept, room=1), look(kept, room=1))) == [1]
    assert wanted(after(look(kept), look(kept), look(kept, room=2))) == [1, 3], "room was taken: the coldest go"
    assert wanted(after(look(kept), look(kept), look(kept, room=0))) == []


def test_a_block_gives_way_only_to_one_that_is_clearly_hotter() -> None:
    even = look({0: 100, 1: 100}, room=1)
    state = after(even, even)
    assert wanted(state) == [0]
    slightly, clearly = look({0: 100, 1: 120}, room=1), look({0: 100, 1: 400}, room=1)
    assert wanted(after(slightly, slightly, slightly, state=state)) == [0]
    assert wanted(after(clearly, state=state)) == [1]


def test_what_is_kept_no_more_ages_and_is_forgotten() -> None:
    state = after(look({0: 40, 1: 5}), look({0: 40, 1: 5}))
    for _ in range(30):
        state = next_hot(state, look({1: 5}))
    assert [item.block.block_id for item in state.scores] == [1]
    assert wanted(state) == [1]


def test_looks_are_rare_while_little_changes() -> None:
    kept = {0: 5, 1: 50}
    state = after(*[look(kept)] * 10)
    assert state.interval == MOST_INTERVAL
    assert next_hot(state, look({0: 5, 1: 50, 5: 6})).interval == MOST_INTERVAL
    others = look({5: 900, 6: 900})
    assert next_hot(state, others).wanted == state.wanted, "both were kept once"
    assert next_hot(state, others).interval == MOST_INTERVAL // 2, "but hotter ones than these may be on their way"
    assert after(others, others, state=state).interval == MOST_INTERVAL // 4
    assert after(*[look({})] * 20, state=state).interval == LEAST_INTERVAL


def test_looks_at_many_blocks_are_never_frequent() -> None:
    kept = tuple((BlockRef(Tier.DRAM, BlockId(number)), 1 + number % 7) for number in range(20 * 256))
    state = after(HotLook(kept=kept, room=9, look_s=1.0, step_s=None))
    assert state.interval == 20


def test_copies_that_make_steps_slower_become_fewer_and_more_again_when_they_do_not() -> None:
    kept = {number: 10 + number for number in range(8)}
    state = after(look(kept, room=8), look(kept, room=8))
    assert len(state.wanted) == 8
    state = after(look(kept, room=8, step_s=1.2), state=state)
    assert len(state.wanted) == 8, "once is chance"
    state = after(look(kept, room=8, step_s=1.2), state=state)
    assert wanted(state) == [7, 6, 5, 4]
    state = after(look(kept, room=8, step_s=1.0), state=state)
    assert len(state.wanted) == 8
    for _ in range(20):
        state = next_hot(state, look(kept, room=8, step_s=9.0))
    assert len(state.wanted) <= 1


@given(
    looks=st.lists(
        st.builds(
            look,
            st.dictionaries(st.integers(0, 11), st.integers(1, 300)),
            room=st.integers(0, 12),
            step_s=st.none() | st.floats(0.5, 2.0),
        ),
        max_size=25,
    )
)
def test_of_any_looks_never_more_are_wanted_than_there_is_room_for_and_only_what_was_kept(looks: list[HotLook]) -> None:
    state, seen = FIRST, {}
    for each in looks:
        before, state = state, next_hot(state, each)
        for block, _ in each.kept:
            seen[block] = seen.get(block, 0) + 1
        assert len(set(state.wanted)) == len(state.wanted) <= min(each.room, state.most)
        assert all(seen[block] >= LOOKS for block in state.wanted)
        assert LEAST_INTERVAL <= state.interval <= MOST_INTERVAL
        scores = {item.block: item.score for item in state.scores}
        assert [scores[block] for block in state.wanted] == sorted((scores[b] for b in state.wanted), reverse=True)
        assert next_hot(before, each) == state


def run_alone(kv: KVManager, hot: HotBlocks | None, *, num_tokens: int) -> tuple[Request, int]:
    """Run one request to its end; how many blocks its steps read from copies."""
    scheduler = Scheduler(kv, max_tokens_per_step=8, max_running_requests=1, max_context_len=num_tokens, hot=hot)
    request = Request(
        request_id=RequestId("r"), prompt_token_ids=(1, 2, 3) * 8, params=SamplingParams(), max_total_tokens=num_tokens
    )
    scheduler.add(request)
    executor, num_read = FakeExecutor(block_size=kv.block_size, looks=random.Random(3)), 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        copies = set(kv.copies.values())
        num_read += sum(block in copies for chunk in plan.requests for block in chunk.blocks)
        assert not (plan.is_look and plan.moves and any(move.keeps_source for move in plan.moves))
        scheduler.update(plan, executor.execute(plan))
        kv.check()
    return request, num_read


def test_hot_blocks_of_a_request_are_read_from_their_copies_until_it_ends() -> None:
    kv = KVManager({Tier.GPU: 10, Tier.DRAM: 40}, Regions(block_size=2, num_sink_tokens=2, recent_window=4))
    told: list[HotDecision] = []
    hot = HotBlocks(kv, most=5, most_moves=2, tell=told.append)
    request, num_read = run_alone(kv, hot, num_tokens=90)
    answer, _ = expected_answer(request.prompt_token_ids, request.params, request.stop_ids, 90)
    assert request.output_token_ids == answer
    assert num_read > 20
    figures = hot.figures
    assert figures.num_looks == len(told) > 3
    assert max(len(decision.after.wanted) for decision in told) == 5
    assert figures.num_promoted == figures.num_dropped >= 5
    assert figures.num_blocks == 0
    assert 0 < figures.num_hits < figures.num_kept
    assert all(next_hot(decision.before, decision.look) == decision.after for decision in told)
    assert not hot._state.scores or hot._left, "what is known of blocks goes with their tokens"


def test_blocks_of_another_request_begin_anew() -> None:
    kv = KVManager({Tier.GPU: 10, Tier.DRAM: 40}, Regions(block_size=2, num_sink_tokens=2, recent_window=4))
    told: list[HotDecision] = []
    hot = HotBlocks(kv, most=5, most_moves=2, tell=told.append)
    run_alone(kv, hot, num_tokens=90)
    num_before = len(told)
    run_alone(kv, hot, num_tokens=90)
    first, second = told[num_before : num_before + 2]
    assert first.before.scores == ()
    assert first.after.wanted == ()
    assert second.before.wanted == ()
