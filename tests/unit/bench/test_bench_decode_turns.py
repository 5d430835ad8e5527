"""`bench/decode_turns.py`: methods take turns, and each round is held against the first method's."""

import json
from pathlib import Path

import pytest

import decode_turns

SETTINGS = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--points", "1x200", "--recent", "64"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["decode_turns.py", *SETTINGS, *arguments])
    return decode_turns.main()


def test_a_run_on_the_cpu_ends_with_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "records.jsonl"
    arguments = ["--policies", "exact,bounded", "--rounds", "3", "--turn", "4", "--skip", "1", "--output", str(output)]
    assert run(monkeypatch, *arguments) == 0
    record = json.loads(output.read_text())
    (point,) = record["points"]
    assert list(point["methods"]) == ["exact", "bounded"]
    for found in point["methods"].values():
        assert found["step_s"]["num"] == 3 * 3
        assert found["times_first"]["num"] == 3
        assert found["lane_bytes"]["cpu"] > 0  # old keys lie in DRAM
    assert point["methods"]["exact"]["times_first"]["median"] == 1


def test_rounds_are_held_against_the_same_round_of_the_first() -> None:
    assert decode_turns.ratios([[2.0, 2.0], [30.0, 90.0, 30.0]], [[1.0], [10.0]]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policies", "exact,exact"], "each once"),
        (["--policies", "fast"], "is not a valid"),
        (["--turn", "2", "--skip", "2"], "less than --turn"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
