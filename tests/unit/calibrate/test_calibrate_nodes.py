"""What a NUMA node gives: rates of this machine's own node, and reasons where one cannot be measured."""

import errno

import numpy as np
import pytest

from ambidex.calibrate import nodes
from ambidex.calibrate.nodes import LINE_BYTES, measure_latency, measure_node
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
    assert rates["latency_s"] is None or 0 < rates["latency_s"] < 1e-3
    assert "GB/s" in show("NUMA node 1", rates)


@pytest.mark.parametrize("kernel", [FakeKernel(refuse=errno.EPERM), FakeKernel(free_pages={0: 1 << 20, 1: 3})])
def test_node_that_gives_no_memory_has_a_reason(kernel: FakeKernel) -> None:
    rates = measure_node(1, ThreadPool(1), MIB, device=None, calls=kernel.calls())
    assert set(rates) == {"refusal"}
    assert show("NUMA node 1", rates).startswith("not measured: ")


def test_more_memory_than_can_be_mapped_has_a_reason() -> None:
    assert "maps no" in measure_node(0, ThreadPool(1), 1 << 62, device=None)["refusal"]


def test_chase_sees_every_line_once_before_it_comes_back() -> None:
    memory = PlacedMemory(MIB)
    if measure_latency(memory) is None:
        pytest.skip("another processor, or no code of one's own")
    chase = nodes._load_chase()
    assert chase is not None
    num_lines = MIB // LINE_BYTES
    seen, address = set(), memory.address
    for _ in range(num_lines):
        address = chase(address, 1)
        seen.add(address)
    assert len(seen) == num_lines
    assert chase(memory.address, num_lines) == memory.address
    assert chase(memory.address, 2) == chase(chase(memory.address, 1), 1)
    assert np.frombuffer(memory.buffer, dtype=np.uint64)[0] == chase(memory.address, 1)


def test_other_processors_have_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.platform, "machine", lambda: "riscv64")
    assert measure_latency(PlacedMemory(MIB)) is None
