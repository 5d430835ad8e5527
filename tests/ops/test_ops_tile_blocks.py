"""Blocks between a pool in host memory and an accelerator: rows into tiles, tiles into rows, scattered blocks."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch, tiles
from ambidex.kernels.reference import int4, kv_tiles
from triton_device import HAS_INTERPRETER

NAMES = [
    ("cpu", "reference"),
    pytest.param("cpu", "triton", marks=pytest.mark.skipif(not HAS_INTERPRETER, reason="triton is not interpreted")),
    pytest.param("cuda", "triton", marks=pytest.mark.gpu),
]
"""(device, implementation)."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
SHAPES = [
    (16, 64),
    (64, 80),
    (32, 20),
    pytest.param(64, 128, marks=pytest.mark.gpu),
    pytest.param(64, 256, marks=pytest.mark.gpu),
]
"""(block size, head_dim): depth of a tile of V as its format's and less, padded rows, several tiles a row."""


def host(tensor: Tensor, device: str) -> Tensor:
    """The tensor as a pool in host memory that `device` can follow."""
    return tensor.pin_memory() if device == "cuda" else tensor


def make_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("device", "name"), NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), SHAPES)
def test_unpack_blocks_gives_the_rows_that_were_packed(
    block_size: int, head_dim: int, dtype: torch.dtype, device: str, name: str
) -> None:
    k, v = (make_rows((2, 3, block_size, head_dim), dtype, seed) for seed in (1, 2))
    out_dtype = torch.float32 if dtype is torch.int8 else dtype
    scales = [torch.rand(2, 3, block_size) if dtype is torch.int8 else None for _ in range(2)]
    outs = [torch.full((2, 3 * block_size, head_dim), torch.nan, dtype=out_dtype, device=device) for _ in range(2)]
    with dispatch.override("unpack_blocks", name):
        tiles.unpack_blocks(
            kv_tiles.pack_k(k).to(device), kv_tiles.pack_v(v).to(device), *outs,
            k_scales=None if scales[0] is None else scales[0].to(device),
            v_scales=None if scales[1] is None else scales[1].to(device),
        )  # fmt: skip
    for rows, scale, out in zip((k, v), scales, outs, strict=True):
        wanted = rows.to(out_dtype) if scale is None else rows * scale[..., None]
        assert torch.equal(out.cpu(), wanted.flatten(1, 2))


@pytest.mark.parametrize(("device", "name"), NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), SHAPES)
def test_pack_blocks_writes_its_tokens_and_nothing_else(
    block_size: int, head_dim: int, dtype: torch.dtype, device: str, name: str
) -> None:
    """Rows as a step has them, [T, Hkv, D] of one matrix, for two layers."""
    generator = torch.Generator().manual_seed(3)
    source = torch.float32 if dtype is torch.int8 else dtype
    fused = torch.randn(2, 3 * block_size, 3 * 2, head_dim, generator=generator).to(source).to(device)
    k, v = fused[:, :, :2].transpose(1, 2), fused[:, :, 4:].transpose(1, 2)  # [L, Hkv, T, D]
    before = [make_rows((2, 2, 5, block_size, head_dim), dtype, seed) for seed in (1, 2)]
    pools = [host(pack(rows), device) for pack, rows in zip((kv_tiles.pack_k, kv_tiles.pack_v), before, strict=True)]
    scales = [host(torch.full((2, 2, 5, block_size), -1.0), device) if dtype is torch.int8 else None for _ in range(2)]
    jobs = [(0, 3, 0, block_size), (block_size, 1, 0, 7), (block_size + 7 - 9, 4, 9, block_size)]
    with dispatch.override("pack_blocks", name):
        tiles.pack_blocks(
            k, v, torch.tensor(jobs, device=device), *pools, k_scales=scales[0], v_scales=scales[1]
        )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    for rows, pool, scale, old, unpack in zip(
        (k, v), pools, scales, before, (kv_tiles.unpack_k, kv_tiles.unpack_v), strict=True
    ):
        wanted, wanted_scales = old.clone(), None if scale is None else torch.full_like(scale, -1.0)
        for row, block, first, end in jobs:
            numbers = rows[:, :, row + first : row + end].cpu()
            if wanted_scales is not None:
                numbers, wanted_scales[:, :, block, first:end] = api.quantize_rows(numbers)
            wanted[:, :, block, first:end] = numbers
        assert torch.equal(unpack(pool, head_dim), wanted)
        assert scale is None or torch.equal(scale, wanted_scales)
        padding = unpack(pool, pool.shape[4])[:, :, 3, :, head_dim:]
        assert not padding.any()


@pytest.mark.parametrize(("device", "name"), NAMES)
def test_pack_blocks_pads_with_zeros_over_garbage(device: str, name: str) -> None:
    pools = [host(torch.full((1, 1, 2, 16, 96), torch.nan), device) for _ in range(2)]
    rows = torch.ones(1, 1, 16, 80, device=device)
    with dispatch.override("pack_blocks", name):
        tiles.pack_blocks(rows, rows, torch.tensor([[0, 1, 0, 16]], device=device), *pools)
    if device == "cuda":
        torch.cuda.synchronize()
    assert not kv_tiles.unpack_k(pools[0][:, :, 1], 96)[..., 80:].any()
    assert not kv_tiles.unpack_v(pools[1][:, :, 1], 96)[..., 80:].any()
    assert all(pool[:, :, 0].isnan().all() for pool in pools)


@pytest.mark.parametrize(("device", "name"), NAMES)
def test_pack_blocks_of_a_row_of_zeros_in_int8_is_zeros(device: str, name: str) -> None:
    pools = [host(torch.full((1, 1, 1, 16, 32), 99, dtype=torch.int8), device) for _ in range(2)]
    scales = [host(torch.full((1, 1, 1, 16), torch.nan), device) for _ in range(2)]
    rows = torch.zeros(1, 1, 16, 32, device=device)
    with dispatch.override("pack_blocks", name):
        tiles.pack_blocks(
            rows, rows, torch.tensor([[0, 0, 0, 16]], device=device), *pools, k_scales=scales[0], v_scales=scales[1]
        )
    if device == "cuda":
        torch.cuda.synchronize()
    assert not any(tensor.any() for tensor in (*pools, *scales))


@pytest.mark.parametrize(("device", "name"), NAMES)
@pytest.mark.parametrize(
    ("dtype", "record"), [(torch.bfloat16, (64, 128)), (torch.int8, (16, 32)), (torch.float32, (48, 1))]
)
def test_fetch_blocks_copies_scattered_blocks_as_they_are(
    dtype: torch.dtype, record: tuple[int, int], device: str, name: str
) -> None:
    pool = host(make_rows((3, 9, *record), dtype), device)
    ids = [7, 0, 8, 3]
    out = torch.zeros((3, 4, *record), dtype=dtype, device=device)
    with dispatch.override("fetch_blocks", name):
        tiles.fetch_blocks(pool, torch.tensor(ids, device=device), out)
    assert torch.equal(out.cpu(), pool[:, ids])


def make_pool(kind: str, heads: int, num_blocks: int, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Tiles of two layers, [2, heads, …], and their scales; nothing is stored there."""
    shape, row = (2, heads, num_blocks), kv_tiles.padded_dim(head_dim)
    if kind == "int4":
        words = torch.full((*shape, int4.num_words(row), block_size), -1.0)
        return torch.full((*shape, block_size, row // 2), 0xA5, dtype=torch.uint8), words
    return torch.full((*shape, block_size, row), 99, dtype=torch.int8), torch.full((*shape, block_size), -1.0)


@pytest.mark.parametrize(("device", "name"), NAMES)
@pytest.mark.parametrize(("k_kind", "v_kind"), [("int4", "int4"), ("int8", "int4"), ("int4", "int8")])
@pytest.mark.parametrize(("block_size", "head_dim"), SHAPES)
def test_int4_blocks_hold_what_the_reference_packs_and_nothing_else(
    block_size: int, head_dim: int, k_kind: str, v_kind: str, device: str, name: str
) -> None:
    rows = [torch.randn(2, 2, 3 * block_size, head_dim, generator=torch.Generator().manual_seed(i)) for i in (5, 6)]
    rows[0][..., 3] *= 9  # a channel that is larger than the others, as K has them
    made = [make_pool(kind, 2, 5, block_size, head_dim) for kind in (k_kind, v_kind)]
    pools, scales = ([host(part[i].clone(), device) for part in made] for i in (0, 1))
    jobs = [(0, 3, 0, block_size), (block_size, 1, 0, 7), (block_size + 7 - 9, 4, 9, block_size)]
    with dispatch.override("pack_blocks", name):
        tiles.pack_blocks(
            rows[0].to(device), rows[1].to(device), torch.tensor(jobs, device=device), *pools,
            k_scales=scales[0], v_scales=scales[1],
        )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    unpacks, packs = (kv_tiles.unpack_k, kv_tiles.unpack_v), (kv_tiles.pack_k, kv_tiles.pack_v)
    for i, kind in enumerate((k_kind, v_kind)):
        wanted = unpacks[i](made[i][0], made[i][0].shape[-1])
        for row, block, first, end in jobs:
            new = rows[i][:, :, row + first : row + end]
            if kind == "int4":
                packed, words = int4.pack_rows(new)
                made[i][1][:, :, block, :, first:end] = words.transpose(2, 3)
            else:
                packed, made[i][1][:, :, block, first:end] = api.quantize_rows(new)
            wanted[:, :, block, first:end] = torch.nn.functional.pad(packed, (0, wanted.shape[-1] - packed.shape[-1]))
        assert torch.equal(pools[i], packs[i](wanted))
        assert torch.equal(scales[i].view(torch.int32), made[i][1].view(torch.int32))


@pytest.mark.parametrize(("device", "name"), NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("block_size", "head_dim"), SHAPES)
def test_unpack_blocks_of_int4_k_beside_int8_v(
    block_size: int, head_dim: int, dtype: torch.dtype, device: str, name: str
) -> None:
    rows = [torch.randn(2, 3, block_size, head_dim, generator=torch.Generator().manual_seed(i)) for i in (7, 8)]
    (packed, words), (whole, scales) = int4.pack_rows(rows[0]), api.quantize_rows(rows[1])
    outs = [torch.full((2, 3 * block_size, head_dim), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    with dispatch.override("unpack_blocks", name):
        tiles.unpack_blocks(
            kv_tiles.pack_k(packed).to(device), kv_tiles.pack_v(whole).to(device), *outs,
            k_scales=words.transpose(2, 3).contiguous().to(device), v_scales=scales.to(device),
        )  # fmt: skip
    wanted = (int4.unpack_rows(packed, words, head_dim), whole * scales[..., None])
    for out, expected in zip(outs, wanted, strict=True):
        assert torch.equal(out.cpu(), expected.flatten(1, 2).to(dtype))


def test_scales_without_integers_are_refused() -> None:
    pool, rows = torch.zeros(1, 1, 1, 16, 32), torch.zeros(1, 1, 16, 32)
    with pytest.raises(ShapeError, match=r"k_scales: expected with int8 and int4 only, the tiles are torch\.float32"):
        tiles.unpack_blocks(pool[0], pool[0], rows[0], rows[0], k_scales=torch.zeros(1, 1, 16))


def test_jobs_of_another_form_are_refused() -> None:
    pool, rows = torch.zeros(1, 1, 1, 16, 32), torch.zeros(1, 1, 16, 32)
    with pytest.raises(ShapeError, match=r"jobs: expected int64 \[J, 4\] on cpu"):
        tiles.pack_blocks(rows, rows, torch.zeros(1, 3, dtype=torch.int64), pool, pool)
