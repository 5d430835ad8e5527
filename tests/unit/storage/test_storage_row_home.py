import errno
import time

import numpy as np
import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart
from ambidex.core.kv_mapping import HostLayout, KVMapping, SlowMemory
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_parts import Nodes
from ambidex.storage.numa_calls import PAGE_BYTES
from ambidex.storage.row_arena import RowArena
from ambidex.storage.row_home import IN_DRAM, RowHome
from ambidex.storage.slow_tier import SlowTier
from numa_world import FakeKernel

CPU = torch.device("cpu")
SHAPE = (3, 2, 32)
NUM_ROWS = 64  # 16 rows of a layer fill a page
NODES = Nodes(cxl=1, local=0)


def make_home(kernel: FakeKernel, mapping: KVMapping = KVMapping.K_DRAM_V_CXL, first_cxl_layer: int = 0) -> RowHome:
    layout = HostLayout(mapping=mapping, num_near=4, first_cxl_layer=first_cxl_layer)
    return RowHome(layout, nodes=NODES, memory=HostMemory(advise=lambda _: None, numa=kernel.calls()))


def make_arena(home: RowHome) -> RowArena:
    return RowArena(SHAPE, NUM_ROWS, dtype=torch.float32, device=CPU, home=home)


def layers_of(rows: HostRows, kernel: FakeKernel, part: KVPart) -> list[set[int]]:
    """The nodes on which each layer of a request's rows lies."""
    return [set(nodes_of(layer, kernel)) for layer in (rows.k if part is KVPart.K else rows.v)]


def nodes_of(tensor: torch.Tensor, kernel: FakeKernel) -> list[int]:
    first = tensor.data_ptr() // PAGE_BYTES * PAGE_BYTES
    pages = np.arange(first, tensor.data_ptr() + tensor.nbytes, PAGE_BYTES, dtype=np.uint64)
    found = kernel.calls().find_nodes(pages)
    assert not isinstance(found, int)
    return [int(node) for node in found]


def test_rows_of_v_lie_in_the_cxl_tier_and_rows_of_k_do_not_whoever_has_them() -> None:
    kernel = FakeKernel()
    arena = make_arena(make_home(kernel))
    for _ in range(3):
        rows = arena.open(16)
        assert layers_of(rows, kernel, KVPart.V) == [{1}, {1}, {1}]
        assert layers_of(rows, kernel, KVPart.K) == [{0}, {0}, {0}]


def test_rows_of_v_of_first_layers_lie_in_dram_whoever_has_them() -> None:
    kernel = FakeKernel()
    arena = make_arena(make_home(kernel, first_cxl_layer=2))
    for capacity in (16, 32):
        assert layers_of(arena.open(capacity), kernel, KVPart.V) == [{0}, {0}, {1}]


def test_interleaved_rows_lie_on_both_nodes() -> None:
    kernel = FakeKernel()
    arena = make_arena(make_home(kernel, KVMapping.INTERLEAVE))
    for _ in range(2):
        rows = arena.open(32)
        assert layers_of(rows, kernel, KVPart.K) == layers_of(rows, kernel, KVPart.V) == [{0, 1}] * 3


def test_rows_come_back_as_they_were_appended() -> None:
    rows = make_arena(make_home(FakeKernel())).open(16)
    for token in range(16):
        rows.append(torch.full(SHAPE, float(token)), torch.full(SHAPE, -float(token)))
    assert (rows.k[1, 1, :, 5] == torch.arange(16)).all()
    assert (rows.v[2, 0, :, 31] == -torch.arange(16)).all()
    with pytest.raises(AssertionError, match="no more tokens than were announced"):
        rows.append(torch.zeros(SHAPE), torch.zeros(SHAPE))


@pytest.mark.parametrize("kernel", [FakeKernel(refuse=errno.EPERM), FakeKernel(free_pages={0: 99, 1: 1})])
def test_rows_for_which_the_tier_has_no_room_are_refused(kernel: FakeKernel) -> None:
    with pytest.raises(TierFullError, match="rows of V: "):
        make_arena(make_home(kernel))


def test_rows_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(TierFullError, match="maps no"):
        make_home(FakeKernel()).allocate(KVPart.V, (1, 1 << 58), torch.float32)


def test_rows_that_dram_does_not_hold_are_refused() -> None:
    with pytest.raises(TierFullError, match=r"no 4096\.0 TiB of DRAM"):
        IN_DRAM.allocate(KVPart.K, (1, 1 << 50), torch.float32)


def test_rows_without_a_tier_lie_where_torch_puts_them() -> None:
    assert IN_DRAM.pace(KVPart.V, 0, 100) is None
    with IN_DRAM.copying(KVPart.V, 0, 100):
        rows = IN_DRAM.allocate(KVPart.V, (2, 12), torch.bfloat16)
    assert (rows.shape, rows.dtype) == ((2, 12), torch.bfloat16)


def test_rows_are_asked_for_in_huge_pages() -> None:
    asked: list[int] = []
    layout = HostLayout(mapping=KVMapping.DRAM, num_near=4)
    home = RowHome(layout, memory=HostMemory(advise=lambda rows: asked.append(rows.nbytes)))
    RowArena(SHAPE, NUM_ROWS, dtype=torch.float32, device=CPU, home=home)
    assert asked == [3 * 2 * 32 * 4 * NUM_ROWS] * 2


def test_emulated_rows_are_read_at_the_pace_of_their_memory() -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype=DType.FP32, block_size=16)
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4, first_cxl_layer=1)
    slow = SlowMemory(latency_s=0.0, bytes_per_s=1e6)
    home = RowHome(layout, slow=SlowTier(slow, spec, layout, CPU))
    start = time.perf_counter()
    with home.copying(KVPart.V, 1, 5000):
        pass
    assert time.perf_counter() - start >= 5e-3
    pace = home.pace(KVPart.V, 1, 5000)
    assert pace is not None
    assert pace(7.0, 7.001) == pytest.approx(7.005)
    assert pace(7.0, 7.5) == pytest.approx(7.5)


def test_emulated_rows_in_dram_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_end: float) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr("ambidex.storage.slow_tier.wait_until", fail)
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype=DType.FP32, block_size=16)
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4, first_cxl_layer=1)
    home = RowHome(layout, slow=SlowTier(SlowMemory(latency_s=1.0, bytes_per_s=1.0), spec, layout, CPU))
    assert home.pace(KVPart.K, 1, 5000) is None
    assert home.pace(KVPart.V, 1, 0) is None
    with home.copying(KVPart.V, 0, 5000):
        pass
