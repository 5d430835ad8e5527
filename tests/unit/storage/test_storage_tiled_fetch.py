"""Rows of a pool in tile order that the accelerator fetches are those that the host reads."""

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.tiled_pool import TiledKVPool

NUM_BLOCKS, BLOCK_IDS = 7, [5, 0, 3]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("part", list(KVPart))
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT8, DType.INT4])
def test_fetched_rows_are_those_that_the_host_reads(dtype: DType, head_dim: int, part: KVPart, device: str) -> None:
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=head_dim, dtype=dtype, block_size=32, order=KVOrder.TILES)
    pool = TiledKVPool(spec, Tier.DRAM, NUM_BLOCKS, native=AttentionPool(ThreadPool(1)), pinned=device == "cuda")
    rows = torch.randn(2, NUM_BLOCKS * 32, 3, head_dim)
    pool.store(1, torch.arange(NUM_BLOCKS * 32), *rows)
    ids = torch.tensor(BLOCK_IDS)
    wanted = pool.read_rows(part, 1, ids, num_keys=70, dtype=torch.float32)
    got = pool.fetch_rows(part, 1, ids.to(device), num_keys=70, dtype=torch.float32)
    assert got.device.type == device
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0)
    places = torch.cat([torch.arange(block * 32, block * 32 + 32) for block in BLOCK_IDS])[:70]
    kept = pool.round(part, rows[int(part is KVPart.V), places]).transpose(0, 1)
    torch.testing.assert_close(got.cpu(), kept, rtol=0, atol=0)


def test_the_host_reads_what_no_device_reaches() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype=DType.BF16, block_size=16, order=KVOrder.TILES)
    pool = TiledKVPool(spec, Tier.DRAM, 2, native=AttentionPool(ThreadPool(1)), pinned=False)
    assert pool.is_read_by(torch.device("cpu"))
    assert not pool.is_read_by(torch.device("cuda"))
