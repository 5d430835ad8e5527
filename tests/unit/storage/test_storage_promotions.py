"""Copies of blocks beside a step: what arrives, and what fails."""

from dataclasses import replace

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import CopyError
from ambidex.core.ids import BlockId, MoveId, Tier
from ambidex.core.kv_dtypes import parse_kv_dtypes
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.copy import MoveOutcome
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.promotions import Promotions, TileCopy
from ambidex.storage.tiled_pool import TiledKVPool
from unit_specs import make_spec

NUM_BLOCKS, SIZE, HEAD_DIM = 6, 32, 48


def make_pools(device: str, dram_dtype: str, near: DType) -> dict[Tier, KVPool]:
    """Every block of DRAM holds other numbers."""
    spec = replace(make_spec(windows=(None,) * 3, num_q_heads=4, num_kv_heads=2), head_dim=HEAD_DIM)
    kinds = parse_kv_dtypes(dram_dtype)
    assert kinds is not None
    dram = TiledKVPool(
        KVSpec.of(spec, dtype=kinds, block_size=SIZE, order=KVOrder.TILES), Tier.DRAM, NUM_BLOCKS,
        native=AttentionPool(ThreadPool(1)), pinned=device == "cuda",
    )  # fmt: skip
    gpu = RowKVPool(
        KVSpec.of(spec, dtype=near, block_size=SIZE), Tier.GPU, NUM_BLOCKS, device=torch.device(device), pinned=False
    )
    generator = torch.Generator().manual_seed(1)
    for block_id in range(NUM_BLOCKS):
        rows = torch.randn(2, 3, 2, SIZE, HEAD_DIM, generator=generator)
        dram.write_block(block_id, rows[0], rows[1])
    for part in gpu.tensors:
        part.fill_(torch.nan)
    return {Tier.GPU: gpu, Tier.DRAM: dram}


def move(number: int, source: int, target: int) -> BlockMove:
    return BlockMove(
        move_id=MoveId(number), source=BlockRef(Tier.DRAM, BlockId(source)), target=BlockRef(Tier.GPU, BlockId(target)),
        keeps_source=True,
    )  # fmt: skip


def check_block(pools: dict[Tier, KVPool], source: int, target: int) -> None:
    for wanted, found in zip(pools[Tier.DRAM].read_block(source), pools[Tier.GPU].read_block(target), strict=True):
        torch.testing.assert_close(found.cpu().float(), wanted.to(found.dtype).float(), rtol=1e-2, atol=1e-2)


def test_blocks_arrive_when_they_are_finished_and_each_move_is_told_once() -> None:
    pools = make_pools("cpu", "fp32", DType.FP32)
    promotions = Promotions(pools)
    promotions.begin([move(0, 4, 1), move(1, 2, 5)])
    assert promotions.finish() == MoveOutcome(finished=(MoveId(0), MoveId(1)), failed=())
    check_block(pools, 4, 1)
    check_block(pools, 2, 5)
    assert promotions.finish() == MoveOutcome(finished=(), failed=())
    assert pools[Tier.GPU].k[:, :, 0].isnan().all(), "another block was written"


def test_a_copy_that_fails_is_told_and_the_others_arrive(caplog: pytest.LogCaptureFixture) -> None:
    pools = make_pools("cpu", "fp32", DType.FP32)
    promotions = Promotions(pools)
    promotions.begin([move(0, NUM_BLOCKS, 1), move(1, 2, 5)])
    assert promotions.finish() == MoveOutcome(finished=(MoveId(1),), failed=(MoveId(0),))
    check_block(pools, 2, 5)
    assert "block 6 of dram was not copied to the accelerator" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "int8", "k=int8,v=int4"])
def test_the_gpu_lays_out_blocks_as_they_come_over_the_link(dtype: str) -> None:
    pools = make_pools("cuda", dtype, DType.BF16)
    gpu, dram = pools[Tier.GPU], pools[Tier.DRAM]
    assert isinstance(dram, TiledKVPool)
    copy = TileCopy(dram, gpu)
    promotions = Promotions(pools, copy=copy)
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        busy = busy @ busy.clamp(-1e-3, 1e-3)
    promotions.begin([move(number, number, NUM_BLOCKS - 1 - number) for number in range(NUM_BLOCKS)])
    assert len(promotions.finish().finished) == NUM_BLOCKS
    for number in range(NUM_BLOCKS):
        check_block(pools, number, NUM_BLOCKS - 1 - number)
    with pytest.raises(CopyError, match="not brought to tier dram in this way"):
        copy(gpu, 0, dram, 0)
