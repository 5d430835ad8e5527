"""`bench/predictions.py` and `bench/solver_grid.py`: what is planned is what runs, and runs end with a record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planned
import predictions
import solver_grid
from ambidex.core.config import DeviceKind
from ambidex.core.dtypes import DType
from ambidex.core.units import MIB
from ambidex.cost.workload import KVShares
from ambidex.hw.presets import make_profile
from ambidex.solver.problem import fits
from planned import Configuration, Settings

SETTINGS = Settings(
    device=DeviceKind.CPU, dtype=DType.FP32, profile=make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16"), steps=2
)
TINY = Configuration(shape="tiny", layers=3, batch=2, context=300, gpu_memory=64 * MIB)
FAR = KVShares(on_gpu=0.4, on_cpu=0.6)


def test_configurations_are_forty_and_no_two_are_alike() -> None:
    assert len(set(predictions.CONFIGURATIONS)) == len(predictions.CONFIGURATIONS) == 40
    for configuration in predictions.CONFIGURATIONS:
        assert configuration.batch in (1, 2, 4, 8, 16, 24, 32, 64)  # sizes of captured steps: none is padded


@pytest.mark.parametrize(
    "configuration", predictions.CONFIGURATIONS[::3], ids=[c.name for c in predictions.CONFIGURATIONS[::3]]
)
def test_configurations_can_be_planned_on_a_large_machine(tmp_path: Path, configuration: Configuration) -> None:
    settings = Settings(
        device=DeviceKind.CUDA, dtype=DType.BF16, profile=make_profile("h200", "ddr5-8ch", "pcie5x16"), steps=10
    )
    spec = planned.make_model(tmp_path, configuration.shape, configuration.layers)
    found = planned.plan(configuration, spec, settings)
    assert found.memory.gpu_bytes <= configuration.gpu_memory
    assert found.memory.dram_bytes < 20e9


def test_a_configuration_is_planned_run_and_compared() -> None:
    found = planned.measure(replace(TINY, kv=FAR, context=900), SETTINGS)
    assert found["step_s"]["num"] == 2
    assert found["error"] == pytest.approx(found["predicted_s"] / found["step_s"]["median"] - 1, rel=0.02)
    assert found["kv_lane_bytes"]["cpu"] > 0
    read = found["kv_lane_bytes"]
    assert read["gpu"] / (read["gpu"] + read["cpu"]) == pytest.approx(found["kv_shares"][0], abs=0.05)
    assert found["memory"]["error"] == pytest.approx(0.0, abs=0.03)
    assert 900 < found["mean_context"] < 920


def test_a_process_of_its_own_gives_figures_or_says_what_went_wrong() -> None:
    found = planned.run(TINY, SETTINGS, limit_s=120)
    assert found["step_s"]["num"] == 2, found
    assert (found["shape"], found["batch"]) == ("tiny", 2)
    too_small = replace(TINY, gpu_memory=MIB)
    assert "too small" in planned.run(too_small, SETTINGS, limit_s=120)["error"]
    assert "no answer within" in planned.run(TINY, SETTINGS, limit_s=0.0)["error"]


def test_errors_are_summed_up_over_what_ran() -> None:
    points: list[dict[str, Any]] = [{"error": value, "memory": {"error": 0.01}} for value in (-0.1, 0.02, 0.04, -0.3)]
    points.append({"error": "no answer"})
    assert predictions.summarise(points) == {
        "num": 4, "num_failed": 1, "step": {"median": 0.07, "p90": 0.3, "largest": 0.3},
        "memory": {"median": 0.01, "p90": 0.01, "largest": 0.01},
    }  # fmt: skip
    assert predictions.summarise(points[4:]) == {"num": 0, "num_failed": 1}


def test_a_quick_run_ends_with_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    monkeypatch.setattr(predictions, "run", _measured)
    monkeypatch.setattr("sys.argv", ["predictions.py", "--quick", "--steps", "1", "--output", str(output)])
    assert predictions.main() == 0
    record = json.loads(output.read_text())
    assert record["summary"]["num"] == len(record["points"]) == 3
    assert record["summary"]["memory"]["largest"] <= 0.03
    assert record["points"][2]["kind"] == "Q4_0"
    assert "3 configurations, 0 failed" in capsys.readouterr().out


def test_without_a_profile_of_this_machine_the_way_to_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for script in (predictions, solver_grid):
        monkeypatch.setattr("sys.argv", ["script.py"])
        assert script.main() == 2
        assert "ambidex calibrate" in capsys.readouterr().err


def test_a_grid_fills_the_budget_and_has_the_named_points() -> None:
    settings = Settings(
        device=DeviceKind.CUDA, dtype=DType.BF16, profile=make_profile("h200", "ddr5-8ch", "pcie5x16"), steps=1
    )
    args = _parse(solver_grid, [])
    configuration = solver_grid.make_configuration(args, settings)
    points = list(solver_grid.grid_points(configuration, settings))
    assert len(points) == 20
    problem, _ = solver_grid.problem_of(configuration, settings)
    whole = replace(configuration, layers=48, gpu_memory=12 * 10**9)
    free, of_whole = (c.gpu_memory - solver_grid.kept_bytes(c, settings) for c in (configuration, whole))
    assert free == pytest.approx(of_whole * 8 / 48, rel=1e-3)
    for (share, streamed), point in points:
        assert point.placement is not None
        assert point.kv is not None
        assert fits(problem, point.placement, point.kv)
        split = point.placement.layers[0].mlp
        assert split.streamed == pytest.approx((1 - split.on_gpu) * streamed)
        if share == 1.0:
            assert point.kv.on_gpu == pytest.approx(problem.units.least_kv_on_gpu, rel=0.01)
        if share == 0.0:
            assert split.on_gpu == pytest.approx(0.0, abs=0.01)
    assert len({repr(point.placement) for _, point in points}) == 20


def test_a_quick_grid_compares_the_solvers_choice_with_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    seconds = iter([0.021, *(0.020 + 0.001 * idx for idx in range(20)), 0.022])

    def run(configuration: Configuration, _settings: Settings, limit_s: float) -> dict[str, Any]:
        assert limit_s > 0
        took = next(seconds)
        return {**configuration.record(), "step_s": {"median": took, "q20": took, "q80": took}, "predicted_s": took,
                "binds": "CPU", "kv_shares": [], "memory": {"measured": 1}, "all_s": 1}  # fmt: skip

    monkeypatch.setattr(solver_grid, "run", run)
    monkeypatch.setattr("sys.argv", ["solver_grid.py", "--quick", "--output", str(output)])
    assert solver_grid.main() == 0
    summary = json.loads(output.read_text())["summary"]
    assert (summary["solver_s"], summary["best_s"], summary["times_best"]) == (0.021, 0.020, 1.05)
    assert summary["best"] == "keys first, 0 % over the link"
    assert "times 1.05" in capsys.readouterr().out


def _measured(configuration: Configuration, settings: Settings, *, limit_s: float) -> dict[str, Any]:
    assert limit_s > 0
    return {**configuration.record(), **planned.measure(configuration, settings)}


def _parse(script: Any, args: list[str]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["script.py", *args])
        return script.parse_args()
