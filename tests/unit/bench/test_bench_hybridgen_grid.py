"""`bench/hybridgen_grid.py`: fixed settings are searched, feedback runs beside them, threads go; a record is there."""

import json
from pathlib import Path

import pytest

import hybridgen_grid
from ambidex.hw.topology import read_topology

TINY = [
    "--shape",
    "tiny",
    "--device",
    "cpu",
    "--dtype",
    "fp32",
    "--near",
    "32",
    "--recent",
    "64",
    "--exact-layers",
    "1",
]


@pytest.mark.skipif(read_topology().max_threads < 2, reason="needs two processors")
def test_a_tiny_run_ends_with_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "records.jsonl"
    small = ["--points", "1x200,2x130", "--keys", "8,24", "--threads", "2,1", "--steps", "2", "--follow", "10"]
    monkeypatch.setattr(
        "sys.argv", ["hybridgen_grid.py", *TINY, "--exact-layers", "1", *small, "--output", str(output)]
    )
    assert hybridgen_grid.main() == 0
    record = json.loads(output.read_text())
    assert [(point["batch"], point["context"]) for point in record["points"]] == [(1, 200), (2, 130)]
    for point in record["points"]:
        assert [run["threads"] for run in point["threads"]] == [2, 1]
        for run in point["threads"]:
            assert [(one["mode"], one["num_selected"]) for one in run["fixed"]] == [
                ("post", 8), ("post", 24), ("pre", 8), ("pre", 24),
            ]  # fmt: skip
            assert run["best"]["step_s"] == min(one["step_s"] for one in run["fixed"])
            assert run["feedback"]["num_selected"] >= 8, "the smallest number is the floor"
            assert len(run["feedback"]["steps_s"]) == len(run["feedback"]["trace"]) == 10
        assert point["loss"]["best_s"] == point["threads"][1]["best"]["step_s"]
        assert len(point["loss"]["steps_s"]) == 10


def test_numbers_that_make_no_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--keys", "8,x"], ["--keys", "1"], ["--threads", "0"], ["--follow", "3"], ["--points", "2"]):
        monkeypatch.setattr("sys.argv", ["hybridgen_grid.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            hybridgen_grid.main()
