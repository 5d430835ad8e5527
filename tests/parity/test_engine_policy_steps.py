"""Decode steps of fixed form of policies give what those launched op by op give; on a GPU they are captured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.attention.key_sums import KeySums
from ambidex.attention.page_boxes import PageBoxes
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Lane, Tier
from ambidex.core.policy import H2OForm, HybridGenFeedback, HybridGenMode, PolicyName
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.memory import DEFAULT_CONTEXTS
from ambidex.runner.capture import Capture, CudaCapture
from ambidex.runner.decode import DecodeForm
from ambidex.runner.policy_steps import PolicySteps
from ambidex.runner.runner import ModelRunner
from arriving_requests import NUM_OUTPUTS, run
from tiny_engine import make_engine_folder

FORMS = [
    pytest.param(DeviceKind.CPU, DecodeForm.FIXED, id="cpu"),
    pytest.param(DeviceKind.CUDA, DecodeForm.CAPTURED, marks=pytest.mark.gpu, id="cuda"),
]
SPLITS: dict[str, dict[str, Any]] = {
    "gpu": {"kv_gpu_tokens": 1024},
    "split": {"kv_gpu_tokens": 400, "num_sink_tokens": 4, "recent_window": 8},
}
HYBRIDGEN: dict[str, Any] = {"policy": PolicyName.HYBRIDGEN, "near_tokens": 3}
INFINIGEN: dict[str, Any] = {"policy": PolicyName.INFINIGEN, "alpha": 0.3, "policy_percent": 60}
METHODS: dict[str, dict[str, Any]] = {
    **{mode.value: {"hybridgen_mode": mode, **HYBRIDGEN} for mode in HybridGenMode},
    "infinigen": INFINIGEN,
}
LONE_METHODS: dict[str, dict[str, Any]] = {
    "h2o": {"policy": PolicyName.H2O, "policy_percent": 60},
    "h2o drop": {"policy": PolicyName.H2O, "policy_percent": 60, "h2o_form": H2OForm.DROP},
    "keyformer": {"policy": PolicyName.KEYFORMER},
    "qinfer_windows": {"policy": PolicyName.QINFER_WINDOWS, "policy_percent": 50},
    "streaming_llm": {"policy": PolicyName.STREAMING_LLM, "policy_tokens": 12},
    "quest": {"policy": PolicyName.QUEST, "policy_tokens": 9, "page_tokens": 3, "exact_layers": 1},
    "quest in all layers": {"policy": PolicyName.QUEST, "policy_tokens": 16, "page_tokens": 4, "exact_layers": 0},
}
ALL_METHODS = METHODS | LONE_METHODS


def make_engine(
    folder: Path,
    device: DeviceKind,
    form: DecodeForm | None,
    *,
    capture: Callable[[], Capture] = CudaCapture,
    **settings: Any,
) -> Engine:
    common: dict[str, Any] = {
        "model": str(folder),
        "device": device,
        "dtype": DTypeChoice.FP32,
        "block_size": 16,
        "num_threads": 1,
        "max_context_len": 128,
        "exact_layers": 1 if settings["policy"].looks_ahead else None,
    }
    return build_engine(EngineConfig(**common | settings), decode_form=form, capture=capture)


def steps_of(engine: Engine) -> PolicySteps:
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.decode_steps, PolicySteps)
    return runner.decode_steps


class Counted:
    """Counts the steps that an engine's fixed form has taken."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        steps, self.num = steps_of(engine), 0
        try_run = steps.try_run

        def counting(requests: Any) -> Any:
            output = try_run(requests)
            self.num += output is not None
            return output

        monkeypatch.setattr(steps, "try_run", counting)


@pytest.mark.parametrize(("device", "form"), FORMS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("variant", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_fixed_steps_equal_those_of_steps_launched_op_by_op(
    method: str,
    variant: str,
    split: str,
    device: DeviceKind,
    form: DecodeForm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven requests that come and go, beside prompts."""
    settings = {**METHODS[method], **SPLITS[split]}
    folder = make_engine_folder(tmp_path, variant)
    params = [
        SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True, logprobs=2) for num in NUM_OUTPUTS
    ]
    ordinary = make_engine(folder, device, DecodeForm.ORDINARY, **settings)
    wanted = run(ordinary, params)
    engine = make_engine(folder, device, form, **settings)
    counted = Counted(engine, monkeypatch)
    assert run(engine, params) == wanted
    assert counted.num > engine.stats.num_steps / 3
    assert engine.stats.num_graph_failures == 0
    assert (engine.stats.num_moves > 0) is (split == "split")
    figures, others = engine.stats.selection, ordinary.stats.selection
    assert figures == others
    assert figures is not None
    assert figures.attended_share < 0.9, "nothing is left out: the test would prove nothing"
    for lane in (Lane.GPU, Lane.CPU) if device is DeviceKind.CUDA else (Lane.CPU,):  # else one reads padded rows
        assert engine.stats.lane_bytes[lane] == ordinary.stats.lane_bytes[lane], lane
    if form is DecodeForm.CAPTURED:
        assert engine.stats.num_replayed_steps > engine.stats.num_steps / 5


@pytest.mark.parametrize(("device", "form"), FORMS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("variant", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("method", LONE_METHODS)
def test_tokens_of_fixed_steps_of_the_accelerator_alone_equal_those_of_steps_launched_op_by_op(
    method: str,
    variant: str,
    split: str,
    device: DeviceKind,
    form: DecodeForm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven requests that come and go, beside prompts. Sums and boxes take no more than the ledger says, and are given
    back."""
    settings = {**LONE_METHODS[method], **SPLITS[split]}
    folder = make_engine_folder(tmp_path, variant)
    params = [
        SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True, logprobs=2) for num in NUM_OUTPUTS
    ]
    ordinary = make_engine(folder, device, DecodeForm.ORDINARY, **settings)
    wanted = run(ordinary, params)
    engine = make_engine(folder, device, form, **settings)
    counted, held = Counted(engine, monkeypatch), []
    kind = PageBoxes if method.startswith("quest") else KeySums
    owner = "boxes" if method.startswith("quest") else "sums"
    keep_new: Callable[..., None] = kind.keep_new

    def keeping(kept: KeySums | PageBoxes, *arguments: Any) -> None:
        keep_new(kept, *arguments)
        held.append((kept, kept.num_bytes))

    monkeypatch.setattr(kind, "keep_new", keeping)
    assert run(engine, params) == wanted
    taken = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.GPU)}
    if method == "streaming_llm":
        assert not held
        assert not {"sums", "boxes"} & taken.keys()
    else:
        assert 0 < max(num_bytes for _, num_bytes in held) <= taken[owner]
        assert held[-1][0].num_bytes == 0
    assert counted.num > engine.stats.num_steps / 3
    assert engine.stats.num_graph_failures == 0
    assert (engine.stats.num_moves > 0) is (split == "split")
    figures = engine.stats.selection
    assert figures == ordinary.stats.selection
    assert figures is not None
    assert figures.attended_share < 0.9, "nothing is left out: the test would prove nothing"
    if form is DecodeForm.CAPTURED:
        assert engine.stats.num_replayed_steps > engine.stats.num_steps / 5


@pytest.mark.parametrize("method", LONE_METHODS)
def test_a_replayed_step_of_the_accelerator_alone_reads_nothing_of_the_one_that_was_captured(
    method: str, tmp_path: Path
) -> None:
    """A capture that keeps the launches of its step as they are: what they are told of requests must lie on the
    device."""
    # A step that attends keys in DRAM in its first layers would wait for a CPU that waits for the launch's end.
    settings = {**LONE_METHODS[method], **SPLITS["gpu" if method == "quest" else "split"]}
    folder = make_engine_folder(tmp_path)
    params = [SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True) for num in NUM_OUTPUTS]
    wanted = run(make_engine(folder, DeviceKind.CPU, DecodeForm.ORDINARY, **settings), params)
    engine = make_engine(folder, DeviceKind.CPU, DecodeForm.CAPTURED, capture=lambda: lambda body: body, **settings)
    assert run(engine, params) == wanted
    assert engine.stats.num_replayed_steps > engine.stats.num_steps / 5
    assert engine.stats.num_graph_failures == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dram_memory": 0}, "no rows are kept in host memory: `dram_memory` is 0"),
        ({"block_size": 4}, "keys in DRAM are not in tile order"),
        ({"kv_gpu_tokens": 0}, "no K and V lie on the accelerator"),
    ],
)
def test_report_says_why_steps_are_launched_op_by_op(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    folder = make_engine_folder(tmp_path)
    for method in (HYBRIDGEN, INFINIGEN, *LONE_METHODS.values()):
        engine = make_engine(folder, DeviceKind.CPU, DecodeForm.FIXED, **method, **settings)
        why = f"steps of policy {method['policy']} are launched op by op: {reason}"
        assert engine.report.value("compute", "decode") == "ordinary"
        assert engine.report.why("compute", "decode") == why


@pytest.mark.parametrize("method", ALL_METHODS)
def test_report_says_that_steps_have_a_fixed_form(tmp_path: Path, method: str) -> None:
    settings = {**ALL_METHODS[method], **SPLITS["split"]}
    engine = make_engine(make_engine_folder(tmp_path), DeviceKind.CPU, DecodeForm.FIXED, **settings)
    assert engine.report.value("compute", "decode") == "fixed"
    how = "made a layer ahead" if method in METHODS else "add up what they get"
    how = "the first keys and the newest, in one kernel" if method == "streaming_llm" else how
    how = "the newest page and those with the largest bounds" if method.startswith("quest") else how
    assert how in engine.report.why("compute", "policy")
    if method in LONE_METHODS and method != "streaming_llm":
        kept = f"of {DEFAULT_CONTEXTS * 128} tokens, on the accelerator"
        name = "policy_boxes" if method.startswith("quest") else "policy_sums"
        assert engine.report.value("compute", name) == kept
    assert steps_of(engine).dram_threads is not None


@pytest.mark.parametrize("method", METHODS)
def test_report_names_the_form_of_steps_that_are_launched_op_by_op(tmp_path: Path, method: str) -> None:
    """It said on every CPU that such steps took the ordinary path, in plain torch."""
    folder = make_engine_folder(tmp_path)
    for settings, words in ((SPLITS["split"], "made a layer ahead"), ({"dram_memory": 0}, "in plain torch")):
        engine = make_engine(folder, DeviceKind.CPU, None, **METHODS[method], **settings)
        assert engine.report.value("compute", "decode") == "ordinary"
        assert engine.report.why("compute", "decode").endswith("are launched op by op: graphs need a GPU")
        assert words in engine.report.why("compute", "policy")


def test_near_rows_are_no_more_than_a_context_has(tmp_path: Path) -> None:
    """With --near-tokens 100000 the engine asked for room for as many rows of each request."""
    folder = make_engine_folder(tmp_path)
    all_near, more = (
        make_engine(folder, DeviceKind.CPU, None, **{**HYBRIDGEN, **SPLITS["gpu"], "near_tokens": near})
        for near in (128, 100_000)
    )
    params = [SamplingParams(max_output_tokens=num, temperature=0.0) for num in NUM_OUTPUTS]
    assert run(more, params) == run(all_near, params)
    taken = [engine.figures.ledger.entries(Tier.GPU) for engine in (all_near, more)]
    assert taken[0] == taken[1]


@pytest.mark.parametrize(("device", "form"), FORMS)
def test_feedback_is_told_the_times_of_fixed_steps(
    device: DeviceKind, form: DecodeForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"hybridgen_feedback": HybridGenFeedback.FULL, "min_selected_tokens": 4, **HYBRIDGEN, **SPLITS["split"]}
    engine = make_engine(make_engine_folder(tmp_path), device, form, **settings)
    counted = Counted(engine, monkeypatch)
    feedback = engine.core.scheduler.feedback
    assert feedback is not None
    before = feedback.setting
    params = [SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True) for num in NUM_OUTPUTS]
    assert [len(answer) for answer in run(engine, params)] == list(NUM_OUTPUTS)
    assert counted.num > 5
    assert feedback.setting != before
    times = feedback.setting.times
    assert times is None or (times.gpu_s > 0 and min(times.cpu_s, times.transfer_s) >= 0)


@pytest.mark.parametrize("method", ["h2o", "streaming_llm", "quest"])
def test_nothing_is_kept_for_fixed_steps_where_weights_lie_in_dram(method: str, tmp_path: Path) -> None:
    """And answers are those of an engine whose weights do not."""
    settings = {**LONE_METHODS[method], **SPLITS["gpu"]}
    folder = make_engine_folder(tmp_path)
    params = [SamplingParams(max_output_tokens=num, temperature=0.0, ignore_eos=True) for num in NUM_OUTPUTS]
    wanted = run(make_engine(folder, DeviceKind.CPU, DecodeForm.ORDINARY, **settings), params)
    engine = make_engine(folder, DeviceKind.CPU, DecodeForm.FIXED, weights_gpu_memory=430_000, **settings)
    why = f"steps of policy {settings['policy']} are launched op by op: weights lie in DRAM"
    assert engine.report.value("compute", "decode") == "ordinary"
    assert engine.report.why("compute", "decode") == why
    assert not {"sums", "boxes"} & {entry.owner for entry in engine.figures.ledger.entries(Tier.GPU)}
    assert run(engine, params) == wanted
