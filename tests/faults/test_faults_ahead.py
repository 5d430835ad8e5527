"""Steps with keys in DRAM that are prepared ahead, on an accelerator that goes its own way."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ahead_runs import BROKEN_OUTPUTS, NUM_LAYERS, PLACES, add_all, answers, break_off, make_engine, run_to_end
from ambidex import EngineConfig, SamplingParams
from ambidex.attention.lane_share import LaneBalance
from ambidex.attention.streamed import LaneRates
from ambidex.core.config import KVDTypeChoice
from ambidex.core.errors import LaneError
from ambidex.core.ids import Lane, RequestId
from ambidex.core.selection import ShareSeen
from ambidex.core.step import StepPlan, StepResult
from ambidex.engine.compose import root
from ambidex.engine.compose.choices import Choices
from ambidex.engine.compose.lanes import StreamChoice
from ambidex.engine.outputs import RequestOutput
from ambidex.kernels.cpu.native import AttentionScript, KeyBatch
from ambidex.runner import graphs
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.runner import LaunchedPlan, ModelRunner
from ambidex.runner.step_under_way import StepUnderWay
from ambidex.sched.scheduler import Scheduler
from ambidex.storage.lane_thread import WorkBeside
from ambidex.storage.step_stream import StepStream
from ambidex.storage.step_watch import StepWatch
from late_accelerator import LinkWords, late_accelerator
from tiny_engine import make_engine_folder
from tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("ahead"), num_layers=NUM_LAYERS)


@pytest.fixture
def with_stream_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a CPU with a stream lane, which follows how steps went."""
    make_steps = root.make_decode_steps

    def make(config: EngineConfig, choices: Choices, *parts: Any) -> Any:
        assert choices.stream is not None
        return make_steps(config, replace(choices, stream=replace(choices.stream, step_blocks=32)), *parts)

    monkeypatch.setattr(root, "make_decode_steps", make)
    monkeypatch.setattr(root, "choose_stream", lambda *_: StreamChoice(0.5, "the test says so", LaneRates(1e6, 1e9)))


@pytest.fixture
def late_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU lane and the copies come late, too."""
    rng, run_script = random.Random(5), AttentionScript.run

    def late_run(script: AttentionScript, *args: Any, **settings: Any) -> tuple[int, int]:
        time.sleep(rng.choice([0.0, 0.0, 0.003]))
        return run_script(script, *args, **settings)

    def late(bring: Callable[..., None]) -> Callable[..., None]:
        def bring_late(*args: Any) -> None:
            time.sleep(rng.choice([0.0, 0.0005]))
            bring(*args)

        return bring_late

    monkeypatch.setattr(AttentionScript, "run", late_run)
    for name in ("_copy", "_fetch"):
        monkeypatch.setattr(StepStream, name, late(getattr(StepStream, name)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("late_lanes")
def test_an_accelerator_that_runs_behind_gives_the_same_answers(folder: Path, seed: int) -> None:
    wanted = answers(make_engine(folder))
    with late_accelerator(seed) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        assert answers(engine) == wanted
        assert answers(engine) == wanted, "other requests, in other rows"
    assert not accelerator.errors
    assert accelerator.num_replays == engine.stats.num_replayed_steps > engine.stats.num_steps / 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("late_lanes", "with_stream_lane")
def test_so_it_does_with_keys_that_travel(folder: Path, seed: int) -> None:
    wanted = answers(make_engine(folder))
    with late_accelerator(seed) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        assert answers(engine) == wanted
        assert answers(engine) == wanted, "other requests, in other rows"
    assert not accelerator.errors
    assert accelerator.num_replays == engine.stats.num_replayed_steps > engine.stats.num_steps / 2
    assert engine.stats.lane_bytes[Lane.STREAM] > 0
    assert engine.stats.lane_bytes[Lane.CPU] > 0


@pytest.mark.usefixtures("with_stream_lane")
def test_the_lanes_share_follows_only_steps_that_were_prepared_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: of a step that was prepared with the share before, the newest was taken to be what it had asked for: so its
    keys seemed to have had no room, after which they no longer all travelled.

    Each update gives another share, as it does where the lanes' times ask for it: here they are a busy machine's.
    """
    seen: list[ShareSeen] = []
    shares = itertools.cycle((0.6, 0.75, 0.45, 0.3))

    def noting_update(balance: LaneBalance, step: ShareSeen) -> float:
        seen.append(step)
        assert step.asked == balance.share
        assert step.achieved == step.asked, "there was room for all"
        balance._state = replace(balance._state, share=next(shares))
        return balance.share

    monkeypatch.setattr(LaneBalance, "update", noting_update)
    with late_accelerator(0) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        answers(engine)
    assert {step.asked for step in seen} == {0.5, 0.6, 0.75, 0.45, 0.3}
    assert engine.stats.num_replayed_steps / 3 < len(seen) < engine.stats.num_replayed_steps


def fail_run(monkeypatch: pytest.MonkeyPatch, number: int, error: Exception | None) -> None:
    """Let one of the CPU lane's runs raise an error; None: no queries came."""
    num_runs, run_script = 0, AttentionScript.run

    def run(
        script: AttentionScript, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()
    ) -> tuple[int, int]:
        nonlocal num_runs
        num_runs += 1
        if num_runs != number:
            return run_script(script, batches, limit_s=limit_s, scanned=scanned)
        if error is not None:
            raise error
        return 0, 0

    monkeypatch.setattr(AttentionScript, "run", run)


def test_whatever_the_cpu_lane_raises_is_raised_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the step behind it waited for its end, raised the same, and so did every step after that."""
    with late_accelerator(1) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        wanted = answers(engine)
        fail_run(monkeypatch, 10, RuntimeError("a pool has no threads"))
        add_all(engine)
        with pytest.raises(RuntimeError, match="a pool has no threads"):
            run_to_end(engine)
        assert all("RuntimeError a pool" in (output.error or "") for output in run_to_end(engine).values())
        assert answers(engine) == wanted


def test_requests_that_ended_are_forgotten_by_a_step_whose_lanes_lose_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the sampler kept them for ever."""
    start, starts = DecodeSteps._start, 0

    def failing_start(steps: DecodeSteps, *args: Any) -> StepUnderWay:
        nonlocal starts
        starts += 1
        fail_run(monkeypatch, 1, None)
        return start(steps, *args)

    with late_accelerator(2) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        runner = engine.core.executor
        assert isinstance(runner, ModelRunner)
        answers(engine)
        ids = add_all(engine)
        for _ in range(14):
            engine.step()
        engine.abort(ids[1])
        monkeypatch.setattr(DecodeSteps, "_start", failing_start)
        engine.step()
        assert starts == 1, "the step that names it was not sent"
        outputs = run_to_end(engine)
        assert [outputs[ids[place]].error is not None for place in (0, 2)] == [True, True]
    assert not runner._sampler._states


@pytest.mark.parametrize("place", ["planned", "sent"])
def test_ctrl_c_beside_a_step_ahead_leaves_no_plan_and_no_request_behind(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a plan that was made and not sent yet stayed under way; of one that was sent, requests that had ended before
    were never forgotten."""
    plan_ahead, wait_launched, is_now = Scheduler.schedule_ahead, LaunchedPlan.wait, False

    def interrupted_plan(scheduler: Scheduler) -> StepPlan | None:
        plan = plan_ahead(scheduler)
        if is_now and place == "planned":
            raise KeyboardInterrupt
        return plan

    def interrupted_wait(launched: LaunchedPlan) -> StepResult:
        if is_now and place == "sent":
            raise KeyboardInterrupt
        return wait_launched(launched)

    monkeypatch.setattr(Scheduler, "schedule_ahead", interrupted_plan)
    monkeypatch.setattr(LaunchedPlan, "wait", interrupted_wait)
    with late_accelerator(4) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        runner = engine.core.executor
        assert isinstance(runner, ModelRunner)
        wanted = answers(engine)
        ids = add_all(engine)
        for _ in range(14):
            engine.step()
        engine.abort(ids[1])
        is_now = True
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        is_now = False
        outputs = run_to_end(engine)
        assert all("KeyboardInterrupt" in (outputs[ids[place]].error or "") for place in (0, 2))
        assert not runner._sampler._states
        assert answers(engine) == wanted


def test_the_lane_of_a_step_that_was_interrupted_has_ended_before_the_next_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: nobody knew of it any more, and both answered."""
    num_running, most, wait_work, is_now = 0, 0, WorkBeside.wait, False
    run_script, has_begun = AttentionScript.run, threading.Event()

    def slow_run(script: AttentionScript, *args: Any, **settings: Any) -> tuple[int, int]:
        nonlocal num_running, most
        num_running += 1
        most, rest_s = max(most, num_running), 0.5 if is_now else 0.0
        if is_now:
            has_begun.set()
        answered = run_script(script, *args, **settings)
        time.sleep(rest_s)
        num_running -= 1
        return answered

    def interrupted_wait(work: WorkBeside) -> None:
        if is_now:
            raise KeyboardInterrupt
        wait_work(work)

    monkeypatch.setattr(AttentionScript, "run", slow_run)
    monkeypatch.setattr(WorkBeside, "wait", interrupted_wait)
    monkeypatch.setattr(DecodeSteps, "try_launch", lambda *_: None)  # each step is run, and waited for
    with late_accelerator(4) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        wanted = answers(engine)
        add_all(engine)
        for _ in range(10):
            engine.step()
        is_now = True
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert has_begun.wait(60.0)
        is_now = False
        run_to_end(engine)
        assert answers(engine) == wanted
    assert most == 1


@pytest.mark.usefixtures("with_stream_lane")
def test_blocks_that_never_arrive_fail_their_step_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's: the CPU lane has answered by then.

    Bug: nobody watched the step any more, and the engine waited for its tokens without an end.
    """
    monkeypatch.setattr(graphs, "StepWatch", partial(StepWatch, limit_s=3.0, look_s=0.05))
    write, lost = LinkWords.write, 0

    def losing_write(words: LinkWords, word: Tensor) -> None:
        nonlocal lost
        if word.data_ptr() == lost:
            lost = 0
        else:
            write(words, word)

    monkeypatch.setattr(LinkWords, "write", losing_write)
    with late_accelerator(3) as accelerator:
        engine = make_engine(folder, accelerator.capture, stream_percent=50)
        wanted = answers(engine)
        ids = add_all(engine)
        for _ in range(10):
            engine.step()
        runner = engine.core.executor
        assert isinstance(runner, ModelRunner)
        lost = runner.decode_steps._lanes._stream._arrived[-1].data_ptr()
        outputs = run_to_end(engine)
        assert not lost
        for request_id, whole in zip(ids, wanted, strict=True):
            assert "no lane went on" in (outputs[request_id].error or "")
            assert outputs[request_id].token_ids == whole[: len(outputs[request_id].token_ids)]
        assert answers(engine) == wanted


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.usefixtures("late_lanes")
def test_an_engine_that_is_closed_waits_for_the_step_under_way(
    folder: Path, is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its words and answers could be somebody else's memory while the accelerator still wrote them."""
    with late_accelerator(6) as accelerator:
        engine = make_engine(folder, accelerator.capture)
        answers(engine)
        add_all(engine)
        for _ in range(10):
            engine.step()
        accelerator.delays_s = (0.5,)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if is_interrupted:
                patch.setattr(StepUnderWay, "bring", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            else:
                engine.step()
        assert accelerator.num_done < accelerator.num_replays
        engine.close()
        assert accelerator.num_done == accelerator.num_replays


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, LaneError])
@pytest.mark.usefixtures("late_lanes", "with_stream_lane")
def test_wherever_a_step_breaks_off_the_next_ones_are_right(
    folder: Path, error: type[BaseException], is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "StepWatch", partial(StepWatch, limit_s=2.0, look_s=0.05))
    with late_accelerator(8) as accelerator:
        engine = make_engine(folder, accelerator.capture, stream_percent=50)
        wanted = answers(engine, most=BROKEN_OUTPUTS)
        for place in PLACES:
            assert break_off(engine, place, error, 8, is_behind=is_behind, patch=monkeypatch), place
            assert answers(engine, most=BROKEN_OUTPUTS) == wanted, place
    assert not accelerator.errors


def draw_params(rng: random.Random) -> SamplingParams:
    """Most are greedy. What is not, or looks at more than a token, is none of the accelerator's business."""
    params = SamplingParams(
        max_output_tokens=rng.randint(1, 40), temperature=0.0, ignore_eos=True,
        stop_token_ids=tuple(rng.sample(range(3, VOCAB_SIZE), rng.choice([0, 12]))),
    )  # fmt: skip
    other: dict[str, Any] = rng.choice([
        {"temperature": 0.8, "seed": rng.randrange(100)},
        {"logprobs": 1},
        {"regex": "[a-z]{12,20}", "ignore_eos": False, "stop_token_ids": ()},
        {"stop": (chr(rng.randrange(97, 123)),)},
        {"stop": (chr(rng.randrange(97, 123)),)},
        {"stop_token_ids": tuple(range(3, VOCAB_SIZE, 3)), "min_output_tokens": params.max_output_tokens // 2},
        {"logit_bias": ((70, 5.0),)},
        {"presence_penalty": 1.0},
    ])  # fmt: skip
    return replace(params, **other) if rng.random() < 0.3 else params


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("late_lanes")
def test_requests_that_come_and_go_beside_steps_ahead_get_the_answers_that_they_get_alone(
    folder: Path, seed: int
) -> None:
    """They begin alike or not, are aborted, and end by tokens that nobody knows before; of some the host says more."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(50)]
    asked: dict[RequestId, tuple[list[int], SamplingParams]] = {}
    aborted: set[RequestId] = set()
    outputs: dict[RequestId, RequestOutput] = {}
    sizes = {"kv_dtype": KVDTypeChoice.AUTO, "max_tokens_per_step": 40}
    alone = make_engine(folder, **sizes | {"kv_gpu_tokens": 2000})
    with late_accelerator(seed) as accelerator:
        engine = make_engine(
            folder, accelerator.capture, **sizes, kv_gpu_tokens=rng.choice([160, 240, 400]),
            prefix_cache_percent=rng.choice([0, 50]),
        )  # fmt: skip
        while len(asked) < 8 or engine.has_work:
            if len(asked) < 8 and rng.random() < 0.15:
                own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
                params = draw_params(rng)
                prompt = beginning[: rng.choice([0, 32, 50])] + own
                asked[engine.add(prompt, params)] = prompt, params
            if asked and rng.random() < 0.02:
                request_id = rng.choice(list(asked))
                aborted |= {request_id} if engine.abort(request_id) is not None else set()
            outputs |= {output.request_id: output for output in engine.step()}
        engine.core.scheduler.check()
    assert not accelerator.errors
    assert accelerator.num_replays > 20
    for request_id, (prompt, params) in asked.items():
        own_id = alone.add(prompt, params)
        wanted = run_to_end(alone)[own_id].token_ids
        if request_id not in aborted:
            assert (outputs[request_id].error, outputs[request_id].token_ids) == (None, wanted)
        elif request_id in outputs:
            assert outputs[request_id].token_ids == wanted[: len(outputs[request_id].token_ids)]
