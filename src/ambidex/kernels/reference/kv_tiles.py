"""Tile order of a pool's blocks (docs/kv_layout.md) and attention over such blocks, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.kernels.reference import int4
from ambidex.kernels.reference.attention import attend


def padded_dim(head_dim: int) -> int:
    """Numbers a row takes in tile order: head_dim, padded with zeros to a multiple of 32."""
    return -(-head_dim // 32) * 32


def value_depth(block_size: int, element_size: int) -> int:
    """Tokens of V that are mixed in a tile: what an AMX tile multiplies at once, if it divides a block."""
    depth = 64 // element_size
    while block_size % depth:
        depth //= 2
    return depth


def pack_k(rows: Tensor) -> Tensor:
    """K of whole blocks, [..., P, D] → tile order, [..., P, padded_dim(D)].

    Each 16 tokens are [padded_dim / pack][16 tokens][pack dims], pack = 4 / element size.
    """
    padded = _pad(rows)
    *outer, block_size, dim = padded.shape
    pack = 4 // rows.element_size()
    tiles = padded.reshape(*outer, block_size // 16, 16, dim // pack, pack)
    return tiles.transpose(-3, -2).reshape(padded.shape)


def unpack_k(tiles: Tensor, head_dim: int) -> Tensor:
    """What `pack_k` packed: [..., P, padded_dim] → [..., P, D]."""
    *outer, block_size, dim = tiles.shape
    pack = 4 // tiles.element_size()
    rows = tiles.reshape(*outer, block_size // 16, dim // pack, 16, pack).transpose(-3, -2)
    return rows.reshape(tiles.shape)[..., :head_dim]


def pack_v(rows: Tensor) -> Tensor:
    """V of whole blocks, [..., P, D] → tile order, [..., P, padded_dim(D)].

    Each `value_depth` tokens are [padded_dim / 16][depth / pack][16 dims][pack tokens], pack = 4 / element size.
    """
    padded = _pad(rows)
    *outer, block_size, dim = padded.shape
    pack, depth = 4 // rows.element_size(), value_depth(block_size, rows.element_size())
    tiles = padded.reshape(*outer, block_size // depth, depth // pack, pack, dim // 16, 16)
    return torch.movedim(tiles, (-2, -4, -1, -3), (-4, -3, -2, -1)).reshape(padded.shape)


def unpack_v(tiles: Tensor, head_dim: int) -> Tensor:
    """What `pack_v` packed: [..., P, padded_dim] → [..., P, D]."""
    *outer, block_size, dim = tiles.shape
    pack, depth = 4 // tiles.element_size(), value_depth(block_size, tiles.element_size())
    rows = tiles.reshape(*outer, block_size // depth, dim // 16, depth // pack, 16, pack)
    return torch.movedim(rows, (-4, -3, -2, -1), (-2, -4, -1, -3)).reshape(tiles.shape)[..., :head_dim]


def take_k(pool: Tensor, heads: Tensor, slots: Tensor, head_dim: int) -> Tensor:
    """Some rows of K out of tile order.

    Args:
        pool: [Hkv, N, P, padded_dim] of one layer, contiguous.
        heads, slots: [n] int64; the slot is block_id · P + offset.
    Returns:
        [n, D].
    """
    num_heads, num_blocks, block_size, dim = pool.shape
    pack = 4 // pool.element_size()
    tiles = pool.view(num_heads, num_blocks, block_size // 16, dim // pack, 16, pack)
    offset = slots % block_size
    return tiles[heads, slots // block_size, offset // 16, :, offset % 16].flatten(1)[:, :head_dim]


def take_v(pool: Tensor, heads: Tensor, slots: Tensor, head_dim: int) -> Tensor:
    """The same for V."""
    num_heads, num_blocks, block_size, dim = pool.shape
    pack, depth = 4 // pool.element_size(), value_depth(block_size, pool.element_size())
    tiles = pool.view(num_heads, num_blocks, block_size // depth, dim // 16, depth // pack, 16, pack)
    offset = slots % block_size
    row = offset % depth
    # Indices on both sides of a slice: what they choose comes first, then the slices in their order.
    taken = tiles[heads, slots // block_size, offset // depth, :, row // pack, :, row % pack]
    return taken.flatten(1)[:, :head_dim]


def attend_blocks(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    block_ids: Sequence[Sequence[int]],
    first_key: Sequence[int],
    num_keys: Sequence[int],
    row_offsets: Sequence[int],
    scale: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.cpu.native.AttentionPool.attend_blocks`; block ids by request. Accumulates in the dtype of q."""
    head_dim = q.shape[2]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    for r, ids in enumerate(block_ids):
        rows, keys = slice(row_offsets[r], row_offsets[r + 1]), slice(first_key[r], first_key[r] + num_keys[r])
        k = visible_rows(unpack_k(k_pool[:, list(ids)], k_pool.shape[3]), k_scales, ids, keys, head_dim)
        v = visible_rows(unpack_v(v_pool[:, list(ids)], v_pool.shape[3]), v_scales, ids, keys, head_dim)
        if num_keys[r]:
            out[rows], lse[rows] = attend(q[rows], k, v, scale=scale)
    return out, lse


def visible_rows(
    blocks: Tensor, scales: Tensor | None, ids: Sequence[int] | slice, keys: slice, head_dim: int
) -> Tensor:
    """Visible rows [Hkv, S, D] of unpacked blocks [Hkv, n, P, R], times the scales of blocks `ids`."""
    rows = blocks.flatten(1, 2)[:, keys]
    if scales is None:
        return rows[..., :head_dim]
    of_blocks = scales[:, ids if isinstance(ids, slice) else list(ids)]
    if rows.dtype == torch.uint8:
        return int4.unpack_rows(rows, of_blocks.transpose(2, 3).flatten(1, 2)[:, keys], head_dim)
    return rows[..., :head_dim] * of_blocks.flatten(1, 2)[:, keys, None]


def _pad(rows: Tensor) -> Tensor:
    if rows.dtype == torch.uint8:  # packed, padding included (int4.py)
        return rows
    dim = rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, padded_dim(dim) - dim))
