"""HybridGen's decode steps of fixed form: scores that come late or never, queries that do not come, buffers that cannot
be had, captures that fail."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig, FinishReason
from ambidex.attention import fixed_scores
from ambidex.attention.early_fixed import EarlyAttention
from ambidex.attention.fixed_scores import FarRows
from ambidex.core.config import DTypeChoice
from ambidex.core.ids import Fallback
from ambidex.core.policy import HybridGenMode, PolicyName
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.kernels.cpu.score_rows import Scored, ScoreThread
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.early_answers import EarlyAnswers
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.storage import words
from fault_runs import (
    CAPTURED_ON_CPU,
    FORMS,
    ON_CPU,
    SPLIT,
    CompilingForward,
    Form,
    GivingUp,
    capture_nothing,
    refuse_pinned,
    run,
    tokens,
)


def make_engine(folder: Path, form: Form, *, mode: HybridGenMode = HybridGenMode.POST, **settings: Any) -> Engine:
    device, decode_form = form
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype=DTypeChoice.FP32,
        num_threads=1,
        policy=PolicyName.HYBRIDGEN,
        exact_layers=1,
        near_tokens=3,
        hybridgen_mode=mode,
        **{**SPLIT, "kv_gpu_tokens": 256},
    )
    return build_engine(config, decode_form=decode_form, **settings)


def patch_wait(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], bool]) -> list[int]:
    """Let `before` be called with the number of each wait for scores; where it says True, the queries did not come."""
    numbers: list[int] = []

    def wait(thread: ScoreThread, number: int) -> Scored:
        numbers.append(number)
        is_lost = before(len(numbers))
        scored = wait_for_scores(thread, number)
        return Scored(False, scored.begin_s, scored.end_s) if is_lost else scored

    wait_for_scores = ScoreThread.wait
    monkeypatch.setattr(ScoreThread, "wait", wait)
    return numbers


@pytest.mark.parametrize("form", FORMS)
def test_late_scores_are_waited_for(folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tokens(run(make_engine(folder, form)))

    def be_late(_: int) -> bool:
        time.sleep(0.02)
        return False

    numbers = patch_wait(monkeypatch, be_late)
    assert tokens(run(make_engine(folder, form))) == wanted
    assert len(numbers) > 5, "no step was of fixed form"


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_do_not_come_fail_the_requests_of_their_step_and_the_next_are_served(
    folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(run(make_engine(folder, form)))
    engine = make_engine(folder, form)
    patch_wait(monkeypatch, lambda number: number == 4)
    outputs = run(engine)
    failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert failed
    assert all("sent no early queries of layer 1 to the CPU" in (output.error or "") for output in failed)
    for output, answer in zip(outputs, wanted, strict=True):
        assert output.token_ids == answer[: len(output.token_ids)]
    assert tokens(run(engine)) == wanted


def test_an_accelerator_that_gets_no_scores_fails_its_step_and_the_next_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(run(make_engine(folder, ON_CPU)))
    engine = make_engine(folder, ON_CPU)
    with monkeypatch.context() as patch:
        lanes = GivingUp(patch)

        def hang_once(number: int) -> bool:
            assert number != 3 or lanes.has_given_up.wait(60.0)
            return False

        patch_wait(patch, hang_once)
        outputs = run(engine)
    failed = [output.error or "" for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert failed
    assert all("scores of far keys, layer 1: another lane did not do its part" in error for error in failed)
    assert tokens(run(engine)) == wanted


def test_a_step_that_breaks_off_leaves_no_question_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that scores reads rows of requests: they may be given back only when it has answered."""
    num_calls, asked, seen = 0, threading.Event(), set()

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        nonlocal num_calls
        num_calls += isinstance(attention, EarlyAttention)
        if num_calls == 3:
            assert asked.wait(60.0)  # the CPU waits for queries that never come
            raise MemoryError("no memory, says the test")
        return call_model(model, batch, attention)

    def note(scores: fixed_scores.FixedScores, far: FarRows) -> None:
        begin(scores, far)
        seen.add(scores)
        asked.set()

    begin = fixed_scores.FixedScores.begin
    monkeypatch.setattr(fixed_scores.FixedScores, "begin", note)
    monkeypatch.setattr(words, "WAIT_LIMIT_S", 500.0)
    engine = make_engine(folder, ON_CPU, forward=forward)
    start = time.monotonic()
    with pytest.raises(MemoryError):
        run(engine)
    assert time.monotonic() - start < 250.0, "somebody waited for its limit"
    assert num_calls == 3
    assert [scores._asked for scores in seen] == [{}] * len(seen)


def test_no_lane_waits_for_kernels_that_are_compiled_at_a_step_s_first_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "WAIT_LIMIT_S", 1.0)
    forward = CompilingForward(EarlyAttention)
    wanted = tokens(run(make_engine(folder, ON_CPU)))
    engine = make_engine(folder, CAPTURED_ON_CPU, capture=lambda: capture_nothing, forward=forward)
    assert tokens(run(engine)) == wanted, "the step that was to be captured is answered"
    assert len(forward.compiled) == engine.stats.num_graph_failures == 1


@pytest.mark.parametrize("mode", list(HybridGenMode))
def test_replayed_steps_read_what_changes_from_step_to_step(
    folder: Path, mode: HybridGenMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that replays in a thread of its own, as an accelerator does; the CPU answers behind the launch."""
    launched: list[threading.Thread] = []

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            launched.append(threading.Thread(target=torch.inference_mode()(body)))
            launched[-1].start()

        return replay

    def answer_and_wait(answers: EarlyAnswers, far: FarRows, batches: Sequence[KeyBatch] | None) -> None:
        answer(answers, far, batches)
        if launched:
            launched[-1].join(60.0)
            assert not launched[-1].is_alive()

    wanted = tokens(run(make_engine(folder, ON_CPU, mode=mode)))
    answer = EarlyAnswers.answer
    monkeypatch.setattr(EarlyAnswers, "answer", answer_and_wait)
    engine = make_engine(folder, CAPTURED_ON_CPU, mode=mode, capture=lambda: capture)
    assert tokens(run(engine)) == wanted
    assert tokens(run(engine)) == wanted, "other requests, in other rows"
    assert engine.stats.num_graph_failures == 0
    assert engine.stats.num_replayed_steps == len(launched) > engine.stats.num_steps / 2


@pytest.mark.parametrize("form", FORMS)
def test_buffers_that_cannot_be_pinned_give_up_graphs(
    folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens(run(make_engine(folder, form)))
    monkeypatch.setattr("ambidex.runner.policy_steps.FixedScores", refuse_pinned)
    engine = make_engine(folder, form)
    assert tokens(run(engine)) == wanted
    assert engine.stats.fallbacks[Fallback.NO_GRAPHS] == 1
    assert caplog.text.count("CUDA graphs are given up") == 1
