import errno
import gc
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_mapping import HostLayout, KVMapping
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.storage.copy import copy_block
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_parts import Nodes, find_moved_parts, place_parts
from ambidex.storage.kv_pool import RowKVPool
from ambidex.storage.numa_calls import PAGE_BYTES
from numa_world import FakeKernel

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype=DType.FP32, block_size=32, order=KVOrder.ROWS)
RECORD = 32 * 32 * 4  # one page: a block of one head
NODES = Nodes(cxl=1, local=0)
PLAIN = HostMemory(advise=lambda _: None)


def memory_of(kernel: FakeKernel) -> HostMemory:
    return HostMemory(advise=lambda _: None, numa=kernel.calls())


def nodes_of(tensor: torch.Tensor, kernel: FakeKernel) -> list[int]:
    """The node of each page of a tensor, by whom the kernel was told."""
    first = tensor.data_ptr()
    found = kernel.calls().find_nodes(np.arange(first, first + tensor.nbytes, PAGE_BYTES, dtype=np.uint64))
    assert not isinstance(found, int)
    return [int(node) for node in found]


def place(layout: HostLayout, kernel: FakeKernel) -> dict[KVPart, torch.Tensor]:
    parts = place_parts(SPEC, layout, NODES, memory_of(kernel))
    assert not isinstance(parts, str), parts
    return dict(parts)


def test_v_lies_on_the_cxl_node_and_k_in_dram() -> None:
    kernel = FakeKernel()
    parts = place(HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4), kernel)
    assert parts[KVPart.K].shape == (3, 2, 4, 32, 32)
    assert set(nodes_of(parts[KVPart.K], kernel)) == {0}
    assert set(nodes_of(parts[KVPart.V], kernel)) == {1}


def test_v_of_first_layers_lies_in_dram() -> None:
    kernel = FakeKernel()
    parts = place(HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4, first_cxl_layer=1), kernel)
    assert nodes_of(parts[KVPart.V], kernel) == [0] * 8 + [1] * 16


def test_k_of_spilled_blocks_lies_on_the_cxl_node() -> None:
    kernel = FakeKernel()
    parts = place(HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=3, num_spilled=2), kernel)
    assert nodes_of(parts[KVPart.K], kernel) == [0, 0, 0, 1, 1] * 6
    assert nodes_of(parts[KVPart.K][1, 1, 3:], kernel) == [1, 1]


def test_interleaved_pages_of_both_parts_lie_on_both_nodes_in_turn() -> None:
    kernel = FakeKernel()
    parts = place(HostLayout(mapping=KVMapping.INTERLEAVE, num_near=4), kernel)
    assert all(nodes_of(part, kernel) == [0, 1] * 12 for part in parts.values())


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL, errno.ENOMEM])
def test_refusal_of_the_kernel_is_a_reason_with_the_part(error: int) -> None:
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4)
    reason = place_parts(SPEC, layout, NODES, memory_of(FakeKernel(refuse=error)))
    assert isinstance(reason, str)
    assert reason.startswith("V of 4 blocks: the kernel places no memory on node 1")


def test_full_node_is_a_reason() -> None:
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4)
    reason = place_parts(SPEC, layout, NODES, memory_of(FakeKernel(free_pages={0: 1000, 1: 7})))
    assert isinstance(reason, str)
    assert "7 of 24 pages" in reason


def test_no_blocks_need_no_memory() -> None:
    parts = place_parts(SPEC, HostLayout(mapping=KVMapping.INTERLEAVE, num_near=0), NODES, PLAIN)
    assert not isinstance(parts, str)
    assert parts[KVPart.V].shape == (3, 2, 0, 32, 32)


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    parts = place(HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4), FakeKernel())
    view = parts[KVPart.V][2, 1, 3]
    view.fill_(7)
    del parts
    gc.collect()
    assert view.sum() == 7 * 32 * 32


@given(
    st.sampled_from((KVMapping.K_DRAM_V_CXL, KVMapping.INTERLEAVE)),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    st.data(),
)
def test_bytes_that_come_out_of_a_block_are_those_that_went_in(
    mapping: KVMapping, num_near: int, num_spilled: int, first: int, data: st.DataObject
) -> None:
    if mapping is KVMapping.INTERLEAVE:
        num_spilled = first = 0
    layout = HostLayout(mapping=mapping, num_near=num_near, num_spilled=num_spilled, first_cxl_layer=first)
    device = torch.device("cpu")
    parts = place(layout, FakeKernel())
    pool = RowKVPool(SPEC, Tier.DRAM, layout.num_blocks, device=device, pinned=False, memory=PLAIN, parts=parts)
    near = RowKVPool(SPEC, Tier.GPU, 1, device=device, pinned=False, memory=PLAIN)
    seeds = data.draw(st.permutations(range(layout.num_blocks)))
    for block_id in seeds:
        near.k.copy_(torch.full_like(near.k, block_id) + torch.arange(32))
        near.v.copy_(torch.full_like(near.v, -block_id) - torch.arange(32))
        copy_block(near, 0, pool, block_id)
    for block_id in seeds:
        copy_block(pool, block_id, near, 0)
        assert torch.equal(near.k, torch.full_like(near.k, block_id) + torch.arange(32))
        assert torch.equal(near.v, torch.full_like(near.v, -block_id) - torch.arange(32))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4),
            "V of 4 blocks has moved .*: 0 of 24 pages came to lie",
        ),
        (
            HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=2, num_spilled=2),
            "K of 4 blocks has moved .*: 0 of 2 pages came to lie on node 1",
        ),
        (HostLayout(mapping=KVMapping.INTERLEAVE, num_near=1400), "K of 1400 blocks has moved .*got only 0"),
    ],
)
def test_pages_that_moved_as_they_were_pinned_are_told(layout: HostLayout, said: str) -> None:
    kernel = FakeKernel()
    parts = place(layout, kernel)
    assert find_moved_parts(SPEC, layout, NODES, parts, memory_of(kernel)) is None
    moved = find_moved_parts(SPEC, layout, NODES, parts, memory_of(FakeKernel()))  # one that has all pages on node 0
    assert moved is not None
    assert re.match(said, moved), moved
    assert "is the node's memory online as movable" in moved
    assert find_moved_parts(SPEC, layout, NODES, parts, memory_of(FakeKernel(silent=errno.ENOSYS))) is None
