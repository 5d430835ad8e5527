"""Decode attention over blocks in tile order that lie in pinned host memory: the stream lane.

    s_j = q · k_j · scale        lse = log Σ_j e^s_j        out = Σ_j e^(s_j − lse) · v_j

The same split over the keys as `attend_paged`, and the same merge. A program reads its keys over the link where they
lie, each number once, in the order of memory, and brings them into row order in registers (docs/kv_layout.md):

    K, 16 tokens         [Dp / 2][16 tokens][2 dims]                  → [16 tokens][Dp]
    V, `depth` tokens    [Dp / 16][depth / 2][16 dims][2 tokens]      → [depth tokens][Dp]

Shapes in a kernel are powers of 2, rows need not be: a program takes them in chunks of the largest one that divides
them, runs of at least 1 KiB in memory. Scores are the sum of q · k over the chunks; each has a part of q and `out`.

The link delivers 55 GB/s with a latency of about 2 µs: 110 KB on their way are enough, and each program has a tile of
16 KB. So nothing is prefetched by software.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.triton.attend_paged import _LOG2_E, _MIN_GROUP, _merge_splits_kernel, _num_multiprocessors

_PROGRAMS_PER_MULTIPROCESSOR: Final = 2
_MAX_SPLITS: Final = 64
_MAX_TILE_KEYS: Final = 64
_LONG_ROW: Final = 256
"""Numbers of a row beyond which a tile has half as many keys: with 64 of them a thread's 255 registers do not hold what
it has of rows from 448 on (compiled for compute capability 9.0); with 32 they do up to 576."""


@triton.jit
def _load_lines(
    tile_ptr, chunk: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr
):
    """A chunk of a tile whose `DEPTH` tokens are mixed, [KEYS · DIMS] in the order of memory."""
    numbers = tl.arange(0, KEYS * DIMS)
    if ROW != DIMS:
        numbers = numbers // (DEPTH * DIMS) * (DEPTH * ROW) + chunk * (DEPTH * DIMS) + numbers % (DEPTH * DIMS)
    return tl.load(tile_ptr + numbers)


@triton.jit
def _split_tiles_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, num_ptr, part_ptr, part_lse_ptr, scale_log2,
    q_row_stride, q_head_stride, pool_head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    DEPTH: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    num_keys = tl.load(num_ptr + row).to(tl.int32)
    num_tiles = tl.cdiv(num_keys, KEYS)
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    tile_begin = split * tiles_per_split
    tile_end = tl.minimum(tile_begin + tiles_per_split, num_tiles)
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIMS)
    is_q: tl.tuple = ()  # of each chunk
    for chunk in tl.static_range(ROW // DIMS):
        is_q += ((heads < GROUP)[:, None] & (chunk * DIMS + dims < HEAD_DIM)[None, :],)
    q_heads = kv_head * GROUP + heads
    part_rows = (row * NUM_KV_HEADS * GROUP + q_heads).to(tl.int64) * NUM_SPLITS + split
    if tile_begin >= tile_end:
        tl.store(part_lse_ptr + part_rows, tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32), mask=heads < GROUP)
        return
    q_ptrs = q_ptr + row.to(tl.int64) * q_row_stride + q_heads[:, None].to(tl.int64) * q_head_stride + dims[None, :]
    q: tl.tuple = ()
    for chunk in tl.static_range(ROW // DIMS):
        q += (tl.load(q_ptrs + chunk * DIMS, mask=is_q[chunk], other=0.0),)
    k_head_ptr = k_pool_ptr + kv_head.to(tl.int64) * pool_head_stride
    v_head_ptr = v_pool_ptr + kv_head.to(tl.int64) * pool_head_stride
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    places = tl.arange(0, KEYS)
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc: tl.tuple = ()
    for _ in tl.static_range(ROW // DIMS):
        acc += (tl.zeros([GROUP_BLOCK, DIMS], dtype=tl.float32),)
    for tile in range(tile_begin, tile_end):
        is_visible = tile * KEYS + places < num_keys
        block_id = tl.load(table_row_ptr + tile * KEYS // BLOCK_SIZE).to(tl.int64)
        start = (block_id * BLOCK_SIZE + tile * KEYS % BLOCK_SIZE) * ROW
        k_lines: tl.tuple = ()
        v_lines: tl.tuple = ()
        for chunk in tl.static_range(ROW // DIMS):
            k_lines += (_load_lines(k_head_ptr + start, chunk, ROW, DIMS, KEYS, 16),)
            v_lines += (_load_lines(v_head_ptr + start, chunk, ROW, DIMS, KEYS, DEPTH),)
        scores = tl.zeros([GROUP_BLOCK, KEYS], dtype=tl.float32)
        for chunk in tl.static_range(ROW // DIMS):
            k = tl.reshape(k_lines[chunk], [KEYS // 16, DIMS // 2, 16, 2])
            k = tl.reshape(tl.permute(k, [0, 2, 1, 3]), [KEYS, DIMS])
            scores = tl.dot(q[chunk], tl.trans(k), scores)
        scores = tl.where(is_visible[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        new_acc: tl.tuple = ()
        for chunk in tl.static_range(ROW // DIMS):
            v = tl.reshape(v_lines[chunk], [KEYS // DEPTH, DIMS // 16, DEPTH // 2, 16, 2])
            v = tl.reshape(tl.permute(v, [0, 2, 4, 1, 3]), [KEYS, DIMS])
            v = tl.where(is_visible[:, None], v, 0.0)  # rows that were never stored may hold NaN, and 0 · NaN is NaN
            new_acc += (acc[chunk] * fade[:, None] + tl.dot(weights.to(v.dtype), v),)
        acc = new_acc
        top = new_top
    out_ptrs = part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :]
    for chunk in tl.static_range(ROW // DIMS):
        tl.store(out_ptrs + chunk * DIMS, acc[chunk] / total[:, None], mask=is_q[chunk])
    lse = (top + tl.log2(total)) * 0.6931471805599453  # ln 2
    tl.store(part_lse_ptr + part_rows, lse, mask=heads < GROUP)


def attend_tiles(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, num_keys: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.attend_tiles`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, _, block_size, row_size = k_pool.shape
    group = num_q_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if num_rows == 0:
        return out, lse
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(q.device) // (num_rows * num_kv_heads))
    num_splits = max(1, min(wanted, _MAX_SPLITS))
    part = torch.empty((num_rows, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
    most_keys = _MAX_TILE_KEYS if row_size <= _LONG_ROW else _MAX_TILE_KEYS // 2
    keys = min(most_keys, block_size & -block_size)  # the largest power of 2 that divides a block
    _split_tiles_kernel[(num_splits, num_kv_heads, num_rows)](
        q, k_pool, v_pool, block_table, num_keys, part, part_lse, scale * _LOG2_E,
        q.stride(0), q.stride(1), k_pool.stride(0), block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, ROW=row_size, DIMS=row_size & -row_size, BLOCK_SIZE=block_size, KEYS=keys,
        DEPTH=min(32, keys), NUM_SPLITS=num_splits, num_warps=4,
    )  # fmt: skip
    _merge_splits_kernel[(num_rows * num_q_heads,)](
        part, part_lse, out, lse,
        HEAD_DIM=head_dim, DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)), NUM_SPLITS=num_splits,
        SPLIT_BLOCK=triton.next_power_of_2(num_splits), num_warps=4,
    )  # fmt: skip
    return out, lse
