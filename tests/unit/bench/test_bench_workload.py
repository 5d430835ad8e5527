"""Steps that are not counted: as many as lanes need to find their shares."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from types import SimpleNamespace
from typing import cast

import pytest

from ambidex.bench import workload
from ambidex.bench.workload import MOST_WARMUP_STEPS, NUM_WARMUP_STEPS, most_warmup_steps, warm_up
from ambidex.core.ids import Lane
from ambidex.engine.engine import Engine

BYTES = 1_000_000


def count_steps(shares: Iterator[float], *, device: str = "cuda:0") -> int:
    """Warm up an engine whose steps have these shares of their keys travel."""
    lane_bytes: Counter[Lane] = Counter()
    engine = SimpleNamespace(figures=SimpleNamespace(device=device), stats=SimpleNamespace(lane_bytes=lane_bytes))
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        share = next(shares)
        lane_bytes.update({Lane.STREAM: round(share * BYTES), Lane.CPU: round((1 - share) * BYTES), Lane.GPU: BYTES})

    found = warm_up(cast("Engine", engine), step)
    assert found == num_steps
    assert found <= most_warmup_steps(cast("Engine", engine))
    return found


def test_steps_go_on_until_the_share_has_been_found():
    falling = (0.9 * 0.95**place for place in range(12))
    assert count_steps(chain(falling, repeat(0.4))) == 12 + 8


def test_share_that_swings_by_a_percent_has_been_found():
    assert count_steps(cycle((0.500, 0.505))) == 8


def test_share_that_every_second_step_learns_of_is_not_taken_for_found():
    falling = (0.9 * 0.9**place for place in range(10) for _ in range(2))
    assert count_steps(chain(falling, repeat(0.3))) >= 20


def test_where_nothing_travels_steps_are_few():
    assert count_steps(repeat(0.0)) == NUM_WARMUP_STEPS
    assert count_steps(cycle((0.9, 0.1)), device="cpu") == NUM_WARMUP_STEPS


def test_where_all_travels_it_may_still_turn_out_slower():
    assert count_steps(repeat(1.0)) == 8


def test_share_that_is_never_found_ends_at_the_most():
    assert count_steps(cycle((0.9, 0.1))) == MOST_WARMUP_STEPS


def test_long_steps_are_few(monkeypatch: pytest.MonkeyPatch):
    clock, woken = iter(range(0, 1000, 1)), []
    monkeypatch.setattr(workload.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(workload, "_wake", woken.append)
    assert count_steps(cycle((0.9, 0.1))) <= NUM_WARMUP_STEPS + 1
    assert woken == ["cuda:0"]


def test_what_was_compiled_counts_for_no_time_and_the_device_is_woken(monkeypatch: pytest.MonkeyPatch):
    """Bug: seconds of a compiler ended the search for shares, and a GPU that had idled meanwhile was measured slow."""
    now, woken, num_steps = 0.0, [], 0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    def shares() -> Iterator[float]:
        nonlocal now, num_steps
        for num_steps in range(1, 100):
            now += 5.0 if num_steps == 1 else 0.005
            yield 0.9 * 0.95**num_steps

    monkeypatch.setattr(workload.time, "perf_counter", clock)
    monkeypatch.setattr(workload, "_wake", lambda device: woken.append((device, num_steps)))
    assert count_steps(shares()) == MOST_WARMUP_STEPS
    assert woken == [("cuda:0", NUM_WARMUP_STEPS - 1)]
