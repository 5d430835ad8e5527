"""A CPU job that comes late, never, or dies; copies that fail; buffers that cannot be had."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ambidex import EngineConfig, FinishReason
from ambidex.attention import handover
from ambidex.attention.hybrid import HybridAttention
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import CopyError
from ambidex.core.ids import Fallback, Tier
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.native import AttentionScript, KeyBatch
from ambidex.runner.decode import DecodeForm
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool
from fault_runs import (
    CAPTURED_ON_CPU,
    FORMS,
    ON_CPU,
    PROMPTS,
    SPLIT,
    CompilingForward,
    Form,
    GivingUp,
    capture_nothing,
    refuse_pinned,
    run,
    tokens,
)


def make_engine(folder: Path, form: Form, **settings: Any) -> Engine:
    device, decode_form = form
    config = EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, **{**SPLIT, "kv_gpu_tokens": 256}
    )
    return build_engine(config, decode_form=decode_form, **settings)


def patch_script(monkeypatch: pytest.MonkeyPatch, *, fatal_run: int = -1, delay_s: float = 0.0) -> list[int]:
    """Let the CPU lane answer late, or not at all in one of its runs; returns how many layers each run answered."""
    answered: list[int] = []

    def lame(
        script: AttentionScript, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()
    ) -> tuple[int, int]:
        time.sleep(delay_s)
        if len(answered) == fatal_run:
            answered.append(0)
            return 0, 0  # the thread has died: no layer is answered, no word is set
        num_answered, num_last = run_script(script, batches, limit_s=limit_s, scanned=scanned)
        answered.append(num_answered)
        return num_answered, num_last

    run_script = AttentionScript.run
    monkeypatch.setattr(AttentionScript, "run", lame)
    return answered


@pytest.mark.parametrize("form", FORMS)
def test_a_late_cpu_lane_is_waited_for(folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tokens(run(make_engine(folder, form)))
    answered = patch_script(monkeypatch, delay_s=0.02)
    assert tokens(run(make_engine(folder, form))) == wanted
    assert sum(answered) > 0, "no step had keys in DRAM"


@pytest.mark.parametrize("form", FORMS)
def test_a_lost_cpu_job_fails_the_requests_of_its_step_and_the_next_are_served(
    folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "WAIT_LIMIT_S", 5.0)
    wanted = tokens(run(make_engine(folder, form)))
    engine = make_engine(folder, form)
    answered = patch_script(monkeypatch, fatal_run=4)
    outputs = run(engine)
    assert answered[4] == 0
    failed = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert failed
    assert all("sent no queries of layer 0 to the CPU lane" in (output.error or "") for output in failed)
    for output, answer in zip(outputs, wanted, strict=True):
        assert output.token_ids == answer[: len(output.token_ids)]
    assert engine.stats.num_failed_requests == len(failed)
    assert tokens(run(engine)) == wanted


def test_no_lane_waits_for_kernels_that_are_compiled_at_a_step_s_first_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "WAIT_LIMIT_S", 1.0)
    forward = CompilingForward(HybridAttention)
    wanted = tokens(run(make_engine(folder, ON_CPU)))
    engine = make_engine(folder, CAPTURED_ON_CPU, capture=lambda: capture_nothing, forward=forward)
    assert tokens(run(engine)) == wanted, "the step that was to be captured is answered"
    assert len(forward.compiled) == engine.stats.num_graph_failures == 1


def test_an_accelerator_that_gets_no_answer_fails_its_step_and_the_next_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(run(make_engine(folder, ON_CPU)))
    engine = make_engine(folder, ON_CPU)
    runs: list[int] = []

    def hang_once(
        script: AttentionScript, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()
    ) -> tuple[int, int]:
        runs.append(len(batches))
        assert len(runs) != 3 or lanes.has_given_up.wait(60.0)
        return run_script(script, batches, limit_s=limit_s, scanned=scanned)

    run_script = AttentionScript.run
    with monkeypatch.context() as patch:
        lanes = GivingUp(patch)
        patch.setattr(AttentionScript, "run", hang_once)
        outputs = run(engine)
    failed = [output.error or "" for output in outputs if output.finish_reason is FinishReason.ERROR]
    assert failed
    assert all("another lane did not do its part" in error for error in failed)
    assert tokens(run(engine)) == wanted


@pytest.mark.parametrize("form", FORMS)
def test_handover_buffers_that_cannot_be_pinned_give_up_graphs(
    folder: Path, form: Form, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens(run(make_engine(folder, form)))
    monkeypatch.setattr("ambidex.runner.step_lanes.Handover", refuse_pinned)
    engine = make_engine(folder, form)
    assert tokens(run(engine)) == wanted
    assert engine.stats.fallbacks[Fallback.NO_GRAPHS] == 1
    assert caplog.text.count("CUDA graphs are given up") == 1


@pytest.mark.parametrize("error", [CopyError("the link is down"), RuntimeError("CUDA error: unspecified")])
@pytest.mark.parametrize("form", FORMS)
def test_copies_that_fail_leave_their_blocks_where_they_are(
    folder: Path, form: Form, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    num_copies = 0

    def copy_every_second(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies % 2:
            for part in target.tensors:
                part[:, :, target_id].fill_(77)  # it died half way
            raise error
        copy_block(source, source_id, target, target_id)

    wanted = tokens(run(make_engine(folder, form)))
    engine = make_engine(folder, form, copy=copy_every_second)
    assert tokens(run(engine)) == wanted
    assert engine.stats.num_failed_moves == -(-num_copies // 2) > 0
    assert engine.stats.peak_kv_bytes[Tier.DRAM] > 0
    assert str(error) in caplog.text


def test_a_link_that_is_down_for_good_is_not_said_for_each_block_and_step(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise CopyError("the link is down")

    form = (DeviceKind.CPU, DecodeForm.ORDINARY)
    wanted = tokens(run(make_engine(folder, form), PROMPTS))
    engine = make_engine(folder, form, copy=fail)
    assert tokens(run(engine, PROMPTS)) == wanted
    assert engine.stats.num_failed_moves > 10
    assert caplog.text.count("the link is down") == 1
