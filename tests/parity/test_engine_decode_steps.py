"""Decode steps of fixed shape give the tokens of the ordinary path; on a GPU they are captured as CUDA graphs."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.paged import PagedAttention
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import ShapeError
from ambidex.core.ids import Lane, RequestId
from ambidex.core.step import ScheduledRequest, StepPlan, make_buckets
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner import step_lanes
from ambidex.runner.capture import CudaCapture
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.runner.decode import DecodeForm, DecodeOutput
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import LaunchedPlan, ModelRunner, call_model
from arriving_requests import NUM_OUTPUTS, make_prompts, run
from tiny_engine import make_engine_folder
from tiny_models import VARIANTS

FORMS = [
    pytest.param(DeviceKind.CPU, DecodeForm.FIXED, id="cpu"),
    pytest.param(DeviceKind.CUDA, DecodeForm.CAPTURED, marks=pytest.mark.gpu, id="cuda"),
]
SETTINGS: dict[str, dict[str, object]] = {
    "small blocks": {"block_size": 4, "max_tokens_per_step": 9, "kv_gpu_tokens": 1024},
    "large blocks": {"block_size": 16, "max_tokens_per_step": 512, "kv_gpu_tokens": 1024},
}


class CountingForward:
    """Calls the model, and counts the steps of fixed shape by their rows; `None` counts all others."""

    def __init__(self) -> None:
        self.num_steps: Counter[int | None] = Counter()
        self.num_hybrid_steps = 0

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        is_fixed = isinstance(attention, PagedAttention | HybridAttention)
        self.num_steps[len(batch.token_ids) if is_fixed else None] += 1
        self.num_hybrid_steps += isinstance(attention, HybridAttention)
        return call_model(model, batch, attention)


def run_to_end(engine: Engine) -> dict[RequestId, RequestOutput]:
    """The last output of each request that is there."""
    outputs: dict[RequestId, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def greedy(**settings: object) -> list[SamplingParams]:
    return [
        SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True, **settings)  # type: ignore[arg-type]
        for num in NUM_OUTPUTS
    ]


def make_config(folder: Path, device: DeviceKind, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), device=device, dtype=DTypeChoice.FP32, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "form"), FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_of_fixed_steps_equal_the_ordinary_path(
    variant: str, device: DeviceKind, form: DecodeForm, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    name = list(SETTINGS)[list(VARIANTS).index(variant) % len(SETTINGS)]
    config = make_config(folder, device, **SETTINGS[name])
    ordinary = build_engine(config, decode_form=DecodeForm.ORDINARY)
    wanted = run(ordinary, greedy())
    forward = CountingForward()
    engine = build_engine(config, decode_form=form, forward=forward)
    assert run(engine, greedy()) == wanted
    fixed = {num_rows: num for num_rows, num in forward.num_steps.items() if num_rows is not None}
    assert len(fixed) > 2, f"steps by rows: {forward.num_steps}"
    assert engine.stats.lane_bytes[Lane.CPU] == 0
    if config.block_size % 16 or device is DeviceKind.CUDA:  # else the ordinary path reads padded rows on a CPU
        assert engine.stats.lane_bytes[Lane.GPU] == ordinary.stats.lane_bytes[Lane.GPU]
    assert engine.stats.num_graph_failures == 0
    if form is DecodeForm.CAPTURED:
        assert engine.stats.num_replayed_steps > engine.stats.num_steps / 4


@pytest.mark.parametrize(("device", "form"), FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_of_steps_with_keys_in_dram_equal_the_ordinary_path(
    variant: str, device: DeviceKind, form: DecodeForm, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    config = make_config(folder, device, block_size=16, kv_gpu_tokens=400, num_sink_tokens=4, recent_window=8)
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), greedy())
    forward = CountingForward()
    engine = build_engine(config, decode_form=form, forward=forward)
    assert run(engine, greedy()) == wanted
    assert engine.stats.num_moves > 0
    assert engine.stats.num_graph_failures == 0
    if form is DecodeForm.CAPTURED:
        assert engine.stats.num_replayed_steps > engine.stats.num_steps / 4
    assert forward.num_hybrid_steps > 0 or variant == "mistral", "no step had keys in DRAM"  # its window is 8


@pytest.mark.parametrize(("device", "form"), FORMS)
@pytest.mark.parametrize(
    ("variant", "split", "has_fixed_steps"),
    [
        ("llama", {"kv_gpu_tokens": 104, "dram_memory": 0, "max_context_len": 100}, True),
        ("qwen2_windows", {"kv_gpu_tokens": 400, "num_sink_tokens": 4, "recent_window": 16}, False),
        (
            "mistral",
            {"kv_gpu_tokens": 400, "num_sink_tokens": 4, "recent_window": 16},
            True,
        ),  # window 8: sees GPU alone
    ],
)
def test_greedy_tokens_when_requests_yield_or_blocks_leave_equal_the_ordinary_path(
    variant: str, split: dict[str, int], has_fixed_steps: bool, device: DeviceKind, form: DecodeForm, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    config = make_config(folder, device, block_size=4, **split)
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), greedy())
    forward = CountingForward()
    engine = build_engine(config, decode_form=form, forward=forward)
    assert run(engine, greedy()) == wanted
    assert engine.stats.num_preemptions or engine.stats.num_moves, "nothing yielded or moved: nothing is proved"
    assert (forward.num_steps.keys() > {None}) is has_fixed_steps


@pytest.mark.parametrize(("device", "form"), FORMS)
def test_sampled_tokens_of_fixed_steps_equal_the_ordinary_path(
    device: DeviceKind, form: DecodeForm, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, "qwen3")
    config = make_config(folder, device, block_size=8, kv_gpu_tokens=1024, max_tokens_per_step=64)
    params = greedy()
    params[1] = SamplingParams(max_output_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    params[2] = SamplingParams(max_output_tokens=24, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    params[5] = SamplingParams(max_output_tokens=30, temperature=0.0, min_output_tokens=20, logit_bias=((7, 2.0),))
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), params)
    assert run(build_engine(config, decode_form=form), params) == wanted


@pytest.mark.parametrize(("device", "form"), FORMS)
def test_logits_that_are_not_finite_fail_their_request_alone(
    device: DeviceKind, form: DecodeForm, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, device, kv_gpu_tokens=1024, block_size=4)
    healthy = build_engine(config, decode_form=DecodeForm.ORDINARY)
    wanted = run(healthy, greedy())

    class Poisoned(CountingForward):
        def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
            hidden = super().__call__(model, batch, attention)
            is_bad = (batch.positions == 50)[:, None]  # the second request alone comes so far before the last begins
            return hidden.masked_fill(is_bad, torch.nan) if isinstance(attention, PagedAttention) else hidden

    engine = build_engine(config, decode_form=form, forward=Poisoned())
    prompts = make_prompts()
    params = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
    good, bad = engine.add(prompts[0], params), engine.add(prompts[1], params)
    outputs = run_to_end(engine)
    assert outputs[good].token_ids == wanted[0]
    assert "not finite after 11 tokens" in (outputs[bad].error or "")


def test_steps_are_captured_once_for_each_size_and_then_replayed(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, DeviceKind.CPU, kv_gpu_tokens=1024, block_size=4)
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), greedy())
    captured: list[Callable[[], None]] = []

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        captured.append(body)
        return body  # without a GPU: launched again as it is

    forward = CountingForward()
    engine = build_engine(config, decode_form=DecodeForm.CAPTURED, capture=lambda: capture, forward=forward)
    assert run(engine, greedy()) == wanted
    num_fixed = sum(num for num_rows, num in forward.num_steps.items() if num_rows is not None)
    assert len(captured) == len(forward.num_steps.keys() - {None}) > 2
    assert engine.stats.num_replayed_steps == num_fixed - len(captured)


AHEAD_FORMS = [pytest.param(DeviceKind.CPU, id="cpu"), pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu, id="cuda")]


@pytest.mark.parametrize("device", AHEAD_FORMS)
def test_steps_sent_behind_the_running_one_give_the_same_answers_whoever_ends(
    device: DeviceKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, device, kv_gpu_tokens=1024, block_size=4, max_tokens_per_step=64)
    params = greedy()
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), params)
    # The third answer ends by a token that none can know before it is sampled, the last by a text.
    params[2] = replace(params[2], stop_token_ids=(wanted[2][9],), min_output_tokens=9)
    params[6] = replace(params[6], stop=(chr(97 + wanted[6][5] % 26),))
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), params)
    assert len(wanted[2]) == 10, "it did not end by its token"

    sent: list[tuple[bool, int]] = []
    launch = ModelRunner.launch

    def counting_launch(runner: ModelRunner, plan: StepPlan) -> LaunchedPlan | None:
        launched = launch(runner, plan)
        if launched is not None:
            sent.append((plan.requests[0].is_pending, len(plan.requests)))
        return launched

    monkeypatch.setattr(ModelRunner, "launch", counting_launch)
    capture = CudaCapture if device is DeviceKind.CUDA else lambda: lambda body: body
    engine = build_engine(config, decode_form=DecodeForm.CAPTURED, capture=capture)
    assert run(engine, params) == wanted
    assert sum(is_pending for is_pending, _ in sent) > 10, sent
    assert {num for is_pending, num in sent if is_pending} >= {2, 3, 4}, sent
    assert engine.stats.num_output_tokens == sum(len(answer) for answer in wanted)


def test_a_step_that_fails_ends_the_one_behind_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, DeviceKind.CPU, kv_gpu_tokens=1024, block_size=4)
    engine = build_engine(config, decode_form=DecodeForm.CAPTURED, capture=lambda: lambda body: body)
    params = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
    wait = ChosenCopy.wait
    num_waits = 0

    def failing_wait(copy: ChosenCopy) -> list[int]:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 3:
            raise RuntimeError("the device is lost")
        return wait(copy)

    monkeypatch.setattr(ChosenCopy, "wait", failing_wait)
    first = engine.add([5, 6, 7], params)
    with pytest.raises(RuntimeError, match="the device is lost"):
        run_to_end(engine)
    second = engine.add([5, 6, 7], params)
    outputs = run_to_end(engine)
    assert "the device is lost" in (outputs[first].error or "")
    assert len(outputs[second].token_ids) == 20
    assert outputs[second].error is None
    engine.core.scheduler.check()


def test_graphs_are_given_up_with_one_warning_when_a_capture_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, DeviceKind.CPU, kv_gpu_tokens=1024, block_size=4)
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), greedy())
    num_captures = 0

    def capture_once(body: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_captures
        num_captures += 1
        if num_captures == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return body

    engine = build_engine(config, decode_form=DecodeForm.CAPTURED, capture=lambda: capture_once)
    assert run(engine, greedy()) == wanted
    assert num_captures == 2
    assert engine.stats.num_graph_failures == 1
    assert caplog.text.count("CUDA graphs are given up") == 1


def make_hybrid(folder: Path, form: DecodeForm) -> Engine:
    """An engine whose decode steps have keys in DRAM."""
    config = make_config(folder, DeviceKind.CPU, block_size=16, kv_gpu_tokens=400, num_sink_tokens=4, recent_window=8)
    return build_engine(config, decode_form=form)


def raising(error: Exception) -> Callable[..., Any]:
    """A function that only raises."""

    def fail(*args: object, **settings: object) -> None:
        del args, settings
        raise error

    return fail


@pytest.mark.parametrize(
    "fault",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), ShapeError("q is [1, 2], not [2, 2]")],
)
def test_a_fault_while_a_step_is_prepared_is_not_hidden_by_another_path(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_lanes, "Handover", raising(fault))
    engine = make_hybrid(make_engine_folder(tmp_path, "llama"), DecodeForm.FIXED)
    with pytest.raises(type(fault), match=re.escape(str(fault))):
        run(engine, greedy())
    assert engine.stats.num_graph_failures == 0


def test_a_fault_of_ours_while_a_step_is_captured_is_not_hidden_by_another_path(tmp_path: Path) -> None:
    config = make_config(make_engine_folder(tmp_path, "llama"), DeviceKind.CPU, kv_gpu_tokens=1024, block_size=4)
    fault = ShapeError("q is [1, 2], not [2, 2]")
    engine = build_engine(config, decode_form=DecodeForm.CAPTURED, capture=lambda: raising(fault))
    with pytest.raises(ShapeError):
        run(engine, greedy())


@pytest.mark.gpu
def test_a_capture_that_fails_is_counted_and_answers_stay_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, DeviceKind.CUDA, kv_gpu_tokens=1024, block_size=4)
    wanted = run(build_engine(config, decode_form=DecodeForm.ORDINARY), greedy())

    def waiting(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        hidden = call_model(model, batch, attention)
        if isinstance(attention, PagedAttention):
            hidden.sum().item()  # waits for the device, which no capture may
        return hidden

    with caplog.at_level(logging.WARNING):
        engine = build_engine(config, decode_form=DecodeForm.CAPTURED, forward=waiting)
        assert run(engine, greedy()) == wanted
    assert engine.stats.num_graph_failures == 1
    assert engine.stats.num_replayed_steps == 0
    assert caplog.text.count("CUDA graphs are given up") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama", "mistral", "opt", "falcon_40b"])
def test_bf16_logits_of_captured_steps_are_as_near_to_fp32_as_the_ordinary_path(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    truth, plain, captured = (
        decode_logits(folder, form, dtype, monkeypatch).double()
        for form, dtype in (
            (DecodeForm.ORDINARY, DTypeChoice.FP32),
            (DecodeForm.ORDINARY, DTypeChoice.BF16),
            (DecodeForm.CAPTURED, DTypeChoice.BF16),
        )
    )
    assert (captured - truth).abs().max() <= 2 * (plain - truth).abs().max()


def decode_logits(folder: Path, form: DecodeForm, dtype: DTypeChoice, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits of all decode steps of some prompts, one after another; a bias makes every answer the same token."""
    params = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True, logit_bias=((7, 100.0),))
    kept: list[Tensor] = []

    def keeping_forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        hidden = call_model(model, batch, attention)
        if len(batch.token_ids) == 1 and not isinstance(attention, PagedAttention):
            kept.append(model.logits(hidden))
        return hidden

    def keeping_try_run(steps: DecodeSteps, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        output = try_run(steps, requests)
        if output is not None:
            kept.append(output.logits.clone())
        return output

    try_run = DecodeSteps.try_run
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSteps, "try_run", keeping_try_run)
        config = EngineConfig(model=str(folder), device=DeviceKind.CUDA, dtype=dtype, kv_gpu_tokens=1024, block_size=16)
        engine = build_engine(config, decode_form=form, forward=keeping_forward)
        for prompt in make_prompts()[1:]:
            engine.add(prompt, params)
            while engine.has_work:
                engine.step()
    return torch.cat(kept)


@pytest.mark.parametrize(
    ("max_running", "wanted"), [(1, (1,)), (3, (1, 2, 4)), (17, (1, 2, 4, 8, 16, 24)), (64, (*range(8, 65, 8),))]
)
def test_buckets_reach_up_to_all_running_requests(max_running: int, wanted: tuple[int, ...]) -> None:
    buckets = make_buckets(max_running)
    assert buckets[-len(wanted) :] == wanted
    assert list(buckets) == sorted(set(buckets))


def test_buckets_end_at_256() -> None:
    assert make_buckets(100_000)[-1] == 256
