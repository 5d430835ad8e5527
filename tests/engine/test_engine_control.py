"""Traces of controllers: what was decided while an engine ran is decided again from the file alone."""

import errno
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.attention.lane_share import LaneBalance
from ambidex.core.errors import ConfigError
from ambidex.core.hot import HotState
from ambidex.core.selection import LaneTimes, SelectionSetting, ShareDecision, ShareSeen
from ambidex.engine.compose.control import Replay, open_control_trace, replay, replay_file
from ambidex.formats.control_trace import decision_json
from tiny_engine import make_engine_folder

DATA = Path(__file__).parent.parent / "data"
RECORDED = DATA / "control_trace.jsonl"
"""Of `--control-trace`: SmolLM2 under hybridgen with feedback `full`, on two cores that others used, too."""
MODES = DATA / "control_trace_modes.jsonl"
"""The same of the tiny model of these tests, with 4 keys at least and V in an emulated CXL tier of 900 µs and 4 MB/s:
the number goes up and down, then the mode changes."""
HOT = DATA / "control_trace_hot.jsonl"
"""The same of SmolLM2 under bounded, 230 tokens behind 2,000 of a novel, with 16 blocks beside 34 in host memory."""


def test_recorded_choice_of_hot_blocks_comes_out_as_it_was_decided() -> None:
    lines = [json.loads(line) for line in HOT.read_text().splitlines()]
    assert replay_file(HOT) == Replay(num_selections=0, num_shares=0, num_hot=len(lines))
    intervals = [line["after"]["interval"] for line in lines]
    assert {4, 64} <= set(intervals), "looks became rare, and frequent again"
    before, after = ([set(line[when]["wanted"]) for line in lines] for when in ("before", "after"))
    assert sum(then != now for then, now in zip(before, after, strict=True)) > 3
    last = lines[-1]["look"]
    held = sum(last["kept"].get(block, 0) for block in lines[-1]["before"]["wanted"])
    assert held > 0.95 * sum(sorted(last["kept"].values())[-10:]), "nearly as many as any ten blocks could hold"


def test_hot_blocks_decided_otherwise_are_named() -> None:
    line = json.loads(HOT.read_text().splitlines()[-1])
    line["look"]["room"] = 3
    found = replay([json.dumps(line).encode()])
    assert found.first is not None
    assert isinstance(found.first.recorded, HotState)
    assert isinstance(found.first.decided, HotState)
    assert (len(found.first.recorded.wanted), len(found.first.decided.wanted)) == (10, 3)


@pytest.mark.parametrize("path", [RECORDED, MODES])
def test_recorded_trace_comes_out_as_it_was_decided(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert replay_file(path) == Replay(num_selections=len(lines), num_shares=0)
    assert len({line["after"]["num_selected"] for line in lines}) > 5, "it has changed the number"


def test_recorded_trace_holds_both_modes_and_both_directions() -> None:
    after = [json.loads(line)["after"] for line in MODES.read_text().splitlines()]
    assert {setting["mode"] for setting in after} == {"post", "pre"}
    changes = [now["num_selected"] - then["num_selected"] for then, now in itertools.pairwise(after)]
    assert min(changes) < 0 < max(changes)


def test_first_line_that_was_decided_otherwise_is_named() -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for place in (3, 7):
        lines[place]["after"]["num_selected"] += 1
    found = replay([json.dumps(line).encode() for line in lines])
    assert (found.num_decisions, found.num_different) == (len(lines), 2)
    assert found.first is not None
    assert found.first.line == 4
    assert isinstance(found.first.recorded, SelectionSetting)
    assert isinstance(found.first.decided, SelectionSetting)
    assert found.first.recorded.num_selected == found.first.decided.num_selected + 1


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"kind": "other"}', b'{"kind": "share"}', b'{"kind": "selection"}'])
def test_line_of_something_else_is_refused(line: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1 is none of a control trace"):
        replay([line])


def test_engine_writes_what_its_feedback_decides(tmp_path: Path) -> None:
    folder, path = make_engine_folder(tmp_path / "tiny"), tmp_path / "control.jsonl"
    options: dict[str, Any] = {"exact_layers": 1, "near_tokens": 3, "min_selected_tokens": 4, "num_threads": 1,
                               "hybridgen_feedback": "full", "dtype": "fp32"}  # fmt: skip
    with LLM(str(folder), policy="hybridgen", control_trace=str(path), **options) as llm:
        llm.generate("The harbour lies to the north.", SamplingParams(max_output_tokens=12, ignore_eos=True))
    lines = path.read_text().splitlines()
    assert replay_file(path) == Replay(num_selections=11, num_shares=0), "the first token comes of the prompt's step"
    first, second = (json.loads(line) for line in lines[:2])
    assert second["before"] == first["after"]


def test_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`control_trace`"):
        open_control_trace(str(tmp_path))
    assert open_control_trace(None) is None


@pytest.mark.parametrize("times", [None, LaneTimes(step_s=0.02, link_s=0.05, dram_s=0.02)])
def test_lanes_shares_are_decided_again(times: LaneTimes | None) -> None:
    """The CPU lane ends last below a share of 0.4, the stream lane's buffer holds 0.5."""
    told: list[ShareDecision] = []
    balance = LaneBalance(0.1, tell=told.append)
    for _ in range(40):
        share = balance.share
        cpu_last = 1.0 if share < 0.4 else 0.0
        balance.update(ShareSeen(cpu_last=cpu_last, asked=share, achieved=min(share, 0.5), times=times))
    lines = [json.dumps(decision_json(decision)).encode() for decision in told]
    assert replay(lines) == Replay(num_selections=0, num_shares=40)
    assert abs(told[-1].after.share - 0.4) < 0.05
    cpu_last = told[5].seen.cpu_last
    assert cpu_last is not None
    changed = replace(told[5], seen=replace(told[5].seen, cpu_last=1 - cpu_last))
    assert replay([json.dumps(decision_json(changed)).encode()]).num_different == 1


def test_trace_ends_where_the_disk_is_full_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    trace = open_control_trace(str(tmp_path / "trace.jsonl"))
    assert trace is not None
    trace._file = Full()
    balance = LaneBalance(0.1, tell=trace)
    for _ in range(3):
        balance.update(ShareSeen(cpu_last=1.0, asked=balance.share, achieved=balance.share))
    (record,) = caplog.records
    assert record.getMessage() == "the control trace ends here: No space left on device"
    assert trace._file.closed
