"""Captured steps with keys in DRAM are prepared while the one before them runs, and sent when it has ended."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.policy import PolicyName
from ambidex.core.step import ScheduledRequest, StepPlan
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.kernels.cpu.native import AttentionScript, KeyBatch
from ambidex.runner.capture import CudaCapture
from ambidex.runner.decode import DecodeForm, LaunchedDecode
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.runner import LaunchedPlan, ModelRunner
from ambidex.runner.step_under_way import StepUnderWay
from tiny_engine import make_engine_folder
from tiny_models import VOCAB_SIZE

POLICIES = ["exact", "flexgen", "moe_lightning", "bounded"]
FORMS = [
    *((DeviceKind.CPU, policy) for policy in POLICIES),
    # flexgen reads no fp32 over the link: on a GPU see tests/faults/test_faults_ahead_gpu.py
    *(pytest.param(DeviceKind.CUDA, policy, marks=pytest.mark.gpu) for policy in POLICIES if policy != "flexgen"),
]
NUM_OUTPUTS = (70, 45, 58)
_rng = random.Random(3)
PROMPTS = [[_rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (50, 70, 60)]


def make_config(folder: Path, device: DeviceKind, **settings: object) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, block_size=16, kv_gpu_tokens=400, num_sink_tokens=4,
        recent_window=8, **settings,
    )  # type: ignore[arg-type]  # fmt: skip


def make_engine(config: EngineConfig, device: DeviceKind) -> Engine:
    capture = CudaCapture if device is DeviceKind.CUDA else lambda: lambda body: body
    return build_engine(config, decode_form=DecodeForm.CAPTURED, capture=capture, min_scanned=1000)


def run_to_end(engine: Engine) -> dict[RequestId, RequestOutput]:
    """The last output of each request that is there."""
    outputs: dict[RequestId, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that were sent before the tokens of the last step were known, and whose keys lie in DRAM."""
    plans: list[StepPlan] = []
    launch = ModelRunner.launch

    def noting_launch(runner: ModelRunner, plan: StepPlan) -> LaunchedPlan | None:
        launched = launch(runner, plan)
        sees_dram = any(block.tier is Tier.DRAM for request in plan.requests for block in request.blocks)
        if launched is not None and sees_dram and plan.requests[0].is_pending:
            plans.append(plan)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", noting_launch)
    return plans


def add_all(engine: Engine, stop_token: int | None = None) -> list[RequestId]:
    """Three requests; the second one's answer ends by a token that none can know before it is sampled."""
    ids = []
    for place, (prompt, num_output) in enumerate(zip(PROMPTS, NUM_OUTPUTS, strict=True)):
        stop = (stop_token,) if place == 1 and stop_token is not None else ()
        params = SamplingParams(
            max_output_tokens=num_output, temperature=0.0, ignore_eos=True, stop_token_ids=stop, min_output_tokens=20
        )
        ids.append(engine.add(prompt, params))
    return ids


def answers(engine: Engine, ids: Sequence[RequestId]) -> list[tuple[int, ...]]:
    outputs = run_to_end(engine)
    assert [outputs[request_id].error for request_id in ids] == [None] * len(ids)
    return [outputs[request_id].token_ids for request_id in ids]


@pytest.mark.parametrize(("device", "policy"), FORMS)
def test_answers_are_those_of_the_ordinary_path(
    device: DeviceKind, policy: str, tmp_path: Path, sent: list[StepPlan]
) -> None:
    """So few keys that the bounded policy scans none, and attends all: steps that scan are not sent ahead."""
    folder = make_engine_folder(tmp_path, "llama")
    config = make_config(folder, device, policy=PolicyName(policy))
    ordinary = build_engine(make_config(folder, device), decode_form=DecodeForm.ORDINARY)
    stop = answers(ordinary, add_all(ordinary))[1][24]
    wanted = answers(ordinary, add_all(ordinary, stop))
    assert len(wanted[1]) < NUM_OUTPUTS[1], "it did not end by its token"
    engine = make_engine(config, device)
    assert answers(engine, add_all(engine, stop)) == wanted
    assert len(sent) > 20, f"of {engine.stats.num_steps} steps"
    assert {len(plan.requests) for plan in sent} >= {1, 2, 3}
    assert engine.stats.num_replayed_steps > engine.stats.num_steps / 2
    assert engine.stats.lane_bytes[Lane.CPU] > 0
    if policy == "bounded":
        assert engine.stats.selection is not None
        assert engine.stats.selection.num_bounded > 0
    engine.core.scheduler.check()


def test_queries_that_do_not_come_fail_that_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(make_engine_folder(tmp_path, "llama"), DeviceKind.CPU)
    engine = make_engine(config, DeviceKind.CPU)
    wanted = answers(engine, add_all(engine))
    run_script, try_start, num_starts = AttentionScript.run, DecodeSteps._try_start, 0

    def counting_start(steps: DecodeSteps, replay: Callable[[], None], num_rows: int) -> StepUnderWay | None:
        nonlocal num_starts
        num_starts += 1
        return try_start(steps, replay, num_rows)

    def failing_run(
        script: AttentionScript, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()
    ) -> tuple[int, int]:
        if num_starts == 10:
            return 0, 0
        return run_script(script, batches, limit_s=limit_s, scanned=scanned)

    with monkeypatch.context() as patch:
        patch.setattr(AttentionScript, "run", failing_run)
        patch.setattr(DecodeSteps, "_try_start", counting_start)
        ids = add_all(engine)
        outputs = run_to_end(engine)
    assert num_starts == 11, "the step behind it was to be sent, too"
    for request_id, whole in zip(ids, wanted, strict=True):
        assert "sent no queries of layer 0 to the CPU lane" in (outputs[request_id].error or "")
        got = outputs[request_id].token_ids
        assert 0 < len(got) < len(whole)
        assert got == whole[: len(got)]
    assert answers(engine, add_all(engine)) == wanted
    engine.core.scheduler.check()


@pytest.mark.parametrize("place", ["before", "behind"])
def test_ctrl_c_while_a_step_is_sent_ahead_leaves_the_engine_usable(
    place: str, tmp_path: Path, sent: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan stayed under way for ever, and no later step was taken."""
    engine = make_engine(make_config(make_engine_folder(tmp_path, "llama"), DeviceKind.CPU), DeviceKind.CPU)
    wanted = answers(engine, add_all(engine))
    num_before, try_launch = len(sent), DecodeSteps.try_launch

    def interrupted(steps: DecodeSteps, requests: Sequence[ScheduledRequest]) -> LaunchedDecode | None:
        is_now = len(sent) == num_before + 6
        launched = None if is_now and place == "before" else try_launch(steps, requests)
        if is_now:
            raise KeyboardInterrupt
        return launched

    with monkeypatch.context() as patch:
        patch.setattr(DecodeSteps, "try_launch", interrupted)
        add_all(engine)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(engine)
    run_to_end(engine)
    assert answers(engine, add_all(engine)) == wanted
    engine.core.scheduler.check()
