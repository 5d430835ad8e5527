"""Rows of 4-bit numbers: their definition number by number, and the native ops against the reference in torch."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.reference import int4, kv_tiles
from ambidex.kernels.reference.quantize import quantize_rows
from truth import assert_within_twice_plain, plain_int8_attend

HEAD_DIMS = [16, 64, 80, 128]
KINDS = [("int4", "int4"), ("int8", "int4"), ("int4", "int8")]


@pytest.fixture(scope="module")
def pool() -> native.AttentionPool:
    return native.AttentionPool(native.ThreadPool(2))


def make_rows(*shape: int, seed: int = 0) -> Tensor:
    """Normal rows with a dim that is larger than the others, as K has them."""
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    rows[..., 3] *= 8
    return rows


def make_part(kind: str, num_heads: int, num_blocks: int, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Tiles of one layer and their scales, nothing stored yet: bytes of ones, scales of NaN."""
    row = kv_tiles.padded_dim(head_dim)
    if kind == "int8":
        tiles = torch.full((num_heads, num_blocks, block_size, row), -1, dtype=torch.int8)
        return tiles, torch.full((num_heads, num_blocks, block_size), torch.nan)
    words = torch.full((num_heads, num_blocks, int4.num_words(row), block_size), torch.nan)
    return torch.full((num_heads, num_blocks, block_size, row // 2), 255, dtype=torch.uint8), words


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pack_rows_every_number_is_where_the_definition_says(head_dim: int) -> None:
    rows = make_rows(5, head_dim)
    packed, words = int4.pack_rows(rows)
    whole, scales = quantize_rows(rows)
    padded = kv_tiles.padded_dim(head_dim)
    assert packed.shape == (5, padded // 2)
    assert words.shape == (5, 1 + padded // 32)
    assert torch.equal(words[:, 0], scales)
    grids = words[:, 1:].contiguous().view(torch.uint8).view(5, -1, 2)  # [5, G, (step, zero)]
    for row in range(5):
        for group in range(padded // 16):
            numbers = [int(x) for x in whole[row, 16 * group : 16 * group + 16]]
            numbers += [0] * (16 - len(numbers))
            step, zero = (int(x) for x in grids[row, group])
            zero -= 256 * (zero > 127)
            assert step == max(1, -(-(max(numbers) - min(numbers)) // 15))
            assert zero == min(min(numbers), 127 - 15 * step)
            for j, number in enumerate(numbers):
                byte = int(packed[row, group // 2 * 16 + j])
                found = byte >> 4 if group % 2 else byte & 15
                assert found == (2 * (number - zero) + step) // (2 * step)


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("part", ["k", "v"])
def test_store_values_writes_what_the_reference_packs(
    pool: native.AttentionPool, part: str, block_size: int, head_dim: int, isa: str
) -> None:
    tiles, words = make_part("int4", 2, 3, block_size, head_dim)
    before = words.clone()
    rows, slots = (
        make_rows(6, 2, head_dim),
        torch.tensor([0, 2 * block_size + 5, 17, 3, block_size - 1, 2 * block_size]),
    )
    pool.store_values(part, tiles, slots, rows, scales=words, isa=isa)
    unpack = kv_tiles.unpack_k if part == "k" else kv_tiles.unpack_v
    packed, row_words = int4.pack_rows(rows)
    stored = unpack(tiles, tiles.shape[3]).flatten(1, 2).transpose(0, 1)  # [slots, Hkv, R]
    assert torch.equal(stored[slots], packed)
    kept = [slot for slot in range(len(stored)) if slot not in slots.tolist()]
    assert (stored[kept] == 255).all()
    before[:, slots // block_size, :, slots % block_size] = row_words
    assert torch.equal(words.view(torch.int32), before.view(torch.int32))


def test_store_values_of_zeros_reads_as_zeros(pool: native.AttentionPool) -> None:
    tiles, words = make_part("int4", 1, 1, 16, 64)
    pool.store_values("k", tiles, torch.tensor([3]), torch.zeros(1, 1, 64), scales=words)
    row = kv_tiles.unpack_k(tiles, 32)[0, 0, 3]
    assert not int4.unpack_rows(row, words[0, 0, :, 3], 64).any()


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(("k_kind", "v_kind"), KINDS)
@pytest.mark.parametrize(("block_size", "head_dim", "group"), [(16, 64, 1), (48, 80, 3), (64, 128, 4), (64, 64, 7)])
def test_attend_blocks_over_int4_equals_the_reference(
    pool: native.AttentionPool, block_size: int, head_dim: int, group: int, k_kind: str, v_kind: str, isa: str
) -> None:
    """Rows that are not visible were never stored: bytes of ones, scales of NaN."""
    num_keys, first, ids = 2 * block_size + 7, 5, [4, 1, 3]
    parts = {"k": make_part(k_kind, 2, 5, block_size, head_dim), "v": make_part(v_kind, 2, 5, block_size, head_dim)}
    keys = range(first, first + num_keys)
    slots = torch.tensor([ids[key // block_size] * block_size + key % block_size for key in keys])
    for seed, (name, (tiles, scales)) in enumerate(parts.items()):
        pool.store_values(name, tiles, slots, make_rows(num_keys, 2, head_dim, seed=seed), scales=scales)
    (k, k_scales), (v, v_scales) = parts["k"], parts["v"]
    q = torch.randn(3, 2 * group, head_dim, generator=torch.Generator().manual_seed(9))
    batch = native.KeyBatch(
        torch.tensor(ids), torch.tensor([0, 3]), torch.tensor([first]), torch.tensor([num_keys]), torch.tensor([0, 3]),
        block_size=block_size,
    )  # fmt: skip
    out, lse = pool.attend_blocks(q, k, v, batch, scale=head_dim**-0.5, k_scales=k_scales, v_scales=v_scales, isa=isa)
    settings = {"block_ids": [ids], "first_key": [first], "num_keys": [num_keys], "row_offsets": [0, 3]}
    truth, true_lse = kv_tiles.attend_blocks(
        q.double(), k, v, **settings, scale=head_dim**-0.5, k_scales=k_scales, v_scales=v_scales
    )
    visible = slice(first, first + num_keys)
    k_rows, v_rows = (
        kv_tiles.visible_rows(unpack(tiles[:, ids], tiles.shape[3]), scales, ids, visible, head_dim)
        for unpack, (tiles, scales) in zip((kv_tiles.unpack_k, kv_tiles.unpack_v), parts.values(), strict=True)
    )
    plain = plain_int8_attend(q, k_rows, v_rows, head_dim**-0.5, torch.ones(3, num_keys, dtype=torch.bool))
    assert_within_twice_plain(out, plain, truth, num_roundings=4)
    assert (lse - true_lse).abs().max() < 1e-3


def test_attend_blocks_int4_without_its_words_is_refused(pool: native.AttentionPool) -> None:
    (k, scales), q = make_part("int4", 1, 1, 16, 64), torch.zeros(1, 1, 64)
    batch = native.KeyBatch(*map(torch.tensor, ([0], [0, 1], [0], [16], [0, 1])), block_size=16)
    with pytest.raises(ShapeError, match="k_scales: expected Hkv N W P, got 3 axes"):
        pool.attend_blocks(q, k, k, batch, scale=1.0, k_scales=scales[:, :, 0].contiguous(), v_scales=scales)


def test_attend_blocks_int4_beside_a_floating_format_is_refused(pool: native.AttentionPool) -> None:
    (k, scales), q = make_part("int4", 1, 1, 16, 64), torch.zeros(1, 1, 64)
    batch = native.KeyBatch(*map(torch.tensor, ([0], [0, 1], [0], [16], [0, 1])), block_size=16)
    with pytest.raises(ShapeError, match="K in int4 and V in bf16 do not go together"):
        pool.attend_blocks(q, k, torch.zeros(1, 1, 16, 64).bfloat16(), batch, scale=1.0, k_scales=scales)
