"""The bounded policy in its native form: answers, what it reports, blocks that are used again, and what it refuses."""

from pathlib import Path
from typing import Any, Final

import pytest
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.attention.bounded_scan import BoundedScan, find_bounds
from ambidex.attention.scan_rule import ScanRule
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.errors import BoundError, ConfigError
from ambidex.core.ids import Lane, Tier
from ambidex.core.policy import BoundedScores, PolicyName
from ambidex.core.step import SelectionFigures
from ambidex.engine.compose import build_engine, choices, lanes
from ambidex.engine.engine import Engine
from ambidex.runner import programs, step_lanes
from ambidex.runner.decode import DecodeForm
from ambidex.storage.scan_copy import ScanCopy
from fault_runs import run, tokens
from tiny_engine import make_engine_folder

TEXT: Final = (
    "what the lighthouse keeper said to the fishing boats that night was not heard by any of them for the wind"
)
PROMPTS: Final = (TEXT[:105], TEXT[40:] + TEXT[:30], TEXT[::-1][:70])
GREEDY: Final = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
SPLIT: Final[dict[str, Any]] = {"kv_gpu_tokens": 192, "num_sink_tokens": 0, "recent_window": 16}
FORMS: Final = [
    pytest.param(None, {}, id="program"),
    pytest.param(None, SPLIT, id="program, split"),
    pytest.param(None, {**SPLIT, "kv_dtype": KVDTypeChoice.INT8}, id="program, int8"),
    pytest.param(DecodeForm.FIXED, SPLIT, id="lanes"),
    pytest.param(DecodeForm.FIXED, {**SPLIT, "kv_dtype": KVDTypeChoice.INT8}, id="lanes, int8"),
    pytest.param(DecodeForm.CAPTURED, {**SPLIT, "device": DeviceKind.CUDA}, id="cuda", marks=pytest.mark.gpu),
    pytest.param(
        DecodeForm.CAPTURED,
        {**SPLIT, "device": DeviceKind.CUDA, "kv_dtype": KVDTypeChoice.INT8},
        id="cuda, int8",
        marks=pytest.mark.gpu,
    ),
]


BESIDE: Final[dict[DecodeForm | None, dict[str, Any]]] = {}
"""What is handed in with a form: filled by `lane_on_cpu`."""


@pytest.fixture
def lane_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of fixed form with a stream lane and a scan lane, without a GPU."""
    monkeypatch.setattr(choices, "why_no_stream", lambda *_: None)
    monkeypatch.setattr(lanes, "find_no_stream", lambda *_: None)
    monkeypatch.setitem(BESIDE, DecodeForm.FIXED, {"min_streamed": 10**9})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("bounded"))


def make_engine(folder: Path, form: DecodeForm | None = None, **settings: Any) -> Engine:
    common: dict[str, Any] = {
        "device": DeviceKind.CPU, "max_context_len": 128, "num_threads": 1, "block_size": 16, "dtype": DTypeChoice.FP32,
        "dram_memory": 2**22, "max_running_requests": 4,
    }  # fmt: skip
    return build_engine(
        EngineConfig(model=str(folder), **common | settings), decode_form=form, min_scanned=1, **BESIDE.get(form, {})
    )


def bounded(folder: Path, form: DecodeForm | None, mass: float, **settings: Any) -> Engine:
    return make_engine(folder, form, policy=PolicyName.BOUNDED, max_dropped_mass=mass, **settings)


def selection(engine: Engine) -> SelectionFigures:
    figures = engine.stats.selection
    assert figures is not None
    return figures


@pytest.mark.parametrize(("form", "settings"), FORMS)
def test_answers_are_those_of_exact_attention_when_hardly_anything_may_be_left_out(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    wanted = tokens(run(make_engine(folder, form, **settings), PROMPTS, GREEDY))
    engine = bounded(folder, form, 1e-4, **settings)
    assert tokens(run(engine, PROMPTS, GREEDY)) == wanted
    figures = selection(engine)
    assert figures.num_bounded == figures.num_choices > 0
    assert 0 <= figures.max_dropped_mass <= 1e-4


@pytest.mark.parametrize(("form", "settings"), FORMS)
def test_it_leaves_out_keys_and_reports_what_that_may_cost(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    engine = bounded(folder, form, 0.3, **settings)
    tokens(run(engine, PROMPTS, GREEDY))
    figures = selection(engine)
    assert 0.05 < figures.mean_dropped_mass <= figures.max_dropped_mass <= 0.3
    assert figures.max_error_bound > 0
    assert 0.3 < figures.attended_share < 0.95
    assert sum(engine.stats.lane_bytes.values()) > 0


@pytest.mark.usefixtures("lane_on_cpu")
@pytest.mark.parametrize("percent", [0, 40, 100])
def test_lanes_that_scan_together_give_the_answers_of_exact_attention(folder: Path, percent: int) -> None:
    wanted = tokens(run(make_engine(folder, **SPLIT), PROMPTS, GREEDY))
    engine = bounded(folder, DecodeForm.FIXED, 1e-4, **SPLIT, stream_percent=percent)
    assert tokens(run(engine, PROMPTS, GREEDY)) == wanted
    assert (engine.stats.lane_bytes[Lane.STREAM] > 0) is (percent > 0)
    assert selection(engine).max_dropped_mass <= 1e-4


@pytest.mark.usefixtures("lane_on_cpu")
def test_lanes_that_scan_together_leave_out_keys_and_report_it(folder: Path) -> None:
    check_scan_lane(bounded(folder, DecodeForm.FIXED, 0.3, **SPLIT, stream_percent=50))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DTypeChoice.FP16, DTypeChoice.BF16])
@pytest.mark.parametrize("percent", [50, None])
def test_a_gpu_scans_its_share_over_the_link(folder: Path, dtype: DTypeChoice, percent: int | None) -> None:
    settings = {**SPLIT, "device": DeviceKind.CUDA, "dtype": dtype, "stream_percent": percent}
    engine = bounded(folder, None, 0.3, **settings)
    assert "of scanned ones 0" not in engine.report.why("compute", "stream_share")
    check_scan_lane(engine, streams=percent is not None)  # measured rates may give the link less than a block
    assert engine.stats.num_replayed_steps > 10
    careful = bounded(folder, None, 1e-4, **settings)
    exact = make_engine(folder, None, **settings)
    found, wanted = (tokens(run(one, PROMPTS, GREEDY)) for one in (careful, exact))
    assert [answer[0] for answer in found] == [answer[0] for answer in wanted]  # later ones follow from near ties, too
    assert selection(careful).max_dropped_mass <= 1e-4


def check_scan_lane(engine: Engine, *, streams: bool = True) -> None:
    """Run prompts of which keys may be left out, and look at what is said of it; `streams`: the link has its share."""
    run(engine, PROMPTS, GREEDY)
    figures = selection(engine)
    assert 0.02 < figures.mean_dropped_mass <= figures.max_dropped_mass <= 0.3
    assert figures.max_error_bound > 0
    assert 0.3 < figures.attended_share < 0.95
    assert engine.stats.lane_bytes[Lane.STREAM] > 0 or not streams
    assert engine.stats.lane_bytes[Lane.CPU] > 0
    assert engine.stats.num_graph_failures == 0


@pytest.mark.usefixtures("lane_on_cpu")
def test_a_rule_says_which_steps_scan_and_the_others_are_exact_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(10**6))

    class EverySecond(ScanRule):
        def is_scanned(self, num_keys: int) -> bool:
            return num_keys > 0 and next(turns) % 2 == 0

    monkeypatch.setattr(lanes, "ScanRule", EverySecond)
    config = EngineConfig(
        model=str(folder), device=DeviceKind.CPU, num_threads=1, block_size=16, max_context_len=128, dram_memory=2**22,
        max_running_requests=4, policy=PolicyName.BOUNDED, max_dropped_mass=0.3, dtype=DTypeChoice.FP32,
        stream_percent=0, **SPLIT,
    )  # fmt: skip
    engine = build_engine(config, decode_form=DecodeForm.FIXED, **BESIDE[DecodeForm.FIXED])
    run(engine, PROMPTS, GREEDY)
    figures = selection(engine)
    assert next(turns) > 10
    assert 0.6 < figures.attended_share < 1.0
    assert 0 < figures.max_dropped_mass <= 0.3


@pytest.mark.parametrize(("form", "settings"), FORMS[1::2])
def test_blocks_that_another_request_had_before_are_scanned_anew(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    if form is not None:  # what is left out depends on which blocks have copies, and so on what came before
        settings = settings | {"hot_tokens": 0}
    wanted = tokens(run(bounded(folder, form, 0.1, **settings), PROMPTS[1:2], GREEDY))
    engine = bounded(folder, form, 0.1, **settings)
    for _ in range(3):
        run(engine, PROMPTS, GREEDY)
    assert tokens(run(engine, PROMPTS[1:2], GREEDY)) == wanted


def test_what_is_kept_beside_keys_and_values_is_in_the_ledger(folder: Path) -> None:
    ledger = bounded(folder, None, 0.1, **SPLIT).figures.ledger
    for tier in (Tier.GPU, Tier.DRAM):
        entries = {entry.owner: entry.num_bytes for entry in ledger.entries(tier)}
        # K and V in fp32: 8 bytes a number; an 8-bit copy of K and both by rows: 9; scales and norms.
        assert 1.1 < entries["scan"] / entries["kv"] < 1.25
    small = bounded(folder, None, 0.1, **SPLIT, kv_dtype=KVDTypeChoice.INT8).figures.ledger
    entries = {entry.owner: entry.num_bytes for entry in small.entries(Tier.DRAM)}
    assert entries["scan"] < 0.02 * entries["kv"]


def test_contexts_of_few_blocks_are_attended_exactly(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), device=DeviceKind.CPU, num_threads=1, block_size=16, max_context_len=128,
        policy=PolicyName.BOUNDED, max_dropped_mass=0.5,
    )  # fmt: skip
    engine = build_engine(config)
    run(engine, PROMPTS, GREEDY)
    assert selection(engine).attended_share == 1.0
    assert selection(engine).max_dropped_mass == 0.0


def test_the_report_says_which_form_it_has_and_why(folder: Path) -> None:
    report = bounded(folder, None, 0.1).report
    assert report.value("compute", "policy") == "bounded, max_dropped_mass 0.1, bounded_scores auto"
    assert report.why("compute", "policy") == "keys in host memory are scanned in 8 bits by the native op"
    report = bounded(folder, None, 0.1, block_size=8).report
    assert "reference form, in plain torch: native CPU attention needs" in report.why("compute", "policy")


def test_the_native_form_is_refused_where_it_cannot_be_had(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`bounded_scores` scan cannot be had: native CPU attention needs"):
        bounded(folder, None, 0.1, bounded_scores=BoundedScores.SCAN, block_size=8)


VERIFIED: Final = [
    *FORMS,
    pytest.param(None, {**SPLIT, "dtype": DTypeChoice.BF16}, id="program, bf16"),
    pytest.param(None, {**SPLIT, "dtype": DTypeChoice.FP16}, id="program, fp16"),
    pytest.param(
        None,
        {**SPLIT, "device": DeviceKind.CUDA, "dtype": DTypeChoice.BF16, "stream_percent": 50},
        id="cuda, scan lane",
        marks=pytest.mark.gpu,
    ),
]


def answers(engine: Engine) -> int:
    """Run prompts; how many answers of a layer and head the steps gave."""
    run(engine, PROMPTS * 2, GREEDY)
    return selection(engine).num_choices


@pytest.mark.parametrize("mass", [0.3, 0.01, 0.0])
@pytest.mark.parametrize(("form", "settings"), VERIFIED)
def test_verify_computes_a_sample_of_the_native_answers_again_and_finds_the_bounds_kept(
    folder: Path, form: DecodeForm | None, settings: dict[str, Any], mass: float
) -> None:
    engine = bounded(folder, form, mass, verify=True, **settings)
    assert "by the native op" in engine.report.why("compute", "policy")
    num_answers = answers(engine)
    figures = selection(engine)
    assert num_answers // 61 <= figures.num_verified <= num_answers // 61 + 1
    assert figures.num_verified > 10
    if mass == 0.3:
        assert 1e-3 < figures.max_error <= figures.max_error_bound
    if form is not DecodeForm.FIXED:
        assert engine.stats.num_replayed_steps > 10, "steps run as they do otherwise"


@pytest.mark.usefixtures("lane_on_cpu")
@pytest.mark.parametrize("percent", [40, 100])
def test_verify_looks_at_what_both_lanes_answered(folder: Path, percent: int) -> None:
    engine = bounded(folder, DecodeForm.FIXED, 0.3, **SPLIT, stream_percent=percent, verify=True)
    assert answers(engine) > 61
    assert selection(engine).num_verified > 10
    assert selection(engine).max_error > 1e-3


def test_verified_steps_give_the_tokens_of_others(folder: Path) -> None:
    wanted, found = (
        tokens(run(bounded(folder, None, 0.2, verify=verify, **SPLIT), PROMPTS, GREEDY)) for verify in (False, True)
    )
    assert found == wanted


BROKEN: Final = r"step \d+, layer \d+, token \d+ of request \S+, head \d+: .* exact one by \S+, .* bound is \S+ "
NOT_INT8: Final = [param for param in VERIFIED if "int8" not in str(param.id)]


@pytest.mark.parametrize(("form", "settings"), NOT_INT8)
def test_verify_finds_a_copy_that_is_not_what_the_cache_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    make = ScanCopy.make

    def broken(copy: ScanCopy, block_ids: Tensor) -> None:
        make(copy, block_ids)
        rows = copy.layer(1).rows
        assert rows is not None
        rows[:, block_ids] = -3 * rows[:, block_ids]

    monkeypatch.setattr(ScanCopy, "make", broken)
    with pytest.raises(BoundError, match=BROKEN):
        answers(bounded(folder, form, 0.1, verify=True, **settings))


@pytest.mark.parametrize(("form", "settings"), NOT_INT8)
def test_verify_finds_a_copy_that_was_not_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(BoundedScan, "note", lambda *_: None)
    engine = bounded(folder, form, 1e-3, verify=True, **settings)
    with pytest.raises(BoundError, match=BROKEN):
        run(engine, PROMPTS * 6, GREEDY)


@pytest.mark.parametrize(("form", "settings"), VERIFIED)
def test_verify_finds_figures_that_promise_too_much(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: DecodeForm | None, settings: dict[str, Any]
) -> None:
    for module in (programs, step_lanes):
        monkeypatch.setattr(module, "find_bounds", lambda *args: 0.01 * find_bounds(*args))
    with pytest.raises(BoundError, match=BROKEN):
        answers(bounded(folder, form, 0.3, verify=True, **settings))
