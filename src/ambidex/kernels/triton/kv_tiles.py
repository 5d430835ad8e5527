"""Blocks of a KV pool between rows and tile order (docs/kv_layout.md, "Tile order").

    K    place(t, d) = (t div 16) · 16 R + (d div p) · 16 p + (t mod 16) · p + d mod p
    V    place(t, d) = (t div e) · e R + (d div 16) · 16 e + ((t mod e) div p) · 16 p + (d mod 16) · p + t mod p

    t token of the block, d dim, R numbers of a padded row, p = 4 / element size, e = `value_depth`

`e` tokens by DIMS dims are one run of numbers for V and e / 16 runs for K: one program turns them around in registers,
so memory is read and written in whole lines on both sides. Either side may be pinned host memory, which Triton takes as
a pointer that the GPU can follow.

int8: number = round(x / scale), scale = max |x| / 127 over the row; row = scale · numbers.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_MOST_DIMS: Final = 128
"""Dims of a program's tile: 8 KiB whatever the format, 4 loads of 16 bytes for each of 128 threads."""
_NUM_WARPS: Final = 4


@triton.jit
def _tile_places(group, chunk, ROW: tl.constexpr, DIMS: tl.constexpr, DEPTH: tl.constexpr, IS_VALUE: tl.constexpr):
    """Places within the block of a tile's numbers, in the order in which they stand in memory."""
    numbers = tl.arange(0, DEPTH * DIMS)
    if IS_VALUE:
        return group * (DEPTH * ROW) + chunk * (DEPTH * DIMS) + numbers
    sixteen = group * (DEPTH // 16) + numbers // (16 * DIMS)
    return sixteen * (16 * ROW) + chunk * (16 * DIMS) + numbers % (16 * DIMS)


@triton.jit
def _unpack_part(
    tiles_ptr, scales_ptr, out_ptr, block, group, chunk,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
    PACK: tl.constexpr, HAS_SCALES: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of one head; `block` counts over the head's blocks in tiles, scales and rows alike."""
    places = _tile_places(group, chunk, ROW, DIMS, DEPTH, IS_VALUE)
    numbers = tl.load(tiles_ptr + block * (BLOCK_SIZE * ROW) + places)
    if IS_VALUE:
        lanes = tl.reshape(numbers, (DIMS // 16, DEPTH // PACK, 16, PACK))
        rows = tl.reshape(tl.permute(lanes, (1, 3, 0, 2)), (DEPTH, DIMS))
    else:
        lanes = tl.reshape(numbers, (DEPTH // 16, DIMS // PACK, 16, PACK))
        rows = tl.reshape(tl.permute(lanes, (0, 2, 1, 3)), (DEPTH, DIMS))
    tokens = block * BLOCK_SIZE + group * DEPTH + tl.arange(0, DEPTH)
    dims = chunk * DIMS + tl.arange(0, DIMS)
    values = rows.to(tl.float32)
    if HAS_SCALES:
        values *= tl.load(scales_ptr + tokens)[:, None]
    targets = out_ptr + tokens[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, values.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])  # it differs from piece to piece
def _unpack_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, num_blocks,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
    PACK: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    chunk = tile % (ROW // DIMS)
    group = tile // (ROW // DIMS) % (BLOCK_SIZE // DEPTH)
    block = (tile // (ROW // DIMS * (BLOCK_SIZE // DEPTH))).to(tl.int64) + tl.program_id(1).to(tl.int64) * num_blocks
    if tl.program_id(2) == 0:
        _unpack_part(
            k_ptr, k_scales_ptr, k_out_ptr, block, group, chunk,
            HEAD_DIM, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, HAS_SCALES, False,
        )  # fmt: skip
    else:
        _unpack_part(
            v_ptr, v_scales_ptr, v_out_ptr, block, group, chunk,
            HEAD_DIM, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, HAS_SCALES, True,
        )  # fmt: skip


@triton.jit
def _pack_part(
    rows_ptr, tiles_ptr, scales_ptr, row_stride, token_offset, first, end, group, chunk,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, DEPTH: tl.constexpr,
    PACK: tl.constexpr, HAS_SCALES: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of one head and block; the pointers are the head's first row, the block's tiles and its scales."""
    tokens = group * DEPTH + tl.arange(0, DEPTH)
    is_token = (tokens >= first) & (tokens < end)
    starts = rows_ptr + (token_offset + tokens)[:, None] * row_stride
    dims = chunk * DIMS + tl.arange(0, DIMS)
    values = tl.load(starts + dims[None, :], mask=is_token[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if HAS_SCALES:
        all_dims = tl.arange(0, DIM_BLOCK)
        whole = tl.load(starts + all_dims[None, :], mask=is_token[:, None] & (all_dims < HEAD_DIM)[None, :], other=0.0)
        scales = tl.div_rn(tl.max(tl.abs(whole.to(tl.float32)), axis=1), tl.full([DEPTH], 127.0, tl.float32))
        if chunk == 0:
            tl.store(scales_ptr + tokens, scales, mask=is_token)
        least = tl.maximum(scales, 1.1754943508222875e-38)  # the smallest normal number: a row of zeros stays zeros
        quotients = tl.div_rn(values.to(tl.float32), tl.broadcast_to(least[:, None], (DEPTH, DIMS)))
        values = (quotients + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to the nearest integer, ties to even
    numbers = values.to(tiles_ptr.dtype.element_ty)
    lane = tl.arange(0, DEPTH * DIMS)
    if IS_VALUE:
        lanes = tl.permute(tl.reshape(numbers, (DEPTH // PACK, PACK, DIMS // 16, 16)), (2, 0, 3, 1))
        lane_tokens = group * DEPTH + lane // (16 * PACK) % (DEPTH // PACK) * PACK + lane % PACK
    else:
        lanes = tl.permute(tl.reshape(numbers, (DEPTH // 16, 16, DIMS // PACK, PACK)), (0, 2, 1, 3))
        lane_tokens = group * DEPTH + lane // (16 * DIMS) * 16 + lane // PACK % 16
    targets = tiles_ptr + _tile_places(group, chunk, ROW, DIMS, DEPTH, IS_VALUE)
    lanes = tl.reshape(lanes, (DEPTH * DIMS,))
    if (first <= group * DEPTH) & (end >= (group + 1) * DEPTH):
        tl.store(targets, lanes)  # without a mask: 16 bytes at once
    else:
        tl.store(targets, lanes, mask=(lane_tokens >= first) & (lane_tokens < end))


@triton.jit
def _pack_kernel(
    k_ptr, v_ptr, jobs_ptr, k_pool_ptr, v_pool_ptr, k_scales_ptr, v_scales_ptr, num_blocks,
    k_layer_stride, k_head_stride, k_row_stride, v_layer_stride, v_head_stride, v_row_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr, PACK: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    chunk = tile % (ROW // DIMS)
    group = tile // (ROW // DIMS) % (BLOCK_SIZE // DEPTH)
    job_ptr = jobs_ptr + tile // (ROW // DIMS * (BLOCK_SIZE // DEPTH)) * 4
    head = tl.program_id(1).to(tl.int64)
    layer = (tl.program_id(2) // 2).to(tl.int64)
    token_offset, block = tl.load(job_ptr).to(tl.int64), tl.load(job_ptr + 1).to(tl.int64)
    first, end = tl.load(job_ptr + 2).to(tl.int32), tl.load(job_ptr + 3).to(tl.int32)
    if (end <= group * DEPTH) | (first >= (group + 1) * DEPTH):
        return
    place = (layer * NUM_KV_HEADS + head) * num_blocks + block
    if tl.program_id(2) % 2 == 0:
        _pack_part(
            k_ptr + layer * k_layer_stride + head * k_head_stride, k_pool_ptr + place * (BLOCK_SIZE * ROW),
            k_scales_ptr + place * BLOCK_SIZE, k_row_stride, token_offset, first, end, group, chunk,
            HEAD_DIM, DIM_BLOCK, ROW, DIMS, DEPTH, PACK, HAS_SCALES, False,
        )  # fmt: skip
    else:
        _pack_part(
            v_ptr + layer * v_layer_stride + head * v_head_stride, v_pool_ptr + place * (BLOCK_SIZE * ROW),
            v_scales_ptr + place * BLOCK_SIZE, v_row_stride, token_offset, first, end, group, chunk,
            HEAD_DIM, DIM_BLOCK, ROW, DIMS, DEPTH, PACK, HAS_SCALES, True,
        )  # fmt: skip


def unpack_blocks(
    k: Tensor, v: Tensor, k_out: Tensor, v_out: Tensor, *, depth: int, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    """See `kernels.tiles.unpack_blocks`; `depth` as `reference.kv_tiles.value_depth`."""
    num_heads, num_blocks, block_size, row = k.shape
    if k.numel() == 0:
        return
    dims = _dims_of_tile(row)
    _unpack_kernel[(num_blocks * (block_size // depth) * (row // dims), num_heads, 2)](
        k, v, k if k_scales is None else k_scales, v if v_scales is None else v_scales, k_out, v_out, num_blocks,
        HEAD_DIM=k_out.shape[2], ROW=row, DIMS=dims, BLOCK_SIZE=block_size, DEPTH=depth, PACK=4 // k.element_size(),
        HAS_SCALES=k_scales is not None, num_warps=_NUM_WARPS,
    )  # fmt: skip


def pack_blocks(
    k: Tensor,
    v: Tensor,
    jobs: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    depth: int,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """See `kernels.tiles.pack_blocks`; `depth` as `reference.kv_tiles.value_depth`."""
    num_layers, num_heads, num_blocks, block_size, row = k_pool.shape
    head_dim = k.shape[3]
    if len(jobs) == 0:
        return
    dims = _dims_of_tile(row)
    _pack_kernel[(len(jobs) * (block_size // depth) * (row // dims), num_heads, 2 * num_layers)](
        k, v, jobs, k_pool, v_pool, k_pool if k_scales is None else k_scales, v_pool if v_scales is None else v_scales,
        num_blocks, *k.stride()[:3], *v.stride()[:3],
        NUM_KV_HEADS=num_heads, HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim), ROW=row, DIMS=dims,
        BLOCK_SIZE=block_size, DEPTH=depth, PACK=4 // k_pool.element_size(), HAS_SCALES=k_scales is not None,
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _dims_of_tile(row: int) -> int:
    """The largest power of 2 that divides a padded row, at most `_MOST_DIMS`: shapes in a kernel are powers of 2."""
    return min(row & -row, _MOST_DIMS)
