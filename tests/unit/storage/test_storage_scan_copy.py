"""`ScanCopy`: what bounded attention reads beside a pool is true of a block from when it was made until it is written
(or forgotten)."""

import numpy as np
import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVOrder, KVSpec, scan_bytes_per_block
from ambidex.kernels import api
from ambidex.kernels.cpu.bounded import BoundedPool
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.kernels.reference import kv_tiles
from ambidex.storage.scan_copy import ScanCopy
from ambidex.storage.tiled_pool import TiledKVPool

THREADS = ThreadPool(1)
LAYERS, HEADS, BLOCK, DIM = 2, 3, 16, 40


def make_pool(dtype: DType) -> TiledKVPool:
    spec = KVSpec(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype, block_size=BLOCK, order=KVOrder.TILES
    )
    return TiledKVPool(spec, Tier.DRAM, 5, native=AttentionPool(THREADS), pinned=False)


def random_block(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn((LAYERS, HEADS, BLOCK, DIM), generator=generator) for _ in range(2))
    return k, v


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_copy_is_k_in_8_bits_and_k_and_v_row_by_row(dtype: DType) -> None:
    pool = make_pool(dtype)
    copy = ScanCopy(pool, BoundedPool(THREADS))
    pool.write_block(3, *random_block(1))
    copy.make([3])
    k, v = pool.read_block(3)  # as the pool keeps them
    for layer_idx in range(LAYERS):
        layer = copy.layer(layer_idx)
        numbers, scales = api.quantize_rows(k[layer_idx].float())
        assert torch.equal(kv_tiles.unpack_k(layer.scanned[:, 3], DIM), numbers)
        assert torch.equal(layer.scales[:, 3], scales)
        assert layer.rows is not None
        for rows, part in zip(layer.rows[:, 3].chunk(2, -1), (k, v), strict=True):
            assert torch.equal(rows[..., :DIM], part[layer_idx])
            assert not rows[..., DIM:].any()
        k_norms = (numbers.double() * scales.double()[..., None]).norm(dim=-1).amax(-1)
        v_norms = v[layer_idx].double().norm(dim=-1).amax(-1)
        assert torch.allclose(layer.norms[:, 3].double(), torch.stack((k_norms, v_norms), 1), rtol=1e-5)
        assert (layer.norms[:, 3].double() >= torch.stack((k_norms, v_norms), 1)).all()


def test_int8_is_scanned_where_it_lies() -> None:
    pool = make_pool(DType.INT8)
    copy = ScanCopy(pool, BoundedPool(THREADS))
    pool.write_block(2, *random_block(2))
    copy.make([2])
    layer = copy.layer(1)
    assert layer.rows is None
    assert layer.scanned.data_ptr() == pool.layer(1)[0].data_ptr()
    _, v = pool.read_block(2)
    assert torch.allclose(layer.norms[:, 2, 1], v[1].norm(dim=-1).amax(-1), rtol=1e-5)


def test_a_block_is_missing_until_it_is_made_and_again_after_it_was_written() -> None:
    pool = make_pool(DType.FP32)
    copy = ScanCopy(pool, BoundedPool(THREADS))
    ids = np.array([0, 2, 4])
    assert list(copy.find_missing(ids)) == [0, 2, 4]
    for block_id in (0, 2, 4):
        pool.write_block(block_id, *random_block(block_id))
    copy.make([0, 2, 4])
    assert list(copy.find_missing(ids)) == []
    copy.forget([2])
    assert list(copy.find_missing(ids)) == [2]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT8])
def test_bytes_are_those_of_its_tensors(dtype: DType) -> None:
    pool = make_pool(dtype)
    copy = ScanCopy(pool, BoundedPool(THREADS))
    size = 0
    for layer_idx in range(LAYERS):
        layer = copy.layer(layer_idx)
        own = [layer.norms, *((layer.scanned, layer.scales, layer.rows) if layer.rows is not None else ())]
        size += sum(part.numel() * part.element_size() for part in own if part is not None)
    assert copy.num_bytes == size == 5 * scan_bytes_per_block(pool.spec)
