"""Tile order: its definition, element by element, and the native copies against the reference in torch."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.reference import kv_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
PACK = {"k": kv_tiles.pack_k, "v": kv_tiles.pack_v}
UNPACK = {"k": kv_tiles.unpack_k, "v": kv_tiles.unpack_v}


@pytest.fixture(scope="module")
def pool() -> native.AttentionPool:
    return native.AttentionPool(native.ThreadPool(2))


def make_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (64, 80)])
def test_pack_k_every_element_lies_where_the_layout_says(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    rows = make_rows((block_size, head_dim), dtype)
    packed, pack, dim = kv_tiles.pack_k(rows).flatten(), 4 // dtype.itemsize, kv_tiles.padded_dim(head_dim)
    for token in range(block_size):
        for d in range(head_dim):
            line = token // 16 * (dim // pack) + d // pack
            assert packed[(line * 16 + token % 16) * pack + d % pack] == rows[token, d]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (48, 32), (64, 80)])
def test_pack_v_every_element_lies_where_the_layout_says(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    rows = make_rows((block_size, head_dim), dtype)
    packed, pack, dim = kv_tiles.pack_v(rows).flatten(), 4 // dtype.itemsize, kv_tiles.padded_dim(head_dim)
    depth = kv_tiles.value_depth(block_size, dtype.itemsize)
    for token in range(block_size):
        for d in range(head_dim):
            column = token // depth * (dim // 16) + d // 16
            line = column * (depth // pack) + token % depth // pack
            assert packed[(line * 16 + d % 16) * pack + token % pack] == rows[token, d]


@pytest.mark.parametrize(
    ("block_size", "element_size", "depth"),
    [(64, 4, 16), (64, 2, 32), (64, 1, 64), (32, 1, 32), (48, 1, 16), (16, 2, 16), (16, 1, 16), (96, 2, 32)],
)
def test_value_depth_is_a_tile_or_what_divides_the_block(block_size: int, element_size: int, depth: int) -> None:
    assert kv_tiles.value_depth(block_size, element_size) == depth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pack_blocks_equals_the_reference_and_gather_rows_undoes_it(
    pool: native.AttentionPool, dtype: torch.dtype, part: str, block_size: int, head_dim: int
) -> None:
    rows = make_rows((2, 3 * block_size, head_dim), dtype)
    ids = torch.tensor([4, 0, 3])
    tiled = torch.zeros((2, 5, block_size, kv_tiles.padded_dim(head_dim)), dtype=dtype)
    pool.pack_blocks(part, tiled, ids, rows)
    blocks = rows.view(2, 3, block_size, head_dim)
    assert torch.equal(tiled[:, ids], PACK[part](blocks))
    assert torch.equal(UNPACK[part](tiled[:, ids], head_dim), blocks)
    assert not tiled[:, [1, 2]].any()
    first, num = block_size - 3, block_size + 7
    got = pool.gather_rows(part, tiled, ids, first_key=first, num_keys=num, head_dim=head_dim)
    assert torch.equal(got, rows[:, first : first + num])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_rows", [3, 150])
def test_store_rows_writes_its_slots_and_nothing_else(
    pool: native.AttentionPool, dtype: torch.dtype, part: str, block_size: int, num_rows: int
) -> None:
    slots = torch.randperm(12 * block_size, generator=torch.Generator().manual_seed(1))[:num_rows].contiguous()
    before, rows = make_rows((3, 12, block_size, 80), dtype, 1), make_rows((num_rows, 3, 80), dtype, 2)
    tiled = PACK[part](before)
    pool.store_rows(part, tiled, slots, rows)
    expected = before.clone()
    expected.view(3, -1, 80)[:, slots] = rows.transpose(0, 1)
    assert torch.equal(UNPACK[part](tiled, 80), expected)


def test_store_rows_pads_with_zeros_over_garbage(pool: native.AttentionPool) -> None:
    tiled = torch.full((1, 1, 16, 96), torch.nan, dtype=torch.bfloat16)
    pool.store_rows("k", tiled, torch.tensor([5]), torch.ones(1, 1, 80, dtype=torch.bfloat16))
    assert torch.equal(kv_tiles.unpack_k(tiled, 96)[0, 0, 5, 80:], torch.zeros(16, dtype=torch.bfloat16))


def test_store_rows_slot_outside_of_the_pool_is_refused(pool: native.AttentionPool) -> None:
    tiled = torch.zeros(1, 2, 16, 64)
    with pytest.raises(ShapeError, match=r"store_rows: slots: expected 0 to 32 \(not included\), got 32"):
        pool.store_rows("k", tiled, torch.tensor([32]), torch.zeros(1, 1, 64))


def test_store_rows_rows_of_another_dtype_are_refused(pool: native.AttentionPool) -> None:
    with pytest.raises(ShapeError, match=r"rows are torch\.float16, the pool is torch\.bfloat16"):
        pool.store_rows("v", torch.zeros(1, 2, 16, 64).bfloat16(), torch.tensor([0]), torch.zeros(1, 1, 64).half())


@pytest.mark.parametrize("shape", [(1, 2, 24, 64), (1, 2, 16, 80), (1, 2, 16, 96)])
def test_pack_blocks_pool_of_another_shape_is_refused(pool: native.AttentionPool, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"pack_blocks: .*multiple of"):
        pool.pack_blocks("k", torch.zeros(shape), torch.tensor([0]), torch.zeros(1, shape[2], 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (48, 80), (64, 128), (32, 45)])
def test_copy_rows_puts_rows_where_they_are_wanted_and_nothing_beside_them(
    pool: native.AttentionPool, dtype: torch.dtype, part: str, block_size: int, head_dim: int
) -> None:
    rows = make_rows((2, 5 * block_size, head_dim), dtype)
    tiled = PACK[part](rows.view(2, 5, block_size, head_dim))
    ids, places = torch.tensor([4, 0, 3, 1]), torch.tensor([3 - block_size, 3, 2 * block_size + 5, 3 * block_size + 5])
    before = make_rows((2, 4 * block_size, head_dim), dtype, 1)
    memory = torch.cat((before, before), 1)  # heads further apart than their rows
    to, num = memory[:, : 3 * block_size + 9], 3 * block_size + 9
    pool.copy_rows(part, tiled, ids, places, to)
    wanted = before.clone()
    for block_id, place in zip(ids.tolist(), places.tolist(), strict=True):
        for token in range(block_size):
            if 0 <= place + token < num:
                wanted[:, place + token] = rows[:, block_id * block_size + token]
    assert torch.equal(memory[:, : 4 * block_size], wanted)
    assert torch.equal(memory[:, 4 * block_size :], before)


def test_copy_rows_to_rows_that_do_not_lie_side_by_side_are_refused(pool: native.AttentionPool) -> None:
    places, ids = torch.tensor([0]), torch.tensor([1])
    tiled = torch.zeros(1, 2, 16, 64)
    with pytest.raises(ShapeError, match="rows: expected those of a head side by side"):
        pool.copy_rows("k", tiled, ids, places, torch.zeros(1, 16, 128)[..., :64])
    with pytest.raises(ShapeError, match="rows: expected those of a head side by side"):
        pool.copy_rows(
            "k", tiled.expand(2, -1, -1, -1).contiguous(), ids, places, torch.zeros(1, 16, 64).expand(2, -1, -1)
        )
    with pytest.raises(ShapeError, match=r"rows are torch\.float16, the pool is torch\.float32"):
        pool.copy_rows("k", tiled, ids, places, torch.zeros(1, 16, 64).half())
    with pytest.raises(ShapeError, match=r"block_ids: expected 0 to 2 \(not included\), got 2"):
        pool.copy_rows("k", tiled, torch.tensor([2]), places, torch.zeros(1, 16, 64))


def test_gather_rows_outside_of_the_blocks_are_refused(pool: native.AttentionPool) -> None:
    with pytest.raises(ShapeError, match="do not lie in 1 blocks of 16"):
        pool.gather_rows("k", torch.zeros(1, 2, 16, 64), torch.tensor([1]), first_key=10, num_keys=7, head_dim=64)
