"""`ambidex replay`: what it says of traces that come out as recorded, otherwise, or not at all."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand

DATA = Path(__file__).parents[2] / "data"
RECORDED = DATA / "control_trace_modes.jsonl"


def run_replay(*args: str) -> Result:
    return CliRunner().invoke(AmbidexCommand(), ["replay", *args])


def test_recorded_trace_comes_out_as_recorded() -> None:
    result = run_replay(str(RECORDED))
    assert result.exit_code == 0, result.output
    assert result.stdout == ("111 decisions (111 of HybridGen's feedback): all come out as they were recorded\n")


def test_line_that_comes_out_otherwise_is_named_and_ends_with_code_1(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()[:9]]
    lines[4]["after"] |= {"num_selected": 99, "num_returns": 3}
    changed = tmp_path / "trace.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run_replay(str(changed))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "9 decisions (9 of HybridGen's feedback): 1 comes out otherwise",
        "the first in line 5:",
        "  num_selected: recorded 99, decided now 9",
        "  num_returns: recorded 3, decided now 0",
    ]


def test_json_says_the_same(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()[:2]]
    lines[1]["after"]["num_selected"] = 99
    changed = tmp_path / "trace.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run_replay(str(changed), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["num_selections"], found["num_shares"], found["num_different"]) == (2, 0, 1)
    assert found["first"]["line"] == 2
    assert found["first"]["recorded"]["num_selected"] == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECORDED.read_bytes()[:1000], ", line 2 is none of a control trace: it is not valid JSON"),
        (b"", "holds no decision: --control-trace writes those of hybridgen"),
        (b"\n", "line 1 is none of a control trace: it is not valid JSON"),
        (b"x" * 10**7, "line 1 is none of a control trace: it has more than 8388608 bytes"),
    ],
)
def test_broken_file_is_the_users_mistake(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    result = run_replay(str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: control trace {path}")
    assert message in result.stderr


@pytest.mark.parametrize(("name", "message"), [("", "Is a directory"), ("none.jsonl", "No such file or directory")])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, message: str) -> None:
    result = run_replay(str(tmp_path / name))
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
    assert message in result.stderr
