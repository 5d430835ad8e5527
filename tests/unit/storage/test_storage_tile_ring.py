"""`TileRing` and `TileWriter`: pieces arrive whole and in order, rows go to their slots."""

import pytest
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec, StreamBuffers
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.tile_ring import BlockList, TileRing
from ambidex.storage.tile_writer import make_jobs
from ambidex.storage.tiled_pool import TiledKVPool

DEVICES = [
    ("cpu", False),
    pytest.param("cuda", True, marks=pytest.mark.gpu),
    pytest.param("cuda", False, marks=pytest.mark.gpu),
]
"""(device, whether the pool is pinned)."""
LISTS = [(4, 5, 6), (0,), (7, 2, 9), (3, 4), (8, 1), (2, 3, 4), (5, 9)]


def make_pool(dtype: DType, *, pinned: bool, head_dim: int = 40) -> TiledKVPool:
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=head_dim, dtype=dtype, block_size=16, order=KVOrder.TILES)
    pool = TiledKVPool(spec, Tier.DRAM, 10, native=AttentionPool(ThreadPool(1)), pinned=pinned)
    for part in pool.tensors:
        part.copy_(torch.randint(-127, 128, part.shape).to(part.dtype))
    return pool


def make_ring(pool: TiledKVPool, device: str, *, least_run_bytes: int = 1 << 16) -> TileRing:
    sizes = StreamBuffers(kv=pool.spec, piece_blocks=3, number_bytes=2)
    return TileRing(pool, sizes, torch.device(device), least_run_bytes=least_run_bytes)


def make_list(ids: tuple[int, ...], device: str) -> BlockList:
    return BlockList(ids, torch.tensor(ids, device=device))


@pytest.mark.parametrize(("device", "pinned"), DEVICES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32, DType.INT8])
@pytest.mark.parametrize("least_run_bytes", [0, 1 << 40], ids=["copies", "threads"])
def test_pieces_arrive_as_they_lie_in_the_pool(least_run_bytes: int, dtype: DType, device: str, pinned: bool) -> None:
    pool = make_pool(dtype, pinned=pinned)
    assert pool.is_pinned == pinned
    ring = make_ring(pool, device, least_run_bytes=least_run_bytes)
    for _ in range(2):  # the second time from where the first one stopped half way
        pieces = [(layer_idx, make_list(ids, device)) for layer_idx in range(2) for ids in LISTS]
        ring.start(pieces)
        for layer_idx, blocks in pieces[:-3]:
            got = [part.clone() for part in ring.take()]
            ring.free()
            for part, arrived in zip(pool.layer_tensors(layer_idx), got, strict=True):
                assert torch.equal(arrived.cpu(), part[:, list(blocks.ids)])


@pytest.mark.gpu
def test_a_buffer_is_not_written_before_its_last_reader_is_done() -> None:
    pool = make_pool(DType.BF16, pinned=True)
    ring = make_ring(pool, "cuda")
    pieces = [(0, make_list(ids, "cuda")) for ids in LISTS]
    ring.start(pieces)
    torch.cuda.synchronize()
    got = []
    for _ in pieces:
        tensors = ring.take()
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which a copy that does not wait would write
        got.append(tensors[0].clone())
        ring.free()
    for (_, blocks), arrived in zip(pieces, got, strict=True):
        assert torch.equal(arrived.cpu(), pool.k[0][:, list(blocks.ids)])


def test_a_piece_too_many_is_refused() -> None:
    ring = make_ring(make_pool(DType.BF16, pinned=False), "cpu")
    ring.start([(0, make_list((1,), "cpu"))])
    ring.take()
    ring.free()
    with pytest.raises(InternalError, match="piece 1 of 1 is taken before it was sent"):
        ring.take()


@pytest.mark.parametrize(
    ("ids", "runs"),
    [((5,), [(0, 1)]), ((3, 4, 5), [(0, 3)]), ((3, 4, 7, 6, 8, 9), [(0, 2), (2, 3), (3, 4), (4, 6)])],
)
def test_runs_are_consecutive_ids(ids: tuple[int, ...], runs: list[tuple[int, int]]) -> None:
    assert make_list(ids, "cpu").runs == tuple(slice(*run) for run in runs)


def test_jobs_name_the_new_tokens_of_each_block() -> None:
    gpu, dram = ([BlockRef(tier, BlockId(i)) for i in range(9)] for tier in (Tier.GPU, Tier.DRAM))
    pool = make_pool(DType.BF16, pinned=False)
    requests = [
        scheduled(start=10, num_tokens=30, blocks=(dram[4], dram[2], gpu[1])),  # 10 … 39
        scheduled(start=16, num_tokens=1, blocks=(dram[3], gpu[0])),
        scheduled(start=5, num_tokens=3, blocks=(dram[6],)),
    ]
    assert make_jobs(requests, pool) == [(-10, 4, 10, 16), (6, 2, 0, 16), (31 - 5, 6, 5, 8)]


def scheduled(*, start: int, num_tokens: int, blocks: tuple[BlockRef, ...]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=RequestId("r"), token_ids=(0,) * num_tokens, start=start, blocks=blocks, is_sampled=False
    )
