"""Variants as they are written, cells and their keys, and the folder that keeps them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex.compare.cells import Cell, CellKind, Grid, Variant
from ambidex.compare.folder import ReportFolder, split_done
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError

CELL = Cell(
    kind=CellKind.SPEED, engine="ambidex", model="m", variant="exact", context=64, batch=2, kv_gpu_tokens=None,
    settings={"steps": 4},
)  # fmt: skip
LINE: dict[str, Any] = {"cell": CELL.record(), "status": "done", "figures": {"x": 1}}


def test_variant_is_read_with_its_settings() -> None:
    variant = Variant.parse("h2o:policy_percent=30:h2o_form=drop")
    config = variant.config(EngineConfig(model="a", block_size=32), model="b", kv_gpu_tokens=64)
    assert (config.model, config.policy, config.policy_percent, config.h2o_form) == ("b", "h2o", 30, "drop")
    assert (config.block_size, config.kv_gpu_tokens) == (32, 64)
    assert Variant.parse("bounded:max_dropped_mass=0.05:verify=true".replace(":verify=true", "")).settings == {
        "max_dropped_mass": 0.05
    }
    assert Variant.parse("exact:mlp_sparsity=teal:0.5:block_size=32").settings == {
        "mlp_sparsity": "teal:0.5", "block_size": 32
    }  # fmt: skip


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("h20", "policy 'h20' of 'h20' is unknown: known are exact"),
        ("h2o:policy_percent", "'policy_percent' of variant .* is no setting"),
        ("h2o:polic=3", "'polic=3' of variant .* is no setting"),
        ("h2o:model=x", "'model=x' of variant .* is no setting"),
        ("h2o:policy_percent=many", "'policy_percent=many' has no value of the kind int"),
        ("h2o:policy_percent=300", "`policy_percent` is 300: it must be at most 100"),
        ("h2o:sink_tokens=4", "`sink_tokens` is an option of streaming_llm"),
        ("quest:policy_tokens=4", "quest attends at least 3 pages"),
    ],
)
def test_wrong_variant_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Variant.parse(word)


def make_grid(**changes: Any) -> Grid:
    values: dict[str, Any] = {
        "models": ["m"], "variants": [Variant.parse("exact"), Variant.parse("h2o")], "contexts": [32, 64],
        "batches": [1, 2], "budgets": [None, 16], "steps": 4, "num_predicted": 8, "num_rounds": 2, "text_name": "t",
        "text_sha256": "0", "timelines": ["exact"],
    }  # fmt: skip
    return Grid(**{**values, **changes})


def test_grid_has_every_point_once_and_quality_once_a_context() -> None:
    groups = make_grid().cells(EngineConfig(model="m"))
    cells = [cell for group in groups for cell in group]
    assert len({cell.key for cell in cells}) == len(cells)
    kinds = [cell.kind for cell in cells]
    assert (kinds.count(CellKind.SPEED), kinds.count(CellKind.QUALITY)) == (2 * 2 * 2 * 2, 2 * 2)
    assert kinds.count(CellKind.TIMELINE) == 2
    assert all(len({(cell.kind, cell.variant, cell.kv_gpu_tokens) for cell in group}) == 1 for group in groups)


def test_methods_that_attend_all_keys_have_the_quality_of_exact() -> None:
    def with_quality(*words: str) -> list[str]:
        grid = make_grid(variants=[Variant.parse(word) for word in words], kinds=(CellKind.QUALITY,))
        return list(dict.fromkeys(cell.variant for group in grid.cells(EngineConfig(model="m")) for cell in group))

    assert with_quality("exact", "flexgen", "moe_lightning", "h2o") == ["exact", "h2o"]
    assert with_quality("exact:stream_percent=0", "flexgen") == ["exact:stream_percent=0", "flexgen"]


def test_quality_of_bounded_is_that_of_the_form_and_the_keys_that_its_speed_is_measured_with() -> None:
    def quality_of(word: str, budgets: list[int | None]) -> Cell:
        grid = make_grid(variants=[Variant.parse(word)], budgets=budgets, contexts=[64], kinds=(CellKind.QUALITY,))
        ((cell,),) = grid.cells(EngineConfig(model="m"))
        return cell

    native = quality_of("bounded", [None, 32, 16])
    assert (native.kv_gpu_tokens, native.settings["form"]) == (16, "as answered")
    assert quality_of("bounded:bounded_scores=scan", [None]).kv_gpu_tokens is None
    for word in ("bounded:bounded_scores=exact", "h2o"):
        other = quality_of(word, [None, 32, 16])
        assert other.kv_gpu_tokens is None
        assert "form" not in other.settings


def test_grid_of_one_kind_has_nothing_else() -> None:
    cells = [cell for group in make_grid(kinds=(CellKind.SPEED,)).cells(EngineConfig(model="none")) for cell in group]
    assert {cell.kind for cell in cells} == {CellKind.SPEED}


def test_key_changes_with_what_figures_depend_on() -> None:
    groups = make_grid().cells(EngineConfig(model="m"))
    same = make_grid(budgets=[16, None]).cells(EngineConfig(model="m"))
    assert {cell.key for group in groups for cell in group} == {cell.key for group in same for cell in group}
    other = make_grid(num_predicted=9).cells(EngineConfig(model="m", block_size=32))
    assert not {cell.key for group in groups for cell in group} & {cell.key for group in other for cell in group}


def test_cell_comes_back_from_its_record() -> None:
    assert Cell.of(json.loads(json.dumps(CELL.record()))) == CELL
    with pytest.raises(ValueError, match="other"):
        Cell.of({**CELL.record(), "kind": "other"})


def test_folder_keeps_lines_and_the_last_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report"
    with ReportFolder(path) as folder:
        folder.append({**LINE, "status": "failed", "reason": "r"})
        folder.append(LINE)
        folder.write_report("<p>", "# p")
    with ReportFolder(path) as folder:
        assert folder.lines() == [LINE]
    assert (path / "report.html").read_text() == "<p>"


def test_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    with ReportFolder(tmp_path / "r") as folder:
        folder.append(LINE)
        with (tmp_path / "r" / "cells.jsonl").open("a") as file:
            file.write('{"cell": {"kin')
        assert folder.lines() == [LINE]
        other = {**LINE, "cell": replace(CELL, context=99).record()}
        folder.append(other)
        assert folder.lines() == [LINE, other]


@pytest.mark.parametrize("text", ["{}\n", "[]\n", '{"cell": {}, "status": "done"}\n', "nonsense\n"])
def test_line_that_is_no_cell_is_refused_by_its_number(tmp_path: Path, text: str) -> None:
    with ReportFolder(tmp_path / "r") as folder:
        folder.append(LINE)
        with (tmp_path / "r" / "cells.jsonl").open("a") as file:
            file.write(text)
        with pytest.raises(ConfigError, match=r"cells\.jsonl, line 2 is no cell of a comparison"):
            folder.lines()


def test_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is no folder of a comparison \(it holds thesis.txt\)"):
        ReportFolder(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="cannot be used"):
        ReportFolder(tmp_path / "thesis.txt")


def test_folder_in_use_or_of_another_version_is_refused(tmp_path: Path) -> None:
    with ReportFolder(tmp_path / "r"), pytest.raises(ConfigError, match="is in use by another comparison"):
        ReportFolder(tmp_path / "r")
    (tmp_path / "r" / "compare.json").write_text('{"format": "ambidex compare", "version": 99}\n')
    with pytest.raises(ConfigError, match="not of this version"):
        ReportFolder(tmp_path / "r")


def test_measured_cells_are_left_out_and_failed_ones_if_not_wanted_again() -> None:
    groups = make_grid().cells(EngineConfig(model="m"))
    done, failed, *_ = groups[0]
    lines = [
        {"cell": done.record(), "status": "done"},
        {"cell": failed.record(), "status": "failed", "reason": "r"},
    ]
    left = split_done(groups, lines, retry=False)
    assert sum(map(len, left)) == sum(map(len, groups)) - 2
    assert split_done(groups, lines, retry=True)[0][0] == failed
