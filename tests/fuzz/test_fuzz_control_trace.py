"""Damaged control traces: each line is decided once more or refused by our own error; nothing else comes out."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.attention.lane_share import LaneBalance
from ambidex.core.errors import ConfigError
from ambidex.core.selection import LaneTimes, ShareDecision, ShareSeen
from ambidex.engine.compose.control import replay
from ambidex.formats.control_trace import decision_json, parse_decision

DATA = Path(__file__).parent.parent / "data"


def make_lines() -> list[bytes]:
    """Lines of recorded traces, and of a balance of lanes in all its states."""
    told: list[ShareDecision] = []
    balance = LaneBalance(0.1, tell=told.append)
    balance.update(ShareSeen(cpu_last=0.5, asked=0.1, achieved=0.1))
    for cpu_last, link_s in ((1.0, 0.05), (0.0, 0.05), (1.0, 0.02), (0.5, 0.001), (0.5, 0.001)):
        times = LaneTimes(step_s=0.02, link_s=link_s, dram_s=0.02)
        balance.update(ShareSeen(cpu_last=cpu_last, asked=0.1, achieved=0.1, times=times))
    times = LaneTimes(step_s=0.01, link_s=0.1, dram_s=0.1)
    balance.update(ShareSeen(cpu_last=None, asked=1.0, achieved=1.0, times=times))
    recorded = (DATA / "control_trace_modes.jsonl").read_bytes().splitlines()[::10]
    recorded += (DATA / "control_trace_hot.jsonl").read_bytes().splitlines()[:2]
    return [*recorded, *(json.dumps(decision_json(decision)).encode() for decision in told)]


LINES = make_lines()
NUM_RANDOM = 8_000
TOKENS = re.compile(rb'"[^"]*"|-?\d[\d.e+-]*|true|false|null|\{[^{}]*\}|[{}:,]')
ODDITIES = (
    b"-1", b"0", b"-0.0", b"1e999", b"1e-320", b"NaN", b"Infinity", b"0.5", b"1", b"1000000", b"2147483647", b"1" * 400,
    b"null", b"true", b"[]", b"{}", b'"pre"', b'"auto"', b"[[[[[[", b'"\\ud800"', b'{"a":1,"a":2}', b",", b"\xff",
)  # fmt: skip


def damage(line: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start, stop = rng.choice([token.span() for token in TOKENS.finditer(line)] or [(0, 0)])
        match rng.randrange(4):
            case 0 | 1:
                line = line[:start] + rng.choice(ODDITIES) + line[stop:]
            case 2:
                line = line[:start] + line[stop:]
            case 3:
                line = line[: rng.randrange(len(line) + 1)]
    return line


def is_refused(line: bytes) -> bool:
    """Whether a line is refused; else it is decided once more."""
    try:
        assert replay([line]).num_decisions == 1
    except ConfigError as error:
        assert str(error).startswith("line 1 is none of a control trace: ")  # noqa: PT017  # refused is not wrong
        return True
    return False


def test_damaged_lines_are_decided_or_refused() -> None:
    rng = random.Random(1)
    refused = 0
    for number in range(NUM_RANDOM):
        line = damage(rng.choice(LINES), rng)
        try:
            refused += is_refused(line)
        except Exception as error:
            pytest.fail(f"line {number} of seed 1: {line!r}: {type(error).__name__} {error}")
    assert 0.5 * NUM_RANDOM < refused < NUM_RANDOM, "some damage is harmless, most is not"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LINES), st.lists(st.tuples(st.integers(0, 40), json_values), min_size=1, max_size=4))
def test_fields_of_other_values_are_decided_or_refused(line: bytes, changes: list[tuple[int, Any]]) -> None:
    record = json.loads(line)
    for place, value in changes:
        holders = [(record, name) for name in record]
        holders += [(group, name) for group in record.values() if isinstance(group, dict) for name in group]
        fields, name = holders[place % len(holders)]
        fields[name] = value
    is_refused(json.dumps(record).encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(line: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_decision(line)
