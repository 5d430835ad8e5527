"""Whole comparisons of a tiny model: cells, failures, going on after a stop, and the report."""

import json
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.compare.cells import Cell, CellKind
from ambidex.compare.process import start_worker
from ambidex.compare.run import measure_group
from ambidex.compare.worker import Part, find_spans, run_part
from ambidex.core.config import EngineConfig
from ambidex.core.policy import PolicyName
from tiny_engine import make_engine_folder

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 127}
WORDS = "the keeper of the lighthouse wrote every evening what the sea had brought, and what it had taken away. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("compare"))


def make_cell(kind: CellKind, folder: Path, **changes: Any) -> Cell:
    settings = {"steps": 3, "predict": 8, "rounds": 1}
    values: dict[str, Any] = {
        "kind": kind, "engine": "ambidex", "model": str(folder), "variant": "h2o", "context": 60, "batch": 2,
        "kv_gpu_tokens": 32, "settings": settings,
    }  # fmt: skip
    return Cell(**{**values, **changes})


def measure(folder: Path, cells: list[Cell], **settings: Any) -> list[dict[str, Any]]:
    config = {"model": str(folder), **SETTINGS, **settings}
    part = Part(config=config, cells=[cell.record() for cell in cells], text=WORDS)
    lines = [line for _, line in run_part(part) if "index" in line]
    assert [line["index"] for line in lines] == list(range(len(cells)))
    return lines


def test_speed_cells_have_time_bytes_and_memory(folder: Path) -> None:
    cells = [make_cell(CellKind.SPEED, folder, context=context) for context in (60, 40, 500)]
    first, second, third = measure(folder, cells, kv_gpu_tokens=32, block_size=16, policy="h2o")
    figures = first["figures"]
    assert figures["step_s"]["num"] == 3
    assert figures["tokens_per_s"] == pytest.approx(2 / figures["step_s"]["median"], rel=1e-3)
    assert figures["share_of_floor"] > 0
    assert figures["prefill_tokens_per_s"] == pytest.approx(120 / figures["fill_s"], rel=0.01)
    assert figures["lane_bytes"]["gpu"] + figures["lane_bytes"]["cpu"] > 0
    assert figures["kv_bytes"]["dram"] > 0
    assert figures["memory"]["host_predicted_bytes"] > 0
    assert figures["tokens"] == "text"
    assert second["figures"]["context"] == 40
    assert "--contexts 500 at batch 2 needs" in third["failed"]


def test_rates_are_measured_once_and_handed_to_the_next_engine(folder: Path) -> None:
    cell = make_cell(CellKind.SPEED, folder, batch=1)
    config = {"model": str(folder), **SETTINGS, "kv_gpu_tokens": 32, "block_size": 16}
    (found,) = [line["rates"] for _, line in run_part(Part(config=config, cells=[cell.record()], text=WORDS))
                if "rates" in line]  # fmt: skip
    assert found["dram"] > 0
    known = {**found, "dram": 2 * found["dram"]}
    lines = [line for _, line in run_part(Part(config=config, cells=[cell.record()], text=WORDS, rates=known))]
    assert not any("rates" in line for line in lines)
    assert lines[-1]["figures"]["rates"] == known


@pytest.mark.parametrize("policy", ["flexgen", "moe_lightning"])
def test_quality_of_methods_that_attend_all_keys_is_that_of_exact(folder: Path, policy: str) -> None:
    (line,) = measure(folder, [make_cell(CellKind.QUALITY, folder, context=100, batch=None)], policy=policy)
    assert line["figures"]["agreement"]["mean_kl"] < 1e-6


def test_quality_cells_compare_with_full_attention(folder: Path) -> None:
    cells = [make_cell(CellKind.QUALITY, folder, context=context, batch=None) for context in (60, 100, 126)]
    for policy in ("exact", "streaming_llm"):
        options = {"policy": policy, "policy_tokens": 8} if policy != "exact" else {}
        lines = measure(folder, cells, **options)
        agreement = lines[0]["figures"]["agreement"]
        assert agreement["num_tokens"] == 8
        assert (agreement["mean_kl"] < 1e-6) == (policy == "exact")
        assert lines[0]["figures"]["secrets"] is None
        assert "--contexts is too short" in lines[0]["figures"]["no_secrets"]


def test_quality_of_bounded_is_that_of_its_native_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.engine.compose.parts.MIN_SCANNED_BLOCKS", 1)
    cell = make_cell(CellKind.QUALITY, folder, context=100, batch=None)
    options = {"block_size": 16, "policy": "bounded", "max_dropped_mass": 0.2}
    (native,) = measure(folder, [cell], **options)
    (reference,) = measure(folder, [cell], **options, bounded_scores="exact")
    assert (native["figures"]["form"], reference["figures"]["form"]) == ("native", "op by op")
    for line in (native, reference):
        agreement = line["figures"]["agreement"]
        assert agreement["num_tokens"] == 8
        assert 0 < agreement["selection"]["max_dropped_mass"] <= 0.2
        assert agreement["mean_kl"] > 0
    assert native["figures"]["agreement"]["mean_kl"] != reference["figures"]["agreement"]["mean_kl"]


def test_quality_of_random_weights_is_measured_on_random_tokens(folder: Path) -> None:
    cell = make_cell(CellKind.QUALITY, folder, context=100, batch=None)
    config = {"model": str(folder), **SETTINGS, "load_format": "dummy", "policy": "streaming_llm", "policy_tokens": 8}
    part = Part(config=config, cells=[cell.record()], text="a")
    (line,) = [line for _, line in run_part(part) if "begun" not in line]
    assert line["figures"]["agreement"]["mean_kl"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", PolicyName)
def test_cells_of_each_policy_are_measured_on_a_gpu(folder: Path, policy: PolicyName) -> None:
    """As `bench/compare_h200.sh` has them: dummy weights, sink and recent window on the GPU, the rest in DRAM."""
    config = {
        "model": str(folder), "policy": policy, "device": "cuda", "dtype": "bf16", "load_format": "dummy",
        "max_context_len": 120, "max_running_requests": 1, "max_tokens_per_step": 32, "block_size": 16,
        "num_threads": 2, "num_sink_tokens": 16, "recent_window": 16,
    }  # fmt: skip
    split = {"kv_gpu_tokens": 64}
    for kind, own in ((CellKind.SPEED, split), (CellKind.QUALITY, split if policy is PolicyName.BOUNDED else {})):
        batch = 1 if kind is CellKind.SPEED else None
        cells = [make_cell(kind, folder, context=context, batch=batch).record() for context in (70, 90)]
        part = Part(config=config | own, cells=cells, text="a")
        lines = [line for _, line in run_part(part) if "index" in line]
        assert [line.get("failed") for line in lines] == [None, None]
        if kind is CellKind.QUALITY:
            agreements = [line["figures"]["agreement"] for line in lines]
            assert all(agreement["num_tokens"] == 8 and agreement["perplexity"] > 1 for agreement in agreements)
        elif policy not in (PolicyName.H2O, PolicyName.QINFER_WINDOWS):  # they keep a fifth, which the GPU holds
            lanes = [line["figures"]["lane_bytes"] for line in lines]
            assert all(sum(size for lane, size in own_lanes.items() if lane != "gpu") > 0 for own_lanes in lanes)


def test_timeline_cells_have_spans_of_each_lane(folder: Path) -> None:
    cell = make_cell(CellKind.TIMELINE, folder)
    (line,) = measure(folder, [cell], kv_gpu_tokens=32, block_size=16)
    spans = line["figures"]["spans"]
    assert {"steps", "accelerator lane", "CPU lane"} <= {span[0] for span in spans}
    assert sum(span[1].startswith("step ") for span in spans) == 2
    assert all(0 <= start <= end for _, _, start, end in spans)


def test_spans_are_of_the_last_full_steps() -> None:
    events: list[dict[str, Any]] = [{"name": "thread_name", "ph": "M", "tid": 1, "args": {"name": "steps"}}]
    events += [{"name": f"step {i}", "ph": "X", "tid": 1, "ts": 1000.0 * i, "dur": 900.0} for i in range(5)]
    events.append({"name": "attend", "ph": "X", "tid": 1, "ts": 2100.0, "dur": 50.0})
    assert find_spans(events) == [
        ["steps", "step 2", 0.0, 0.9], ["steps", "step 3", 1.0, 1.9], ["steps", "attend", 0.1, 0.15],
    ]  # fmt: skip


def test_model_that_a_policy_cannot_serve_fails_its_cells_with_the_reason(tmp_path: Path) -> None:
    windows = make_engine_folder(tmp_path, "mistral")
    cells = [make_cell(CellKind.SPEED, windows, context=context, batch=1) for context in (40, 60)]
    config = EngineConfig(model=str(windows), policy=PolicyName.H2O, **SETTINGS)
    outcomes = list(measure_group(config, cells, text=WORDS, cell_timeout_s=500.0))
    assert [cell for cell, _ in outcomes] == cells
    assert [outcome["status"] for _, outcome in outcomes] == ["failed", "failed"]
    assert all("`policy` h2o cannot serve this mistral model" in outcome["reason"] for _, outcome in outcomes)


def test_cell_that_takes_too_long_fails_and_its_worker_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[BaseProcess] = []

    def start_silent(part: Path, results: Path, output: Path) -> BaseProcess:
        started.append(start_worker(part, results.with_name("read by nobody"), output))
        return started[-1]

    monkeypatch.setattr("ambidex.compare.run.start_worker", start_silent)  # else a fast machine may be done in time
    cell = make_cell(CellKind.SPEED, folder)
    config = EngineConfig(model=str(folder), **SETTINGS)
    ((got, outcome),) = measure_group(config, [cell], text=WORDS, cell_timeout_s=0.005)
    assert (got, outcome["status"]) == (cell, "failed")
    assert outcome["reason"].startswith("it took longer than 0.005 s (--cell-timeout)")
    assert [process.is_alive() for process in started] == [False]


def run(folder: Path | None, *words: str) -> Result:
    settings = ["--num-threads", "1", "--dtype", "fp32", "--max-context-len", "127", "--block-size", "16"]
    model = [] if folder is None else [str(folder)]
    return CliRunner().invoke(AmbidexCommand(), ["bench", "compare", *model, *words, *settings])


def test_command_measures_goes_on_and_reports(folder: Path, tmp_path: Path) -> None:
    report, text = tmp_path / "report", tmp_path / "words.txt"
    text.write_text(WORDS)
    words = ["--report", str(report), "--contexts", "60,300", "--batch", "1", "--steps", "2", "--predict", "8",
             "--rounds", "1", "--text", str(text), "--budgets", "32"]  # fmt: skip
    first = run(folder, *words, "--policies", "streaming_llm:policy_tokens=8")
    assert first.exit_code == 3, first.output
    assert "3 cells failed" in first.output
    lines = [json.loads(line) for line in (report / "cells.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["done", "failed", "failed", "done", "failed"]
    assert all({"commit", "date", "machine", "versions"} <= line.keys() for line in lines)
    assert "the limit is 127" in lines[1]["reason"]
    again = run(folder, *words, "--policies", "streaming_llm:policy_tokens=8")
    assert again.exit_code == 3
    assert "5 of 5 cells are in" in again.output
    assert len((report / "cells.jsonl").read_text().splitlines()) == 5
    html, markdown = (report / "report.html").read_text(), (report / "report.md").read_text()
    assert html.count("<svg") == 1
    assert "streaming_llm:policy_tokens=8" in html
    assert "| streaming_llm:policy_tokens=8 | op by op | 60 | 1 | 32 tokens |" in markdown
    assert "the limit is 127" in html
    assert "the limit is 127" in markdown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no folder is named for the report"),
        (["--report", "{tmp}"], "is no folder of a comparison"),
        (["--report", "{tmp}/r", "--policies", "h20"], "policy 'h20' of 'h20' is unknown"),
        (["--report", "{tmp}/r", "--policies", "h2o:sink_tokens=3"], "--sink-tokens is an option of streaming_llm"),
        (["--report", "{tmp}/r", "--only", "speed,beauty"], "--only 'speed,beauty' has 'beauty': known are speed,"),
        (["--report", "{tmp}/r", "--budgets", "some"], "'some' is no list of numbers of tokens"),
        (["--report", "{tmp}/r", "--predict", "60", "--contexts", "60"], "--predict is 60: it must be below"),
        (["--report", "{tmp}/r", "--models", "a,b"], "MODEL and --models are both given"),
        (["--report", "{tmp}/r", "--text", "nowhere"], "--text nowhere cannot be read"),
    ],
)
def test_bad_words_are_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = run(folder, *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
