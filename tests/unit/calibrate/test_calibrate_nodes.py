"""What a NUMA node gives: rates of this machine's own node, and reasons where one cannot be measured."""

import errno

import numpy as np
import pytest
from numpy.typing import NDArray

from ambidex.calibrate import nodes
from ambidex.calibrate.nodes import LINE_BYTES, follow, make_ring, measure_latency, measure_node
from ambidex.cli.calibrate import show
from ambidex.core.units import MIB
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.storage.placed_memory import PlacedMemory
from numa_world import FakeKernel


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NUM_RUNS", 1)
    monkeypatch.setattr(nodes, "NUM_STEPS", 1000)


def test_node_is_measured() -> None:
    rates = measure_node(1, ThreadPool(1), MIB, device=None, calls=FakeKernel().calls())
    assert rates["read_bytes_per_s"] > 0
    assert rates["to_gpu_bytes_per_s"] is None
    assert 0 < rates["latency_s"] < 1e-3
    assert "GB/s" in show("NUMA node 1", rates)


@pytest.mark.parametrize("kernel", [FakeKernel(refuse=errno.EPERM), FakeKernel(free_pages={0: 1 << 20, 1: 3})])
def test_node_that_gives_no_memory_has_a_reason(kernel: FakeKernel) -> None:
    rates = measure_node(1, ThreadPool(1), MIB, device=None, calls=kernel.calls())
    assert set(rates) == {"refusal"}
    assert show("NUMA node 1", rates).startswith("not measured: ")


def test_more_memory_than_can_be_mapped_has_a_reason() -> None:
    assert "maps no" in measure_node(0, ThreadPool(1), 1 << 62, device=None)["refusal"]


def test_ring_has_every_line_once_and_is_followed() -> None:
    words = np.frombuffer(PlacedMemory(MIB).buffer, dtype=np.intp)
    ring = make_ring(words)
    assert sorted(ring) == list(range(0, MIB // words.itemsize, LINE_BYTES // words.itemsize))
    trail = np.zeros(2 * len(ring) + 1, dtype=np.intp)
    trail[0] = ring[0]
    follow(words, trail)
    assert trail.tolist() == [*ring, *ring, ring[0]]


def test_reads_that_do_not_follow_each_other_are_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow_copies(words: NDArray[np.intp], trail: NDArray[np.intp]) -> None:
        trail[1:] = words[trail[:-1].copy()]

    monkeypatch.setattr(nodes, "follow", follow_copies)
    assert measure_latency(PlacedMemory(MIB)) is None
