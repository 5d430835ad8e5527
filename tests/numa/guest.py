"""What code for NUMA nodes must find on a machine of two, the second without cores: run in a guest by `run.sh`.

Each check asks the kernel itself where pages lie. Imports no torch: under software emulation that alone takes minutes.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from ambidex.core.units import MIB
from ambidex.hw.topology import read_topology
from ambidex.storage.numa_calls import PAGE_BYTES
from ambidex.storage.placed_memory import PagePlaces, PlacedMemory

NUM_BYTES = 32 * MIB
NUM_PAGES = NUM_BYTES // PAGE_BYTES


def check_topology() -> str:
    topology = read_topology()
    near, far = topology.numa_nodes
    assert (near.node_id, near.cores, near.is_memory_only) == (0, (0, 1), False)
    assert (far.node_id, far.cores, far.is_memory_only, far.is_allowed) == (1, (), True, True)
    assert [node.node_id for node in topology.cxl_nodes] == [1]
    assert topology.local_node == near
    assert near.distances == {0: 10, 1: 40}
    return f"nodes of {near.memory_bytes // MIB} and {far.memory_bytes // MIB} MiB, the second of memory alone"


def check_default() -> str:
    memory = PlacedMemory(NUM_BYTES)
    assert memory.find_pages(0, NUM_BYTES) == PagePlaces(on_node={}, num_absent=NUM_PAGES)
    memory.touch(0, NUM_BYTES)
    assert memory.find_pages(0, NUM_BYTES) == PagePlaces(on_node={0: NUM_PAGES}, num_absent=0)
    return f"{NUM_PAGES} of {NUM_PAGES} pages of memory without a policy on node 0"


def check_placed() -> str:
    memory = PlacedMemory(NUM_BYTES)
    reason = memory.place(NUM_BYTES // 2, NUM_BYTES, [1])
    assert reason is None, reason
    memory.touch(0, NUM_BYTES // 2)
    places = memory.find_pages(0, NUM_BYTES)
    assert places == PagePlaces(on_node={0: NUM_PAGES // 2, 1: NUM_PAGES // 2}, num_absent=0), places
    return f"{NUM_PAGES // 2} of {NUM_PAGES} pages placed on node 1, the others on node 0"


def check_parts_between() -> str:
    memory, size, period = PlacedMemory(NUM_BYTES), 3 * PAGE_BYTES, 8 * PAGE_BYTES
    for start in range(0, NUM_BYTES, period):
        assert memory.place(start + period - size, start + period, [1]) is None
    memory.touch(0, NUM_BYTES)
    places = memory.find_pages(0, NUM_BYTES)
    assert places == PagePlaces(on_node={0: NUM_PAGES * 5 // 8, 1: NUM_PAGES * 3 // 8}, num_absent=0), places
    return f"{NUM_BYTES // period} parts of 3 pages on node 1 between others on node 0"


def check_interleaved() -> str:
    memory = PlacedMemory(NUM_BYTES)
    assert memory.place(0, NUM_BYTES, [0, 1]) is None
    places = memory.find_pages(0, NUM_BYTES)
    assert isinstance(places, PagePlaces)
    assert min(places.on_node[0], places.on_node[1]) > NUM_PAGES * 0.4, places
    return f"interleaved: {places.on_node[0]} pages on node 0, {places.on_node[1]} on node 1"


def check_full() -> str:
    free = read_topology().numa_nodes[1].free_bytes
    size = free + 64 * MIB
    reason = PlacedMemory(size).place(0, size, [1])
    assert reason is not None
    assert "it is full" in reason, reason
    return f"{size // MIB} MiB on node 1, which has {free // MIB} free: {reason}"


def check_given_back() -> str:
    free = read_topology().numa_nodes[1].free_bytes
    assert PlacedMemory(free // 2).place(0, free // 2, [1]) is None
    deadline = time.monotonic() + 30
    while (left := read_topology().numa_nodes[1].free_bytes) < free - 16 * MIB:
        assert time.monotonic() < deadline, f"{left // MIB} of {free // MIB} MiB came back"
        time.sleep(0.1)
    return f"half of node 1 taken and given back: {left // MIB} of {free // MIB} MiB are free"


def check_missing() -> str:
    reason = PlacedMemory(NUM_BYTES).place(0, NUM_BYTES, [5])
    assert reason is not None
    return f"on node 5: {reason}"


CHECKS: tuple[Callable[[], str], ...] = (
    check_topology, check_default, check_placed, check_parts_between, check_interleaved, check_full, check_given_back,
    check_missing,
)  # fmt: skip


def main() -> int:
    """Run all checks; the exit code is 1 if one of them failed."""
    num_failed = 0
    for check in CHECKS:
        try:
            print(f"ok      {check.__name__}: {check()}", flush=True)
        except AssertionError as error:
            num_failed += 1
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    print(f"{len(CHECKS) - num_failed} of {len(CHECKS)} checks passed", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
