"""Blocks of a KV pool between rows and tile order (docs/kv_layout.md, "Tile order").

    K    place(t, d) = (t div 16) · 16 R + (d div p) · 16 p + (t mod 16) · p + d mod p
    V    place(t, d) = (t div e) · e R + (d div 16) · 16 e + ((t mod e) div p) · 16 p + (d mod 16) · p + t mod p

    t token of the block, d dim, R numbers of a padded row, p = 4 / element size, e = `value_depth`

`e` tokens by DIMS dims are one run of numbers for V and e / 16 runs for K: one program turns them around in registers,
so memory is read and written in whole lines on both sides. Either side may be pinned host memory, which Triton takes as
a pointer that the GPU can follow.

int8: number = round(x / scale), scale = max |x| / 127 over the row; row = scale · numbers.

int4: bytes of two numbers 16 dims apart lie as the numbers of int8 do. Words of 4 bytes beside a row, those of a block
[W, P]: the scale of the row in int8, then for each two groups of 16 dims step, zero, step, zero; a row of whole numbers
of int8 is zero + step · number (`reference/int4.py`).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.reference import int4
from ambidex.kernels.reference.kv_tiles import padded_dim, value_depth

_MOST_DIMS: Final = 128
"""Dims of a program's tile: 8 KiB whatever the format, 4 loads of 16 bytes for each of 128 threads."""
_NUM_WARPS: Final = 4
_INT8: Final = tl.constexpr(1)
_INT4: Final = tl.constexpr(2)
_KINDS: Final = {torch.int8: 1, torch.uint8: 2}
"""Of a part, by the dtype of its tiles; others are floats."""


@triton.jit
def _tile_places(group, chunk, ROW: tl.constexpr, DIMS: tl.constexpr, DEPTH: tl.constexpr, IS_VALUE: tl.constexpr):
    """Places within the block of a tile's numbers, in the order in which they stand in memory."""
    numbers = tl.arange(0, DEPTH * DIMS)
    if IS_VALUE:
        return group * (DEPTH * ROW) + chunk * (DEPTH * DIMS) + numbers
    sixteen = group * (DEPTH // 16) + numbers // (16 * DIMS)
    return sixteen * (16 * ROW) + chunk * (16 * DIMS) + numbers % (16 * DIMS)


@triton.jit
def _load_tile(
    tiles_ptr, block, group, chunk,
    ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr, PACK: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """A tile as rows, [DEPTH, DIMS]."""
    places = _tile_places(group, chunk, ROW, DIMS, DEPTH, IS_VALUE)
    numbers = tl.load(tiles_ptr + block * (BLOCK_SIZE * ROW) + places)
    if IS_VALUE:
        lanes = tl.reshape(numbers, (DIMS // 16, DEPTH // PACK, 16, PACK))
        return tl.reshape(tl.permute(lanes, (1, 3, 0, 2)), (DEPTH, DIMS))
    lanes = tl.reshape(numbers, (DEPTH // 16, DIMS // PACK, 16, PACK))
    return tl.reshape(tl.permute(lanes, (0, 2, 1, 3)), (DEPTH, DIMS))


@triton.jit
def _unpack_part(
    tiles_ptr, scales_ptr, out_ptr, block, group, chunk,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
    PACK: tl.constexpr, KIND: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of one head; `block` counts over the head's blocks in tiles, scales and rows alike."""
    tokens = group * DEPTH + tl.arange(0, DEPTH)
    out_rows = out_ptr + (block * BLOCK_SIZE + tokens) * HEAD_DIM
    if KIND == _INT4:
        bytes_ = _load_tile(tiles_ptr, block, group, chunk, ROW // 2, DIMS // 2, BLOCK_SIZE, DEPTH, PACK, IS_VALUE)
        pairs = chunk * (DIMS // 32) + tl.arange(0, DIMS // 32)
        words_ptr = scales_ptr + block * ((1 + ROW // 32) * BLOCK_SIZE)
        scales = tl.load(words_ptr + tokens)[:, None, None]
        words = tl.load(words_ptr + (1 + pairs)[None, :] * BLOCK_SIZE + tokens[:, None]).to(tl.int32, bitcast=True)
        numbers = tl.reshape(bytes_.to(tl.int32), (DEPTH, DIMS // 32, 16))
        low = ((words << 16) >> 24)[:, :, None] + (words & 255)[:, :, None] * (numbers & 15)
        high = (words >> 24)[:, :, None] + ((words >> 16) & 255)[:, :, None] * (numbers >> 4)
        dims = pairs[None, :, None] * 32 + tl.arange(0, 16)[None, None, :]
        targets = out_rows[:, None, None] + dims
        dtype = out_ptr.dtype.element_ty
        tl.store(targets, (low.to(tl.float32) * scales).to(dtype), mask=dims < HEAD_DIM)
        tl.store(targets + 16, (high.to(tl.float32) * scales).to(dtype), mask=dims + 16 < HEAD_DIM)
    else:
        rows = _load_tile(tiles_ptr, block, group, chunk, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, IS_VALUE)
        dims = chunk * DIMS + tl.arange(0, DIMS)
        values = rows.to(tl.float32)
        if KIND == _INT8:
            values *= tl.load(scales_ptr + block * BLOCK_SIZE + tokens)[:, None]
        targets = out_rows[:, None] + dims[None, :]
        tl.store(targets, values.to(out_ptr.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])  # it differs from piece to piece
def _unpack_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_out_ptr, v_out_ptr, num_blocks,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr,
    PACK: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    chunk = tile % (ROW // DIMS)
    group = tile // (ROW // DIMS) % (BLOCK_SIZE // DEPTH)
    block = (tile // (ROW // DIMS * (BLOCK_SIZE // DEPTH))).to(tl.int64) + tl.program_id(1).to(tl.int64) * num_blocks
    if tl.program_id(2) == 0:
        _unpack_part(
            k_ptr, k_scales_ptr, k_out_ptr, block, group, chunk,
            HEAD_DIM, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, K_KIND, False,
        )  # fmt: skip
    else:
        _unpack_part(
            v_ptr, v_scales_ptr, v_out_ptr, block, group, chunk,
            HEAD_DIM, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, V_KIND, True,
        )  # fmt: skip


@triton.jit
def _row_scales(starts, is_token, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """max |x| / 127 of rows [DEPTH, HEAD_DIM] that begin at `starts` [DEPTH]."""
    dims = tl.arange(0, DIM_BLOCK)
    rows = tl.load(starts[:, None] + dims[None, :], mask=is_token[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tl.div_rn(tl.max(tl.abs(rows.to(tl.float32)), axis=1), tl.full([DEPTH], 127.0, tl.float32))


@triton.jit
def _to_whole(values, scales):
    """round(x / scale), of tensors that are alike; a row of zeros, whose scale is 0, stays zeros."""
    quotients = tl.div_rn(values.to(tl.float32), tl.maximum(scales, 1.1754943508222875e-38))  # the smallest normal one
    return (quotients + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to the nearest integer, ties to even


@triton.jit
def _find_grid(whole):
    """Steps and zeros of groups [DEPTH, PAIRS, 16] of whole numbers, and their numbers of 4 bits."""
    least, most = tl.min(whole, axis=2), tl.max(whole, axis=2)
    steps = tl.maximum((most - least + 14) // 15, 1)
    zeros = tl.minimum(least, 127 - 15 * steps)
    return steps, zeros, (2 * (whole - zeros[:, :, None]) + steps[:, :, None]) // (2 * steps[:, :, None])


@triton.jit
def _half_of_groups(starts, is_token, dims, scales, HEAD_DIM: tl.constexpr):
    """Whole numbers of rows at some dims [1, PAIRS, 16], [DEPTH, PAIRS, 16] int32."""
    mask = is_token[:, None, None] & (dims < HEAD_DIM)
    values = tl.load(starts[:, None, None] + dims, mask=mask, other=0.0)
    return _to_whole(values, tl.broadcast_to(scales[:, None, None], values.shape)).to(tl.int32)


@triton.jit
def _pack_part(
    rows_ptr, tiles_ptr, scales_ptr, row_stride, token_offset, first, end, group, chunk,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DEPTH: tl.constexpr, PACK: tl.constexpr, KIND: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """One tile of one head and block; the pointers are the head's first row, the block's tiles and its scales."""
    tokens = group * DEPTH + tl.arange(0, DEPTH)
    is_token = (tokens >= first) & (tokens < end)
    starts = rows_ptr + (token_offset + tokens) * row_stride
    if KIND == _INT4:
        scales = _row_scales(starts, is_token, HEAD_DIM, DIM_BLOCK, DEPTH)
        pairs = chunk * (DIMS // 32) + tl.arange(0, DIMS // 32)
        dims = pairs[None, :, None] * 32 + tl.arange(0, 16)[None, None, :]
        low_steps, low_zeros, low = _find_grid(_half_of_groups(starts, is_token, dims, scales, HEAD_DIM))
        high_steps, high_zeros, high = _find_grid(_half_of_groups(starts, is_token, dims + 16, scales, HEAD_DIM))
        words = low_steps | (low_zeros & 255) << 8 | high_steps << 16 | (high_zeros & 255) << 24
        word_places = (1 + pairs)[None, :] * BLOCK_SIZE + tokens[:, None]
        tl.store(scales_ptr + word_places, words.to(tl.float32, bitcast=True), mask=is_token[:, None])
        if chunk == 0:
            tl.store(scales_ptr + tokens, scales, mask=is_token)
        numbers = tl.reshape((low | high << 4).to(tl.uint8), (DEPTH, DIMS // 2))
        _store_tile(
            numbers, tiles_ptr, first, end, group, chunk, ROW // 2, DIMS // 2, DEPTH, PACK, IS_VALUE
        )  # fmt: skip
    else:
        dims = chunk * DIMS + tl.arange(0, DIMS)
        mask = is_token[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(starts[:, None] + dims[None, :], mask=mask, other=0.0)
        if KIND == _INT8:
            scales = _row_scales(starts, is_token, HEAD_DIM, DIM_BLOCK, DEPTH)
            if chunk == 0:
                tl.store(scales_ptr + tokens, scales, mask=is_token)
            values = _to_whole(values, tl.broadcast_to(scales[:, None], (DEPTH, DIMS)))
        numbers = values.to(tiles_ptr.dtype.element_ty)
        _store_tile(numbers, tiles_ptr, first, end, group, chunk, ROW, DIMS, DEPTH, PACK, IS_VALUE)


@triton.jit
def _store_tile(
    numbers, tiles_ptr, first, end, group, chunk,
    ROW: tl.constexpr, DIMS: tl.constexpr, DEPTH: tl.constexpr, PACK: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Rows [DEPTH, DIMS] as a tile of a block, its tokens `first` … `end` − 1 alone."""
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
    BLOCK_SIZE: tl.constexpr, DEPTH: tl.constexpr, PACK: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr,
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
    place = ((layer * NUM_KV_HEADS + head) * num_blocks + block) * BLOCK_SIZE
    if tl.program_id(2) % 2 == 0:
        _pack_part(
            k_ptr + layer * k_layer_stride + head * k_head_stride, k_pool_ptr + place * K_STRIDE,
            k_scales_ptr + place * K_WORDS, k_row_stride, token_offset, first, end, group, chunk,
            HEAD_DIM, DIM_BLOCK, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, K_KIND, False,
        )  # fmt: skip
    else:
        _pack_part(
            v_ptr + layer * v_layer_stride + head * v_head_stride, v_pool_ptr + place * V_STRIDE,
            v_scales_ptr + place * V_WORDS, v_row_stride, token_offset, first, end, group, chunk,
            HEAD_DIM, DIM_BLOCK, ROW, DIMS, BLOCK_SIZE, DEPTH, PACK, V_KIND, True,
        )  # fmt: skip


def unpack_blocks(
    k: Tensor, v: Tensor, k_out: Tensor, v_out: Tensor, *, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    """See `kernels.tiles.unpack_blocks`; K and V have elements of one size."""
    num_heads, num_blocks, block_size, _ = k.shape
    if k.numel() == 0:
        return
    head_dim, element_size = k_out.shape[2], k.element_size()
    row, depth = padded_dim(head_dim), value_depth(block_size, element_size)
    dims = _dims_of_tile(row)
    _unpack_kernel[(num_blocks * (block_size // depth) * (row // dims), num_heads, 2)](
        k, v, k if k_scales is None else k_scales, v if v_scales is None else v_scales, k_out, v_out, num_blocks,
        HEAD_DIM=head_dim, ROW=row, DIMS=dims, BLOCK_SIZE=block_size, DEPTH=depth, PACK=4 // element_size,
        K_KIND=_KINDS.get(k.dtype, 0), V_KIND=_KINDS.get(v.dtype, 0), num_warps=_NUM_WARPS,
    )  # fmt: skip


def pack_blocks(
    k: Tensor,
    v: Tensor,
    jobs: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """See `kernels.tiles.pack_blocks`; K and V have elements of one size."""
    num_layers, num_heads, num_blocks, block_size, _ = k_pool.shape
    head_dim, element_size = k.shape[3], k_pool.element_size()
    if len(jobs) == 0:
        return
    row, depth = padded_dim(head_dim), value_depth(block_size, element_size)
    dims = _dims_of_tile(row)
    _pack_kernel[(len(jobs) * (block_size // depth) * (row // dims), num_heads, 2 * num_layers)](
        k, v, jobs, k_pool, v_pool, k_pool if k_scales is None else k_scales, v_pool if v_scales is None else v_scales,
        num_blocks, *k.stride()[:3], *v.stride()[:3],
        NUM_KV_HEADS=num_heads, HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim), ROW=row, DIMS=dims,
        BLOCK_SIZE=block_size, DEPTH=depth, PACK=4 // element_size,
        K_KIND=_KINDS.get(k_pool.dtype, 0), V_KIND=_KINDS.get(v_pool.dtype, 0),
        K_STRIDE=k_pool.shape[4], V_STRIDE=v_pool.shape[4], K_WORDS=_num_words(k_pool), V_WORDS=_num_words(v_pool),
        num_warps=_NUM_WARPS,
    )  # fmt: skip


def _num_words(pool: Tensor) -> int:
    """Words beside a row of a pool, where it has scales."""
    return int4.num_words(2 * pool.shape[4]) if pool.dtype == torch.uint8 else 1


def _dims_of_tile(row: int) -> int:
    """The largest power of 2 that divides a padded row, at most `_MOST_DIMS`: shapes in a kernel are powers of 2."""
    return min(row & -row, _MOST_DIMS)
