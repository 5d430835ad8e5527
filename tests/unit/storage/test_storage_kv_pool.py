"""`KVPool`: shapes, bytes, pinning and running out of memory."""

from pathlib import Path

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import TierFullError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.kv_pool import RowKVPool
from ambidex.storage.pinned import register_pinned

CPU = torch.device("cpu")


def make_kv_spec(*, num_layers: int = 3, dtype: DType = DType.BF16) -> KVSpec:
    return KVSpec(num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=dtype, block_size=4)


def test_kv_pool_has_the_layout_of_its_spec() -> None:
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=False)
    assert pool.k.shape == pool.v.shape == (3, 2, 5, 4, 8)
    assert pool.k.dtype == pool.v.dtype == torch.bfloat16
    assert pool.num_bytes == pool.k.nbytes + pool.v.nbytes


def test_kv_pool_layer_is_a_view() -> None:
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=False)
    k, v = pool.layer(1)
    k.fill_(1.0)
    v.fill_(2.0)
    assert torch.equal(pool.k[1], torch.ones_like(k))
    assert torch.equal(pool.v[1], torch.full_like(v, 2.0))


def test_kv_pool_of_zero_blocks_is_legal() -> None:
    pool = RowKVPool(make_kv_spec(), Tier.GPU, 0, device=CPU, pinned=False)
    assert pool.num_bytes == 0
    assert pool.layer(2)[0].shape == (2, 0, 4, 8)


def test_kv_pool_when_memory_is_short_raises() -> None:
    with pytest.raises(TierFullError, match=r"tier dram: no .* for 4611686018427 KV blocks on cpu"):
        RowKVPool(make_kv_spec(), Tier.DRAM, 2**62 // 10**6, device=CPU, pinned=False)


def test_kv_pool_when_pinning_fails_goes_on_and_counts() -> None:
    refusing = HostMemory(pin=lambda _tensor, _owner: "no")
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=True, memory=refusing)
    assert not pool.is_pinned
    assert pool.pin_refusals == ("no", "no")


def test_kv_pool_when_pinning_works_is_pinned() -> None:
    seen: list[int] = []
    memory = HostMemory(pin=lambda tensor, _owner: seen.append(tensor.nbytes))
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=True, memory=memory)
    assert pool.is_pinned
    assert pool.pin_refusals == ()
    assert sum(seen) == pool.num_bytes


def test_kv_pool_not_asked_to_pin_is_not_pinned() -> None:
    refusing = HostMemory(pin=lambda _tensor, _owner: "no")
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=False, memory=refusing)
    assert not pool.is_pinned
    assert pool.pin_refusals == ()


@pytest.mark.gpu
def test_kv_pool_pinned_for_cuda_is_pinned_and_pins_again_after_release() -> None:
    for _ in range(2):
        pool = RowKVPool(make_kv_spec(), Tier.DRAM, 100, device=CPU, pinned=True)
        assert pool.is_pinned
        assert pool.k.is_pinned()
        del pool


@pytest.mark.gpu
def test_kv_pool_when_the_driver_refuses_to_pin_leaves_cuda_usable() -> None:
    pool = RowKVPool(make_kv_spec(), Tier.DRAM, 100, device=CPU, pinned=True)
    assert "already" in (register_pinned(pool.k, pool) or "")
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_huge_pages_are_advised_for_host_memory_that_has_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = torch.empty(2**22, dtype=torch.uint8), torch.empty(2**20, dtype=torch.uint8)
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    assert advise_huge_pages(large, setting=setting) is None
    assert advise_huge_pages(large, setting=tmp_path / "missing") is None
    setting.write_text("always madvise [never]\n")
    assert "says never" in (advise_huge_pages(large, setting=setting) or "")
    assert advise_huge_pages(small, setting=setting) is None
    monkeypatch.setattr("ambidex.storage.huge_pages._ADVISE_HUGE", 9999)  # no such advice
    assert "the system refuses: Invalid argument" in (advise_huge_pages(large, setting=tmp_path / "missing") or "")


def test_kv_pool_says_why_it_has_no_huge_pages_in_host_memory() -> None:
    refusing = HostMemory(advise=lambda _tensor: "no")
    assert RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=False, memory=refusing).page_refusal == "no"
    assert RowKVPool(make_kv_spec(), Tier.DRAM, 5, device=CPU, pinned=False).page_refusal is None
