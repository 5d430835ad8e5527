"""`CopyEngine`: moves arrive whole, and one that fails harms no other."""

import logging
from dataclasses import replace

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import CopyError
from ambidex.core.ids import BlockId, KVPart, MoveId, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.copy import CopyEngine, MoveOutcome, copy_block
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.FP32, block_size=4)


def make_pools(device: str = "cpu", *, pinned: bool = False) -> dict[Tier, KVPool]:
    pools = {
        Tier.GPU: RowKVPool(SPEC, Tier.GPU, 4, device=torch.device(device), pinned=False),
        Tier.DRAM: RowKVPool(SPEC, Tier.DRAM, 6, device=torch.device("cpu"), pinned=pinned),
    }
    for pool in pools.values():
        pool.k.normal_()
        pool.v.normal_()
    return pools


def move(move_id: int, source: tuple[Tier, int], target: tuple[Tier, int]) -> BlockMove:
    return BlockMove(
        move_id=MoveId(move_id),
        source=BlockRef(source[0], BlockId(source[1])),
        target=BlockRef(target[0], BlockId(target[1])),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_run_copies_k_and_v_of_all_layers_both_ways_and_nothing_else(device: str) -> None:
    pools = make_pools(device, pinned=device == "cuda")
    before = {tier: (pool.k.cpu().clone(), pool.v.cpu().clone()) for tier, pool in pools.items()}
    outcome = CopyEngine(pools).run(
        [
            move(7, (Tier.GPU, 1), (Tier.DRAM, 5)),
            move(8, (Tier.DRAM, 0), (Tier.GPU, 3)),
            move(9, (Tier.GPU, 0), (Tier.GPU, 2)),
        ]
    )
    assert outcome == MoveOutcome(finished=(MoveId(7), MoveId(8), MoveId(9)), failed=())
    for gpu, dram in zip(before[Tier.GPU], before[Tier.DRAM], strict=True):
        dram[:, :, 5] = gpu[:, :, 1]
        gpu[:, :, 3] = dram[:, :, 0]
        gpu[:, :, 2] = gpu[:, :, 0]
    for tier, (k, v) in before.items():
        assert torch.equal(pools[tier].k.cpu(), k)
        assert torch.equal(pools[tier].v.cpu(), v)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), *(pytest.param("cuda", pinned, marks=pytest.mark.gpu)
                                                                   for pinned in (True, False))])  # fmt: skip
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT8, DType.INT4])
def test_run_lays_blocks_out_in_tiles_on_their_way_to_dram(dtype: DType, device: str, pinned: bool) -> None:
    rows = DType.BF16 if dtype.has_scales else dtype
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=40, dtype=rows, block_size=32)
    gpu = RowKVPool(spec, Tier.GPU, 4, device=torch.device(device), pinned=False)
    tiles = replace(spec, dtype=dtype, order=KVOrder.TILES)
    dram = TiledKVPool(tiles, Tier.DRAM, 5, native=AttentionPool(ThreadPool(1)), pinned=pinned)
    for part in (gpu.k, gpu.v):
        part.normal_()
    before = [part.fill_(3).clone() for part in dram.tensors]
    outcome = CopyEngine({Tier.GPU: gpu, Tier.DRAM: dram}).run(
        [move(1, (Tier.GPU, 3), (Tier.DRAM, 0)), move(2, (Tier.GPU, 0), (Tier.DRAM, 4))]
    )
    assert outcome.finished == (MoveId(1), MoveId(2))
    for source_id, target_id in ((3, 0), (0, 4)):
        for name, got, part in zip(KVPart, dram.read_block(target_id), (gpu.k, gpu.v), strict=True):
            wanted = dram.round(name, part[:, :, source_id].cpu().float()).to(got.dtype)
            # Torch on CUDA divides by a number by multiplying: a tie may be rounded to the other side, a scale away;
            # in int4 that may be a step of a group, up to 17 of them.
            atol = (
                (0.05 if dtype is DType.INT8 else 0.9) if dtype.has_scales and device == "cuda" and not pinned else 0.0
            )
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=atol)
    for part, old in zip(dram.tensors, before, strict=True):
        assert torch.equal(part[:, :, 1:4], old[:, :, 1:4])


@pytest.mark.gpu
def test_run_on_cuda_waits_for_what_the_compute_stream_was_given() -> None:
    pools = make_pools("cuda", pinned=True)
    gpu = pools[Tier.GPU]
    torch.cuda._sleep(50_000_000)  # some 25 ms of work before the block is written
    gpu.k[:, :, 1] = 3.0
    CopyEngine(pools).run([move(0, (Tier.GPU, 1), (Tier.DRAM, 2))])
    assert (pools[Tier.DRAM].k[:, :, 2] == 3.0).all()


def test_run_when_one_copy_fails_reports_it_and_does_the_others(caplog: pytest.LogCaptureFixture) -> None:
    pools = make_pools()

    def copy(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        if source_id == 1:
            raise CopyError("the link is down")
        copy_block(source, source_id, target, target_id)

    moves = [move(source_id, (Tier.GPU, source_id), (Tier.DRAM, source_id)) for source_id in range(3)]
    with caplog.at_level(logging.WARNING):
        outcome = CopyEngine(pools, copy=copy).run(moves)
    assert outcome == MoveOutcome(finished=(MoveId(0), MoveId(2)), failed=(MoveId(1),))
    assert torch.equal(pools[Tier.DRAM].k[:, :, 2], pools[Tier.GPU].k[:, :, 2])
    assert "move 1 of block 1 from gpu to dram failed: the link is down" in caplog.text


@pytest.mark.parametrize(
    ("source", "target"),
    [((Tier.GPU, 9), (Tier.DRAM, 0)), ((Tier.GPU, 0), (Tier.DRAM, 6)), ((Tier.GPU, 0), (Tier.CXL, 0))],
)
def test_run_with_a_block_that_does_not_exist_fails_that_move(
    source: tuple[Tier, int], target: tuple[Tier, int]
) -> None:
    outcome = CopyEngine(make_pools()).run([move(3, source, target)])
    assert outcome == MoveOutcome(finished=(), failed=(MoveId(3),))


def test_run_without_moves_does_nothing() -> None:
    assert CopyEngine(make_pools()).run([]) == MoveOutcome(finished=(), failed=())
