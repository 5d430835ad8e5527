from collections.abc import Mapping

import pytest

from ambidex.core.errors import ContextLengthError, InternalError, RequestError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.request import FinishReason, Request, RequestStatus, SamplingParams
from ambidex.core.step import SampledToken, StepPlan, StepResult
from ambidex.kv.manager import KVManager
from ambidex.sched.scheduler import Scheduler
from fake_executor import FakeExecutor, next_token

BLOCK_SIZE = 4
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def make_scheduler(
    num_blocks: int = 32,
    *,
    gpu: int = 0,
    recent: int | None = None,
    max_tokens_per_step: int = 16,
    max_running_requests: int = 8,
    max_context_len: int = 64,
    max_kept_rows: int | None = None,
    seed: int = 0,
) -> tuple[Scheduler, KVManager]:
    regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=0, recent_window=recent)
    kv = KVManager({Tier.GPU: gpu, Tier.DRAM: num_blocks - gpu}, regions)
    scheduler = Scheduler(
        kv,
        max_tokens_per_step=max_tokens_per_step,
        max_running_requests=max_running_requests,
        max_context_len=max_context_len,
        max_kept_rows=max_kept_rows,
        seed=seed,
    )
    return scheduler, kv


def make_request(
    name: RequestId,
    prompt_len: int = 4,
    *,
    params: SamplingParams | None = None,
    max_total_tokens: int = 64,
    stop_ids: frozenset[int] = frozenset(),
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(prompt_len)),
        params=params or SamplingParams(max_output_tokens=40),
        max_total_tokens=max_total_tokens,
        stop_ids=stop_ids,
    )


def answer(plan: StepPlan, token_ids: Mapping[RequestId, int] | None = None) -> StepResult:
    """The result in which each sampled request gets token 7, or the one named, and each move succeeds."""
    tokens = {
        chunk.request_id: SampledToken(token_id=(token_ids or {}).get(chunk.request_id, 7))
        for chunk in plan.requests
        if chunk.is_sampled
    }
    return StepResult(tokens=tokens, finished_moves=tuple(move.move_id for move in plan.moves))


def step(scheduler: Scheduler, token_ids: Mapping[RequestId, int] | None = None) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, answer(plan, token_ids))
    return plan


def shares(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(request, start, number of tokens, sampled) of each scheduled request."""
    return [(chunk.request_id, chunk.start, len(chunk.token_ids), chunk.is_sampled) for chunk in plan.requests]


def test_add_of_empty_prompt_raises() -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(RequestError, match="0 tokens"):
        scheduler.add(make_request(A, 0))


@pytest.mark.parametrize(("prompt_len", "max_total_tokens", "limit"), [(64, 99, 64), (9, 8, 8)])
def test_add_of_prompt_without_room_for_an_answer_raises(prompt_len: int, max_total_tokens: int, limit: int) -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(ContextLengthError) as caught:
        scheduler.add(make_request(A, prompt_len, max_total_tokens=max_total_tokens))
    assert (caught.value.num_prompt_tokens, caught.value.limit) == (prompt_len, limit)


def test_add_of_name_in_use_raises() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A))
    with pytest.raises(RequestError, match="request a has not ended"):
        scheduler.add(make_request(A))


def test_scheduler_without_requests_has_no_work_and_an_empty_plan() -> None:
    scheduler, _ = make_scheduler()
    assert not scheduler.has_work
    assert step(scheduler).is_empty


def test_schedule_prefills_whole_prompt_and_then_decodes() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A, 6))
    assert shares(step(scheduler)) == [(A, 0, 6, True)]
    plan = step(scheduler)
    assert shares(plan) == [(A, 6, 1, True)]
    assert plan.requests[0].token_ids == (7,)
    assert len(plan.requests[0].blocks) == 2


def test_schedule_cuts_a_long_prompt_into_chunks_of_the_token_budget() -> None:
    scheduler, _ = make_scheduler(max_tokens_per_step=5)
    scheduler.add(make_request(A, 12))
    assert shares(step(scheduler)) == [(A, 0, 5, False)]
    assert shares(step(scheduler)) == [(A, 5, 5, False)]
    assert shares(step(scheduler)) == [(A, 10, 2, True)]


def test_schedule_serves_running_requests_before_waiting_ones_within_the_budget() -> None:
    scheduler, _ = make_scheduler(max_tokens_per_step=6)
    scheduler.add(make_request(A, 4))
    step(scheduler)
    scheduler.add(make_request(B, 8))
    assert shares(step(scheduler)) == [(A, 4, 1, True), (B, 0, 5, False)]
    assert shares(step(scheduler)) == [(A, 5, 1, True), (B, 5, 3, True)]


def test_schedule_never_runs_more_requests_than_allowed() -> None:
    scheduler, _ = make_scheduler(max_running_requests=1)
    scheduler.add(make_request(A))
    scheduler.add(make_request(B))
    assert shares(step(scheduler)) == [(A, 0, 4, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_schedule_announces_a_request_once() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A))
    (announced,) = step(scheduler).new_requests
    assert (announced.request_id, announced.prompt_token_ids) == (A, (0, 1, 2, 3))
    assert step(scheduler).new_requests == ()


def test_schedule_takes_the_seed_of_the_request() -> None:
    scheduler, _ = make_scheduler(seed=3)
    scheduler.add(make_request(A, params=SamplingParams(seed=11)))
    assert step(scheduler).new_requests[0].seed == 11


def test_schedule_derives_seeds_from_engine_seed_and_arrival() -> None:
    def seeds(seed: int) -> list[int]:
        scheduler, _ = make_scheduler(seed=seed)
        scheduler.add(make_request(A))
        scheduler.add(make_request(B))
        return [request.seed for request in step(scheduler).new_requests]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds(1))


def test_schedule_twice_without_update_raises() -> None:
    scheduler, _ = make_scheduler()
    scheduler.schedule()
    with pytest.raises(InternalError, match="before the last plan came back"):
        scheduler.schedule()


def test_update_appends_the_token_and_returns_the_request() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(A)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert scheduler.update(plan, answer(plan)) == [request]
    assert request.output_token_ids == [7]
    assert (request.num_computed_tokens, request.num_tokens) == (4, 5)


def test_update_does_not_return_a_request_that_is_still_in_its_prompt() -> None:
    scheduler, _ = make_scheduler(max_tokens_per_step=3)
    scheduler.add(make_request(A))
    plan = scheduler.schedule()
    assert scheduler.update(plan, answer(plan)) == []


def test_update_with_another_plan_raises() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A))
    scheduler.schedule()
    with pytest.raises(InternalError, match="not the next one"):
        scheduler.update(StepPlan(), StepResult())


def test_update_with_a_missing_token_raises() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A))
    with pytest.raises(InternalError, match=r"no token for \['a'\]"):
        scheduler.update(scheduler.schedule(), StepResult())


def test_update_with_a_token_unasked_for_raises() -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(InternalError, match=r"unasked for \['a'\]"):
        scheduler.update(scheduler.schedule(), StepResult(tokens={A: SampledToken(token_id=1)}))


def test_request_ends_at_a_stop_id_which_is_appended() -> None:
    scheduler, kv = make_scheduler()
    request = make_request(A, stop_ids=frozenset({9}))
    scheduler.add(request)
    step(scheduler)
    step(scheduler, {A: 9})
    assert request.output_token_ids == [7, 9]
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.STOP)
    assert kv.num_free_blocks == kv.num_blocks


def test_stop_id_among_the_minimum_of_tokens_does_not_end_the_request() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(A, stop_ids=frozenset({9}), params=SamplingParams(min_output_tokens=1))
    scheduler.add(request)
    step(scheduler, {A: 9})
    assert request.finish_reason is None
    step(scheduler, {A: 9})
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("max_output", "max_total", "max_context", "num_output"),
    [(3, 64, 64, 3), (None, 6, 64, 2), (None, 64, 9, 5), (1, 64, 64, 1)],
)
def test_request_ends_at_the_nearest_length_limit(
    max_output: int | None, max_total: int, max_context: int, num_output: int
) -> None:
    scheduler, _ = make_scheduler(max_context_len=max_context)
    request = make_request(A, params=SamplingParams(max_output_tokens=max_output), max_total_tokens=max_total)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_token_ids) == num_output


def test_request_may_fill_all_blocks_of_all_tiers() -> None:
    scheduler, _ = make_scheduler(2)
    request = make_request(A, max_total_tokens=9)  # the ninth token is sampled, but never computed
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    assert (request.finish_reason, request.num_tokens) == (FinishReason.LENGTH, 9)


def test_failed_request_ends_with_its_reason_and_others_go_on() -> None:
    scheduler, kv = make_scheduler()
    bad, good = make_request(A), make_request(B)
    scheduler.add(bad)
    scheduler.add(good)
    plan = scheduler.schedule()
    changed = scheduler.update(plan, StepResult(tokens={B: SampledToken(token_id=5)}, failures={A: "NaN logits"}))
    assert changed == [bad, good]
    assert (bad.finish_reason, bad.error, bad.output_token_ids) == (FinishReason.ERROR, "NaN logits", [])
    assert good.output_token_ids == [5]
    assert kv.num_free_blocks == kv.num_blocks - 1


def test_finished_request_is_made_known_to_the_executor_once() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A, params=SamplingParams(max_output_tokens=1)))
    step(scheduler)
    assert scheduler.has_work
    assert step(scheduler).finished_requests == (A,)
    assert not scheduler.has_work


def test_finish_ends_a_running_request_with_the_given_reason() -> None:
    scheduler, kv = make_scheduler()
    request = make_request(A)
    scheduler.add(request)
    step(scheduler)
    assert scheduler.finish(A, FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert kv.num_free_blocks == kv.num_blocks
    assert not scheduler.finish(A, FinishReason.STOP)


def test_finish_keeps_the_error_text() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(A)
    scheduler.add(request)
    scheduler.finish(A, FinishReason.ERROR, "lost")
    assert request.error == "lost"


def test_abort_of_waiting_request_is_not_made_known_to_the_executor() -> None:
    scheduler, _ = make_scheduler()
    request = make_request(A)
    scheduler.add(request)
    assert scheduler.abort(A)
    assert request.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work
    assert step(scheduler).finished_requests == ()


def test_abort_of_unknown_request_returns_false() -> None:
    scheduler, _ = make_scheduler()
    assert not scheduler.abort(A)


def test_abort_between_schedule_and_update_drops_the_token() -> None:
    scheduler, kv = make_scheduler()
    request = make_request(A)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.abort(A)
    assert scheduler.update(plan, answer(plan)) == []
    assert request.output_token_ids == []
    assert kv.num_free_blocks == kv.num_blocks
    assert step(scheduler).finished_requests == (A,)


def test_name_of_request_aborted_in_the_step_can_be_used_again_at_once() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request(A))
    plan = scheduler.schedule()
    scheduler.abort(A)
    again = make_request(A, 2)
    scheduler.add(again)
    assert scheduler.update(plan, answer(plan)) == []
    assert again.output_token_ids == []
    plan = step(scheduler)
    assert plan.finished_requests == (A,)
    assert [request.request_id for request in plan.new_requests] == [A]


def test_abort_while_its_block_moves_returns_all_blocks_after_the_step() -> None:
    scheduler, kv = make_scheduler(gpu=4, recent=1)
    scheduler.add(make_request(A, 4))
    while not (plan := scheduler.schedule()).moves:
        scheduler.update(plan, answer(plan))
    scheduler.abort(A)
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks - 2
    scheduler.update(plan, answer(plan))
    assert kv.num_free_blocks == kv.num_blocks


def test_last_arrived_request_yields_when_blocks_run_out_and_computes_again() -> None:
    scheduler, _ = make_scheduler(5)
    first, second = make_request(A, 4, max_total_tokens=18), make_request(B, 4, max_total_tokens=18)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.num_preemptions:
        plan = step(scheduler)
    assert [chunk.request_id for chunk in plan.requests] == [A]
    assert (second.status, second.num_computed_tokens, second.num_preemptions) == (RequestStatus.WAITING, 0, 1)
    assert first.num_preemptions == 0
    num_known = second.num_tokens
    while second.status is RequestStatus.WAITING:
        plan = step(scheduler)
    assert shares(plan)[-1] == (B, 0, num_known, True)
    assert plan.new_requests == ()


def test_last_arrived_request_keeps_its_blocks_and_sits_out_when_only_itself_lacks_one() -> None:
    scheduler, kv = make_scheduler(5)
    first = make_request(A, 8, max_total_tokens=13)
    second = make_request(B, 4, max_total_tokens=13)
    scheduler.add(first)
    scheduler.add(second)
    seen = []
    while not first.finish_reason:
        seen.append([chunk.request_id for chunk in step(scheduler).requests])
    assert scheduler.num_preemptions == 0
    while not second.finish_reason:
        step(scheduler)
    assert second.num_preemptions == 0
    assert kv.num_free_blocks == kv.num_blocks


def test_waiting_request_is_not_admitted_into_blocks_that_running_ones_are_about_to_take() -> None:
    scheduler, _ = make_scheduler(3)
    scheduler.add(make_request(A, 8, max_total_tokens=13))
    scheduler.add(make_request(B, 4))
    assert [chunk.request_id for chunk in step(scheduler).requests] == [A]


def test_waiting_request_is_not_admitted_for_its_first_chunk_alone() -> None:
    scheduler, _ = make_scheduler(4, max_tokens_per_step=4)
    scheduler.add(make_request(A, 2, max_total_tokens=5))
    step(scheduler)
    scheduler.add(make_request(B, 14))
    assert [chunk.request_id for chunk in step(scheduler).requests] == [A]


def test_small_request_does_not_overtake_an_earlier_big_one() -> None:
    scheduler, _ = make_scheduler(4)
    scheduler.add(make_request(A, 8, max_total_tokens=12))
    step(scheduler)
    scheduler.add(make_request(B, 12, max_total_tokens=16))
    scheduler.add(make_request(C, 1, max_total_tokens=3))
    assert [chunk.request_id for chunk in step(scheduler).requests] == [A]


def test_waiting_request_beyond_all_tiers_fails_and_the_next_one_runs() -> None:
    scheduler, _ = make_scheduler(2)
    big, small = make_request(A, 9), make_request(B, 4, max_total_tokens=6)
    scheduler.add(big)
    scheduler.add(small)
    plan = scheduler.schedule()
    assert [chunk.request_id for chunk in plan.requests] == [B]
    assert scheduler.update(plan, answer(plan)) == [big, small]
    assert big.finish_reason is FinishReason.ERROR
    assert big.error is not None
    assert "needs 3 KV blocks, all tiers together have 2" in big.error


def test_running_request_that_outgrows_all_tiers_fails() -> None:
    scheduler, kv = make_scheduler(2)
    request = make_request(A, 7)
    scheduler.add(request)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.requests == ()
    assert plan.finished_requests == (A,)
    assert scheduler.update(plan, StepResult()) == [request]
    assert request.finish_reason is FinishReason.ERROR
    assert kv.num_free_blocks == kv.num_blocks
    assert not scheduler.has_work


def test_a_chunk_without_memory_is_halved_in_whole_blocks_and_one_block_fails() -> None:
    scheduler, kv = make_scheduler(max_tokens_per_step=30)
    scheduler.add(make_request(A, 29))
    lengths = []
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.schedule()
        lengths.append(len(plan.requests[0].token_ids))
        changed = scheduler.update(plan, StepResult(out_of_memory={A: "full"}))
    assert lengths == [29, 12, 4]  # blocks of 4
    assert scheduler.num_smaller_chunks == 2
    assert changed[0].error == "no memory left on the accelerator for 4 tokens of this request: full"
    assert kv.num_free_blocks == kv.num_blocks


def test_a_request_keeps_its_smaller_chunks_and_others_their_own() -> None:
    scheduler, _ = make_scheduler(max_tokens_per_step=30)
    scheduler.add(make_request(A, 29))
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(out_of_memory={A: "full"}))
    scheduler.add(make_request(B, 10))
    assert shares(step(scheduler)) == [(A, 0, 12, False), (B, 0, 10, True)]
    assert shares(step(scheduler)) == [(A, 12, 12, False), (B, 10, 1, True)]
    assert shares(step(scheduler))[0] == (A, 24, 5, True)


def test_failed_move_is_tried_once_in_each_step() -> None:
    scheduler, kv = make_scheduler(gpu=3, recent=1)
    scheduler.add(make_request(A, 4, params=SamplingParams(max_output_tokens=12)))
    num_moves = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert len({move.source for move in plan.moves}) == len(plan.moves)
        num_moves += len(plan.moves)
        failed = tuple(move.move_id for move in plan.moves)
        scheduler.update(plan, StepResult(tokens=answer(plan).tokens, failed_moves=failed))
    assert kv.num_failed_moves == num_moves > 1


def test_scheduler_when_a_move_lags_waits_for_its_block_instead_of_failing() -> None:
    scheduler, kv = make_scheduler(4, gpu=2, recent=1)
    request = make_request(A, 4, max_total_tokens=17)
    scheduler.add(request)
    lagging = []
    while request.num_tokens < 13:
        plan = scheduler.schedule()
        lagging += [move.move_id for move in plan.moves]
        scheduler.update(plan, StepResult(tokens=answer(plan).tokens))
    assert len(lagging) == 1
    plan = scheduler.schedule()
    assert plan.requests == ()
    scheduler.update(plan, StepResult(finished_moves=tuple(lagging)))
    while scheduler.has_work:
        step(scheduler)
    assert (request.finish_reason, request.num_tokens) == (FinishReason.LENGTH, 17)
    assert kv.num_free_blocks == kv.num_blocks


@pytest.mark.parametrize("gpu", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens_per_step", [3, 64])
def test_answer_does_not_depend_on_the_split_or_on_chunks(gpu: int, max_tokens_per_step: int) -> None:
    scheduler, kv = make_scheduler(12, gpu=gpu, recent=6, max_tokens_per_step=max_tokens_per_step)
    requests = [make_request(A, 13), make_request(B, 3)]
    for request in requests:
        request.params = SamplingParams(max_output_tokens=14)
        scheduler.add(request)
    executor = FakeExecutor(block_size=BLOCK_SIZE)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, executor.execute(plan))
    for request in requests:
        history = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == next_token(history)
            history.append(token)
        assert len(request.output_token_ids) == 14
    assert kv.num_free_blocks == kv.num_blocks


def test_a_request_starts_when_there_is_room_for_the_rows_of_all_its_tokens() -> None:
    scheduler, _ = make_scheduler(max_kept_rows=30)
    for name in (A, B, C):  # 10 tokens each, and C 20
        output = SamplingParams(max_output_tokens=16 if name is C else 6)
        scheduler.add(make_request(name, params=output))
    plan = step(scheduler)
    assert [(new.request_id, new.max_tokens) for new in plan.new_requests] == [(A, 10), (B, 10)]
    while scheduler.num_running == 2:
        assert not step(scheduler).new_requests
    assert not scheduler.num_running, "both end in one step"
    assert [new.request_id for new in step(scheduler).new_requests] == [C]


def test_a_request_that_has_yielded_keeps_the_room_of_its_rows() -> None:
    scheduler, _ = make_scheduler(num_blocks=6, max_kept_rows=40)
    for name in (A, B):
        scheduler.add(make_request(name, params=SamplingParams(max_output_tokens=16)))  # 20 tokens, 5 blocks
    while not scheduler.num_preemptions:
        step(scheduler)
    scheduler.add(make_request(C, 1, params=SamplingParams(max_output_tokens=1)))
    named = []
    while scheduler.num_running == 1:
        named += step(scheduler).new_requests
    assert not named, "it took the room of one that will come back"
    while scheduler.has_work:
        named += step(scheduler).new_requests
    assert [new.request_id for new in named] == [C]
