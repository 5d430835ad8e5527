"""Engines whose weights or keys are spread say what lies where and predict their steps; others say nothing.

The machine's rates are a preset's: only what follows from them is looked at, no time is measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DTypeChoice
from ambidex.core.ids import Tier
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.forecast import NearKeys, PlacedForecast, share_with_link
from ambidex.engine.run_plan import RunPlan
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import HardwareProfile
from ambidex.models.site_plans import RingSizes
from tiny_engine import make_engine_folder

PROFILE = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
SPREAD: dict[str, Any] = {"weights_gpu_memory": "100KB", "kv_gpu_tokens": 64, "recent_window": 16}


def make_engine(folder: Path, *, profile: HardwareProfile | None = PROFILE, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), dtype=DTypeChoice.FP32, num_threads=1, block_size=16, **settings)
    return build_engine(config, weight_ring=RingSizes(chunk_bytes=9000, num_slots=2), profile=profile)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_engine_folder(tmp_path, "llama")


def plan_of(engine: Engine) -> RunPlan:
    assert engine.report.plan is not None
    return engine.report.plan


def answer(engine: Engine) -> None:
    engine.add([3, 4, 5], SamplingParams(max_output_tokens=5, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_rows_add_up_to_what_was_allocated(folder: Path) -> None:
    engine = make_engine(folder, **SPREAD)
    plan = plan_of(engine)
    ledger = engine.figures.ledger
    for tier in (Tier.GPU, Tier.DRAM):
        rows = [row for row in plan.rows if row.tier is tier]
        held = {entry.owner: entry.num_bytes for entry in ledger.entries(tier)}
        assert sum(row.weights_bytes for row in rows) == held["weights"]
        assert sum(row.kv_bytes for row in rows) == held["kv"]
    assert plan.steps[0].batch == 1
    assert all(step.step_s > 0 for step in plan.steps)


def test_steps_are_compared_with_what_was_predicted_for_their_mean(folder: Path) -> None:
    engine = make_engine(folder, **SPREAD)
    assert engine.decode_outcome() is None
    answer(engine)
    outcome = engine.decode_outcome()
    assert outcome is not None
    assert (outcome.num_steps, outcome.batch, outcome.context) == (4, 1.0, 4)
    assert outcome.measured_s == engine.stats.decode_seconds / 4
    assert outcome.predicted_s is not None
    assert outcome.predicted_s > 0


@pytest.mark.parametrize("settings", [{"kv_gpu_tokens": 64}, {"recent_window": 16}, {"weights_gpu_memory": "100KB"}])
def test_weights_or_keys_that_may_leave_the_accelerator_make_a_plan(folder: Path, settings: dict[str, Any]) -> None:
    assert make_engine(folder).report.plan is None
    assert plan_of(make_engine(folder, **settings)).steps


def test_an_engine_with_all_on_the_accelerator_predicts_nothing(folder: Path) -> None:
    engine = make_engine(folder)
    answer(engine)
    outcome = engine.decode_outcome()
    assert outcome is not None
    assert outcome.predicted_s is None


def test_without_a_profile_the_plan_says_how_to_make_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    plan = plan_of(make_engine(folder, profile=None, **SPREAD))
    assert plan.steps == ()
    assert "run `ambidex calibrate` once" in plan.why_not
    assert {row.busy_s for row in plan.rows} == {None}


def test_a_policy_that_leaves_out_keys_is_not_predicted(folder: Path) -> None:
    plan = plan_of(make_engine(folder, policy="streaming_llm", **SPREAD))
    assert plan.steps == ()
    assert "chooses keys step by step" in plan.why_not


def test_a_profile_that_lacks_a_format_is_no_reason_to_fail(folder: Path) -> None:
    cpu = replace(PROFILE.cpu, attention_bytes_per_s={"int8": 1e9})
    plan = plan_of(make_engine(folder, profile=replace(PROFILE, cpu=cpu), **SPREAD))
    assert plan.steps == ()
    assert "fp32" in plan.why_not


def test_keys_near_and_away() -> None:
    keys = NearKeys(of_all=1000, of_one=None, stream_share=0.25)
    assert keys.shares(1, 800) == KVShares()
    assert keys.shares(2, 1000) == KVShares(on_gpu=0.5, on_cpu=0.375, streamed=0.125)
    windowed = NearKeys(of_all=1000, of_one=100, stream_share=0.0)
    assert windowed.shares(2, 400) == KVShares(on_gpu=0.25, on_cpu=0.75, streamed=0.0)


def test_what_the_cpu_does_not_multiply_in_a_step_travels() -> None:
    split = WeightSplit(on_gpu=0.25, on_cpu=0.5, streamed=0.25)
    placed = Placement(layers=(LayerPlacement(attention=split),), head=split)
    shared = share_with_link(placed, 0.5)
    assert shared.layers[0].attention == WeightSplit(on_gpu=0.25, on_cpu=0.25, streamed=0.5)
    assert shared.layers[0].mlp == WeightSplit()
    assert share_with_link(placed, 1.0) == placed


def test_more_keys_and_requests_take_longer(folder: Path) -> None:
    engine = make_engine(folder, **SPREAD)
    predict = engine._predict_step
    assert predict is not None
    forecast = getattr(predict, "__self__", None)
    assert isinstance(forecast, PlacedForecast)
    times = [predict(*traffic) for traffic in ((1, 64), (1, 128), (4, 128))]
    assert times == sorted(times)
    assert len(set(times)) == 3
