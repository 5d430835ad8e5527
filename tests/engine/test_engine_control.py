"""Traces of controllers: what was decided while an engine ran is decided again from the file alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.attention.lane_share import LaneBalance
from ambidex.core.errors import ConfigError
from ambidex.core.selection import LaneTimes, ShareDecision, ShareSeen
from ambidex.engine.compose.control import decision_json, open_control_trace, replay
from tiny_engine import make_engine_folder

RECORDED = Path(__file__).parent.parent / "data" / "control_trace.jsonl"
"""Of `--control-trace`: SmolLM2 under hybridgen with feedback `full`, on two cores that others used, too."""


def test_recorded_trace_comes_out_as_it_was_decided() -> None:
    lines = RECORDED.read_text().splitlines()
    assert replay(lines) == (len(lines), [])
    kinds = [json.loads(line) for line in lines]
    assert len({line["after"]["num_selected"] for line in kinds}) > 5, "it has changed the number"


def test_line_that_was_decided_otherwise_is_named() -> None:
    line = json.loads(RECORDED.read_text().splitlines()[3])
    line["after"]["num_selected"] += 1
    (_, (sentence,)) = replay([json.dumps(line)])
    assert sentence.startswith("line 1: recorded ")


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "other"}', '{"kind": "share"}', '{"kind": "selection"}'])
def test_line_of_something_else_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1 is none of a control trace"):
        replay([line])


def test_engine_writes_what_its_feedback_decides(tmp_path: Path) -> None:
    folder, path = make_engine_folder(tmp_path / "tiny"), tmp_path / "control.jsonl"
    options: dict[str, Any] = {"exact_layers": 1, "near_tokens": 3, "min_selected_tokens": 4, "num_threads": 1,
                               "hybridgen_feedback": "full", "dtype": "fp32"}  # fmt: skip
    with LLM(str(folder), policy="hybridgen", control_trace=str(path), **options) as llm:
        llm.generate("The harbour lies to the north.", SamplingParams(max_output_tokens=12, ignore_eos=True))
    lines = path.read_text().splitlines()
    assert replay(lines) == (len(lines), [])
    assert len(lines) == 11, "the first token comes of the prompt's step"
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
    lines = [json.dumps(decision_json(decision)) for decision in told]
    assert replay(lines) == (40, [])
    assert abs(told[-1].after.share - 0.4) < 0.05
    cpu_last = told[5].seen.cpu_last
    assert cpu_last is not None
    changed = replace(told[5], seen=replace(told[5].seen, cpu_last=1 - cpu_last))
    assert len(replay([json.dumps(decision_json(changed))])[1]) == 1
