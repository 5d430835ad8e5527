"""`bench/tuner_run.py`: phases run in one engine with a tuner, batches in engines of their own; a record is there."""

import json
from pathlib import Path

import pytest

import tuner_run


def test_a_quick_run_ends_with_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "records.jsonl"
    arguments = ["--quick", "--phases", "1,2,1", "--steps", "6", "--context", "40", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["tuner_run.py", *arguments])
    assert tuner_run.main() == 0
    record = json.loads(output.read_text())
    assert [phase["batch"] for phase in record["phases"]] == [1, 2, 1]
    assert record["has_tuner"]
    assert record["num_graph_failures"] == 0
    for phase in record["phases"]:
        assert len(phase["steps_s"]) == 6
        assert phase["static_s"] > 0


def test_numbers_that_make_no_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--phases", "1,x"], ["--phases", "0"], ["--steps", "2"]):
        monkeypatch.setattr("sys.argv", ["tuner_run.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            tuner_run.main()
