import errno
import mmap
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.errors import InternalError, TierFullError
from ambidex.core.units import MIB
from ambidex.storage import placed_memory
from ambidex.storage.numa_calls import NUMA_CALLS, PAGE_BYTES, MemoryPolicy
from ambidex.storage.placed_memory import PagePlaces, PlacedMemory
from numa_world import FakeKernel


def test_place_puts_all_pages_on_the_node_and_leaves_the_rest_alone() -> None:
    kernel = FakeKernel()
    memory = PlacedMemory(10 * PAGE_BYTES, kernel.calls())
    assert memory.place(4 * PAGE_BYTES, 10 * PAGE_BYTES, [1]) is None
    assert kernel.policies == [(memory.address + 4 * PAGE_BYTES, 6 * PAGE_BYTES, MemoryPolicy.PREFERRED, (1,))]
    assert memory.find_pages(0, memory.num_bytes) == PagePlaces(on_node={0: 4, 1: 6}, num_absent=0)


def test_place_on_two_nodes_deals_pages_in_turn() -> None:
    kernel = FakeKernel()
    memory = PlacedMemory(8 * PAGE_BYTES, kernel.calls())
    assert memory.place(0, 8 * PAGE_BYTES, [0, 1]) is None
    assert kernel.policies[0][2] is MemoryPolicy.INTERLEAVE
    assert memory.find_pages(0, memory.num_bytes) == PagePlaces(on_node={0: 4, 1: 4}, num_absent=0)


@given(st.integers(1, 5 * PAGE_BYTES), st.data())
def test_place_never_takes_a_page_that_holds_bytes_outside_of_the_part(num_bytes: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_bytes))
    stop = data.draw(st.integers(start, num_bytes))
    kernel = FakeKernel()
    memory = PlacedMemory(num_bytes, kernel.calls())
    assert memory.place(start, stop, [1]) is None
    for address, size, _, _ in kernel.policies:
        first, last = address - memory.address, address - memory.address + size
        assert start <= first < last
        assert last <= stop or (stop == num_bytes and last - stop < PAGE_BYTES)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EPERM, "places no memory on node 1: .*this process may not"),
        (errno.EINVAL, "does not exist, has gone, or the process's cpuset"),
        (errno.ENOMEM, "no memory left"),
        (errno.ENOSYS, "without NUMA"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_policy_that_the_kernel_refuses_is_a_reason(error: int, said: str) -> None:
    memory = PlacedMemory(4 * PAGE_BYTES, FakeKernel(refuse=error).calls())
    reason = memory.place(0, 4 * PAGE_BYTES, [1])
    assert reason is not None
    assert re.search(said, reason)


def test_node_that_does_not_exist_is_a_reason() -> None:
    reason = PlacedMemory(PAGE_BYTES, FakeKernel().calls()).place(0, PAGE_BYTES, [7])
    assert reason is not None
    assert "node 7" in reason


def test_kernel_that_does_not_say_where_pages_lie_is_a_reason() -> None:
    reason = PlacedMemory(PAGE_BYTES, FakeKernel(silent=errno.EPERM).calls()).place(0, PAGE_BYTES, [1])
    assert reason is not None
    assert "does not say where pages lie" in reason


def test_node_that_is_full_is_a_reason_that_counts_pages() -> None:
    kernel = FakeKernel(free_pages={0: 100, 1: 3})
    reason = PlacedMemory(8 * PAGE_BYTES, kernel.calls()).place(0, 8 * PAGE_BYTES, [1])
    assert reason is not None
    assert reason.startswith("3 of 8 pages came to lie on node 1 (5 on node 0)")


def test_full_node_is_noticed_before_all_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_memory, "TOUCHED_BYTES", 2 * PAGE_BYTES)
    kernel = FakeKernel(free_pages={0: 100, 1: 3})
    assert PlacedMemory(8 * PAGE_BYTES, kernel.calls()).place(0, 8 * PAGE_BYTES, [1]) is not None
    assert kernel.free_pages[0] == 99


def test_interleaving_over_a_full_node_is_a_reason() -> None:
    num_pages = 2 * placed_memory.MANY_PAGES
    kernel = FakeKernel(free_pages={0: 10 * num_pages, 1: num_pages // 8})
    reason = PlacedMemory(num_pages * PAGE_BYTES, kernel.calls()).place(0, num_pages * PAGE_BYTES, [0, 1])
    assert reason is not None
    assert "it is full" in reason


def test_part_outside_of_the_mapping_is_a_bug() -> None:
    memory = PlacedMemory(PAGE_BYTES, FakeKernel().calls())
    with pytest.raises(InternalError):
        memory.place(0, 2 * PAGE_BYTES, [1])
    with pytest.raises(InternalError):
        memory.place(0, PAGE_BYTES, [])


def test_more_memory_than_the_system_maps_is_refused() -> None:
    with pytest.raises(TierFullError, match="maps no"):
        PlacedMemory(1 << 62)


def test_kernel_of_this_machine_places_memory_on_the_node_that_it_names() -> None:
    first = PlacedMemory(4 * MIB)
    first.touch(0, first.num_bytes)
    where = first.find_pages(0, first.num_bytes)
    if isinstance(where, int):
        pytest.skip(f"the kernel does not answer move_pages: {errno.errorcode.get(where, where)}")
    node = max(where.on_node, key=lambda found: where.on_node[found])
    memory = PlacedMemory(4 * MIB)
    assert memory.place(MIB, 4 * MIB, [node]) is None
    assert memory.find_pages(MIB, 4 * MIB) == PagePlaces(on_node={node: 3 * MIB // PAGE_BYTES}, num_absent=0)
    untouched = memory.find_pages(0, MIB)
    assert isinstance(untouched, PagePlaces)
    assert untouched.num_absent == MIB // PAGE_BYTES


def test_kernel_of_this_machine_refuses_a_node_that_is_not_there() -> None:
    reason = PlacedMemory(PAGE_BYTES).place(0, PAGE_BYTES, [1023])
    assert reason is not None
    assert "node 1023" in reason


def test_bytes_that_were_placed_are_what_was_written() -> None:
    memory = PlacedMemory(3 * PAGE_BYTES, FakeKernel().calls())
    assert memory.place(PAGE_BYTES, 3 * PAGE_BYTES, [1]) is None
    view = np.frombuffer(memory.buffer, dtype=np.uint8)
    view[:] = np.arange(len(view)) % 251
    assert (np.frombuffer(memory.buffer, dtype=np.uint8) == np.arange(len(view)) % 251).all()


def test_calls_with_the_kernels_numbers_know_a_page_of_this_process() -> None:
    page = mmap.mmap(-1, PAGE_BYTES)
    page[0] = 1
    address = np.frombuffer(page, dtype=np.uint8).ctypes.data
    nodes = NUMA_CALLS.find_nodes(np.array([address], dtype=np.uint64))
    if isinstance(nodes, int):
        pytest.skip(f"the kernel does not answer move_pages: {errno.errorcode.get(nodes, nodes)}")
    assert nodes[0] >= 0
