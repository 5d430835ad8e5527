import time

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_mapping import HostLayout, KVMapping, SlowMemory
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_pool import RowKVPool
from ambidex.storage.slow_tier import SlowTier, wait_until

SPEC = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype=DType.FP32, block_size=4)
ROW = 8 * 4
CPU = torch.device("cpu")
SLOW = SlowMemory(latency_s=1e-3, bytes_per_s=1e6)


def make_tier(mapping: KVMapping = KVMapping.K_DRAM_V_CXL, **layout: int) -> SlowTier:
    return SlowTier(SLOW, SPEC, HostLayout(mapping=mapping, num_near=10, **layout), CPU)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_rows_of_v_are_slow_and_rows_of_k_are_not() -> None:
    tier = make_tier()
    assert tier.bytes_of_rows(KVPart.V, 0, ids(0, 9), 12) == 2 * 12 * ROW
    assert tier.bytes_of_rows(KVPart.K, 0, ids(0, 9), 12) == 0


def test_rows_of_spilled_blocks_are_slow_in_both_parts() -> None:
    tier = make_tier(num_spilled=2)
    assert tier.bytes_of_rows(KVPart.K, 0, ids(9, 10, 11), 12) == 2 * 12 * ROW
    assert tier.bytes_of_rows(KVPart.V, 0, ids(9, 10, 11), 12) == 3 * 12 * ROW


def test_v_of_layers_in_dram_is_not_slow() -> None:
    tier = make_tier(first_cxl_layer=1)
    assert [tier.bytes_of_rows(KVPart.V, layer, ids(0), 1) for layer in range(2)] == [0, ROW]


def test_half_of_interleaved_rows_is_slow() -> None:
    tier = make_tier(KVMapping.INTERLEAVE)
    assert [tier.bytes_of_rows(part, 0, ids(0, 1), 1) for part in KVPart] == [ROW, ROW]


def test_blocks_count_their_slow_rows_of_all_layers() -> None:
    part_bytes = 2 * 3 * 4 * ROW
    assert make_tier(num_spilled=1).bytes_of_block(0) == part_bytes
    assert make_tier(num_spilled=1).bytes_of_block(10) == 2 * part_bytes
    assert make_tier(first_cxl_layer=1).bytes_of_block(0) == part_bytes / 2
    assert make_tier(KVMapping.INTERLEAVE).bytes_of_block(0) == part_bytes
    assert make_tier().bytes_of_blocks(1, [0, 3]) == part_bytes


def test_reading_ends_no_sooner_than_the_slow_memory_gives_its_bytes() -> None:
    start = time.perf_counter()
    with make_tier().reading(4000, 4000):
        pass
    assert time.perf_counter() - start >= 5e-3


def test_reading_that_took_longer_by_itself_is_not_held_up() -> None:
    took = []
    with make_tier().reading(1, 1):
        end = time.perf_counter() + 5e-3
        wait_until(end)
        took.append(end)
    assert took == [end]


def test_fast_share_of_a_reading_adds_to_the_slow_one() -> None:
    start = time.perf_counter()
    with make_tier().reading(2000, 4000):  # 3 ms of slow memory, and half of what follows
        wait_until(start + 4e-3)
    assert time.perf_counter() - start >= 4e-3 * 0.5 + 3e-3


def test_fast_bytes_alone_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_end: float) -> None:
        raise AssertionError("waited")

    monkeypatch.setattr("ambidex.storage.slow_tier.wait_until", fail)
    with make_tier().reading(0, 4000):
        pass
    with pytest.raises(AssertionError), make_tier().reading(1, 4000):
        pass


def test_pool_without_a_slow_part_reads_as_it_is() -> None:
    pool = RowKVPool(SPEC, Tier.DRAM, 2, device=CPU, pinned=False, memory=HostMemory(advise=lambda _: None))
    with pool.reading(KVPart.V, 0, ids(0, 1), rows_per_block=1):
        pass
    assert pool.slow is None


def test_pool_with_a_slow_part_waits_for_its_rows() -> None:
    pool = RowKVPool(
        SPEC, Tier.DRAM, 10, device=CPU, pinned=False, memory=HostMemory(advise=lambda _: None), slow=make_tier()
    )
    start = time.perf_counter()
    with pool.reading(KVPart.V, 0, ids(0, 1), rows_per_block=1):
        pass
    assert time.perf_counter() - start >= SLOW.seconds(2 * ROW)


@pytest.mark.gpu
def test_stream_is_held_for_as_long_as_the_slow_memory_takes_longer() -> None:
    device = torch.device("cuda")
    slow = SlowMemory(latency_s=0.0, bytes_per_s=1e9)
    tier = SlowTier(slow, SPEC, HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=10), device)
    assert tier._stream_delay is not None
    wanted = slow.seconds(5e7) - 5e7 / tier._stream_delay.copied_bytes_per_s
    assert wanted > 0.02
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    tier.delay_stream(5e7)
    events[1].record()
    events[1].synchronize()
    assert wanted * 0.8 < events[0].elapsed_time(events[1]) / 1e3 < wanted * 1.5
