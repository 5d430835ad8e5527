"""Lines of control traces: what is written is read, and what is wrong is named with its value and its limit."""

import json
from typing import Any

import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.hot import BlockScore, HotDecision, HotLook, HotState
from ambidex.core.ids import BlockId, Tier
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import (
    LaneTimes,
    SelectionDecision,
    SelectionLimits,
    SelectionSetting,
    ShareDecision,
    ShareSeen,
    ShareState,
    StageTimes,
)
from ambidex.core.step import BlockRef
from ambidex.formats.control_trace import MAX_LINE_BYTES, Decision, decision_json, parse_decision

TIMES = StageTimes(gpu_s=0.25, cpu_s=0.125, transfer_s=0.0)
SELECTION = SelectionDecision(
    before=SelectionSetting(num_selected=7),
    times=TIMES,
    limits=SelectionLimits(floor=4, ceiling=100, may_resize=True, may_switch=False),
    after=SelectionSetting(num_selected=8, mode=HybridGenMode.PRE, times=TIMES, num_steps=1, num_returns=2),
)
SHARE = ShareDecision(
    before=ShareState(share=0.25, step=0.1, direction=0),
    seen=ShareSeen(cpu_last=None, asked=0.25, achieved=0.2, times=LaneTimes(step_s=0.01, link_s=0.02, dram_s=0.015625)),
    after=ShareState(share=0.3, step=0.1, direction=1, link_s=0.02, num_steps=3, may_be_alone=False),
)
HOT = HotDecision(
    before=HotState(
        scores=(BlockScore(block=BlockRef(Tier.DRAM, BlockId(7)), score=9, num_looks=1),), most=2**31, interval=4
    ),
    look=HotLook(kept=((BlockRef(Tier.DRAM, BlockId(7)), 3),), room=2, look_s=0.25, step_s=None),
    after=HotState(
        scores=(
            BlockScore(block=BlockRef(Tier.DRAM, BlockId(7)), score=9, num_looks=2),
            BlockScore(block=BlockRef(Tier.CXL, BlockId(0)), score=1, num_looks=1),
        ),
        wanted=(BlockRef(Tier.DRAM, BlockId(7)),), most=2**31, num_slow=1, interval=4,
    ),
)  # fmt: skip


def line_of(decision: Decision, path: str = "", value: Any = None) -> bytes:
    """A line, one field of which has another value."""
    record = decision_json(decision)
    *groups, name = path.split(".")
    fields = record
    for group in groups:
        fields = fields[group]
    if name:
        fields[name] = value
    return json.dumps(record).encode()


@pytest.mark.parametrize("decision", [SELECTION, SHARE, HOT])
def test_what_is_written_is_read(decision: Decision) -> None:
    assert parse_decision(line_of(decision)) == decision


@pytest.mark.parametrize(
    ("decision", "path", "value", "message"),
    [
        (SELECTION, "kind", "other", "its `kind` is 'other': it must be 'selection', 'share' or 'hot'"),
        (SELECTION, "more", 1, "the line has 'more': it has kind, before, times, limits, after and nothing else"),
        (SELECTION, "before", [], r"`before` is \[\]: it must be a JSON object"),
        (SELECTION, "before.num_selected", -1, "`num_selected` in `before` is -1: it must be a whole number from 0"),
        (SELECTION, "before.num_selected", 7.5, "`num_selected` in `before` is 7.5"),
        (SELECTION, "after.mode", "auto", "`mode` in `after` is 'auto': it must be 'post' or 'pre'"),
        (SELECTION, "after.times.gpu_s", "fast", "`gpu_s` in `after`, `times` is 'fast': it must be a number"),
        (SELECTION, "times.cpu_s", float("nan"), "`cpu_s` in `times` is nan: it must be a number"),
        (SELECTION, "times.cpu_s", True, "`cpu_s` in `times` is True"),
        (SELECTION, "times.cpu_s", 1e300, r"`cpu_s` in `times` is 1e\+300: it must be a number from 0 to 1e\+06"),
        (SELECTION, "limits.may_switch", 1, "`may_switch` in `limits` is 1: it must be true or false"),
        (SHARE, "seen.cpu_last", 1.5, "`cpu_last` in `seen` is 1.5: it must be a number from 0 to 1"),
        (SHARE, "seen.times", None, "`cpu_last` and `times` in `seen` are both null"),
        (SHARE, "seen.times.link_s", 0.0, "`link_s` in `seen`, `times` is 0.0: it must be a number from 1e-12 to"),
        (SHARE, "after.link_s", 0, "`link_s` in `after` is 0: it must be a number from 1e-12 to"),
        (SHARE, "before.direction", 2, "`direction` in `before` is 2: it must be a whole number from -1 to 1"),
        (SHARE, "times", {}, "the line has 'times'"),
        (HOT, "look.kept", {"dram 7": 0}, "`dram 7` in `look`, `kept` is 0: it must be a whole number from 1"),
        (HOT, "look.kept", {"gpu 7": 1}, "a block is named 'gpu 7': it must be like 'dram 7'"),
        (HOT, "look.kept", {"dram 07": 1}, "a block is named 'dram 07'"),
        (HOT, "look.step_s", -1, "`step_s` in `look` is -1: it must be a number from 0"),
        (HOT, "before.scores", {"dram 7": 9}, "`dram 7` in `before`, `scores` is 9: it must be two whole numbers"),
        (HOT, "before.scores", {"dram 7": [9, 0]}, r"is \[9, 0\]: it must be two whole numbers from 1 to 2147483647"),
        (HOT, "before.scores", {"dram 7": [9, True]}, "it must be two whole numbers"),
        (
            HOT,
            "after.wanted",
            ["dram 7", "dram 7"],
            "`wanted` in `after` is .*: it must be a list of blocks, each once",
        ),
        (HOT, "after.wanted", [7], "a block is named 7: it must be like 'dram 7'"),
        (HOT, "after.interval", 0, "`interval` in `after` is 0: it must be a whole number from 1"),
        (HOT, "times", {}, "the line has 'times'"),
    ],
)
def test_what_is_wrong_is_named(decision: Decision, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_decision(line_of(decision, path, value))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not valid JSON"),
        (line_of(SHARE)[:-9], "not valid JSON .*: a run that was killed leaves its last line cut"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
        (b'{"kind": "share", "kind": "share"}', "the key 'kind' is there twice"),
        (b"[1]", r"the line is \[1\]: it must be a JSON object"),
        (b'{"kind": "share"}', "the line lacks before, seen, after"),
        (b" " * (MAX_LINE_BYTES + 1), "more than 8388608 bytes"),
    ],
)
def test_what_is_no_line_of_a_trace_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_decision(line)
