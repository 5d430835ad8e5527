"""Rows of a pool one by one, and the first rows of blocks, in every order and format."""

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool

NUM_BLOCKS, NUM_HEADS, HEAD_DIM = 5, 3, 20
CASES = [
    *((KVOrder.ROWS, dtype, 7) for dtype in (DType.FP32, DType.BF16)),
    *((KVOrder.TILES, dtype, size) for dtype in (DType.FP32, DType.BF16, DType.FP16, DType.INT8) for size in (16, 48)),
]


def make_full_pool(order: KVOrder, dtype: DType, block_size: int) -> KVPool:
    """A pool whose every row is random."""
    spec = KVSpec(
        num_layers=2, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=dtype, block_size=block_size, order=order
    )
    pool: KVPool
    if order is KVOrder.TILES:
        pool = TiledKVPool(spec, Tier.DRAM, NUM_BLOCKS, native=AttentionPool(ThreadPool(1)), pinned=False)
    else:
        pool = RowKVPool(spec, Tier.DRAM, NUM_BLOCKS, device=torch.device("cpu"), pinned=False)
    generator = torch.Generator().manual_seed(block_size)
    for block_id in range(NUM_BLOCKS):
        rows = torch.randn(2, 2, NUM_HEADS, block_size, HEAD_DIM, generator=generator)
        pool.write_block(block_id, rows[0], rows[1])
    return pool


@pytest.mark.parametrize(("order", "dtype", "block_size"), CASES)
@pytest.mark.parametrize("part", KVPart)
def test_rows_of_a_pool_are_those_of_its_blocks(order: KVOrder, dtype: DType, block_size: int, part: KVPart) -> None:
    pool = make_full_pool(order, dtype, block_size)
    block_ids = torch.tensor([3, 0, 4])
    blocks = [pool.read_block(int(block_id))[part is KVPart.V][1].float() for block_id in block_ids]  # [Hkv, P, D]
    whole = torch.cat(blocks, dim=1)
    num_keys = 2 * block_size + 3
    found = pool.read_rows(part, 1, block_ids, num_keys=num_keys, dtype=torch.float32)
    assert torch.equal(found, whole[:, :num_keys])
    places = torch.tensor([0, 1, block_size - 1, block_size, 2 * block_size + 2])
    slots = block_ids[places // block_size] * block_size + places % block_size
    heads = torch.tensor([2, 0, 1, 1, 2])
    taken = pool.take_rows(part, 1, heads, slots, torch.float32)
    assert torch.equal(taken, whole[heads, places])
