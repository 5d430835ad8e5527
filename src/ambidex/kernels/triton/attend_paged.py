"""Decode attention over a paged pool, split over the keys (flash-decoding, arXiv:2311.01282).

    s_j = q · k_j · scale                                 over the visible keys j of a request
    lse = log Σ_j e^s_j        out = Σ_j e^(s_j − lse) · v_j

    keys of a request      | tile 0 | tile 1 | tile 2 | tile 3 | tile 4 |        tiles of BLOCK_KEYS keys, none across
    num_splits = 3         |    split 0      |    split 1      | split 2|        two blocks if P is a multiple of it

One program of the split kernel attends with all query heads of one KV head over one split, so that K and V are read
once for the group; the group is padded to 16 rows, the least that a matrix unit multiplies. The merge kernel joins the
splits. How many keys a request has is read on the device: the launch depends on the shapes alone and may be captured in
a CUDA graph. Programs of splits that a short request does not have end at once.
"""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E: Final = 1.4426950408889634
_PROGRAMS_PER_MULTIPROCESSOR: Final = 4
"""Programs that share a multiprocessor: their loads overlap, and one that ends early leaves it busy."""
_MIN_SPLITS: Final = 4
"""However many requests there are: one long context among short ones is still spread over several programs."""
_MAX_SPLITS: Final = 64
"""More would make the merge longer than what it saves: at 128K tokens and 64 splits each attends over 2048 keys."""
_TILE_BYTES: Final = 16 * 1024
"""Bytes of a tile of K: 64 rows of 128 16-bit numbers. A program, with one tile of K and V on its way while it computes
another, then takes 38 KiB of shared memory and 96 registers a thread (compiled for compute capability 9.0): five fit a
multiprocessor, whose 160 KiB on their way are several times what its share of 4.8 TB/s delivers in a microsecond."""
_MIN_GROUP: Final = 16
_ON_CPU: Final = 2
"""Multiprocessors that the interpreter on a CPU pretends to have."""


@triton.jit
def _split_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, table_ptr, first_ptr, num_ptr, part_ptr, part_lse_ptr, scale_log2,
    q_row_stride, q_head_stride, pool_head_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The splits of a head are neighbours in the grid, so that short requests leave no multiprocessor without work.
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    first = tl.load(first_ptr + row).to(tl.int32)
    end = first + tl.load(num_ptr + row).to(tl.int32)
    first_tile = first // BLOCK_KEYS
    num_tiles = tl.cdiv(end, BLOCK_KEYS) - first_tile
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    tile_begin = first_tile + split * tiles_per_split
    tile_end = tl.minimum(tile_begin + tiles_per_split, first_tile + num_tiles)

    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_q = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_heads = kv_head * GROUP + heads
    part_rows = (row * NUM_KV_HEADS * GROUP + q_heads).to(tl.int64) * NUM_SPLITS + split
    is_empty = (first == end) | (tile_begin >= tile_end)
    if is_empty:
        tl.store(part_lse_ptr + part_rows, tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32), mask=heads < GROUP)
        return

    q = tl.load(
        q_ptr + row.to(tl.int64) * q_row_stride + q_heads[:, None].to(tl.int64) * q_head_stride + dims[None, :],
        mask=is_q, other=0.0,
    )  # fmt: skip
    k_head_ptr = k_pool_ptr + kv_head.to(tl.int64) * pool_head_stride
    v_head_ptr = v_pool_ptr + kv_head.to(tl.int64) * pool_head_stride
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    places = tl.arange(0, BLOCK_KEYS)
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], dtype=tl.float32)
    for tile in range(tile_begin, tile_end):
        keys = tile * BLOCK_KEYS + places
        is_visible = (keys >= first) & (keys < end)
        if BLOCK_SIZE % BLOCK_KEYS == 0:  # a tile lies within one block
            block_id = tl.load(table_row_ptr + tile * BLOCK_KEYS // BLOCK_SIZE).to(tl.int64)
            slots = block_id * BLOCK_SIZE + tile * BLOCK_KEYS % BLOCK_SIZE + places
        else:
            block_ids = tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=is_visible, other=0).to(tl.int64)
            slots = block_ids * BLOCK_SIZE + keys % BLOCK_SIZE
        # Rows that are not visible are never read: they may hold NaN, and 0 · NaN is NaN.
        is_kv = is_visible[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(v_head_ptr + slots[:, None] * HEAD_DIM + dims[None, :], mask=is_kv, other=0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    out = acc / total[:, None]
    lse = (top + tl.log2(total)) * 0.6931471805599453  # ln 2
    tl.store(part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=is_q)
    tl.store(part_lse_ptr + part_rows, lse, mask=heads < GROUP)


@triton.jit
def merge_splits(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, head,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the splits of one query head, and return its lse; of one without keys, of lse −inf, no `out` is read."""
    splits = tl.arange(0, SPLIT_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    part_lse = tl.load(part_lse_ptr + head * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    has_keys = part_lse != float("-inf")
    top = tl.max(part_lse, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(part_lse - base)
    total = tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    part = tl.load(
        part_ptr + (head * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=has_keys[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    out = tl.sum(part * (weights / divisor)[:, None], axis=0)
    lse = tl.where(total == 0.0, float("-inf"), base + tl.log(divisor))
    tl.store(out_ptr + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(lse_ptr + head, lse)
    return lse


@triton.jit
def _merge_splits_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program joins the splits of one query head."""
    head = tl.program_id(0).to(tl.int64)
    merge_splits(part_ptr, part_lse_ptr, out_ptr, lse_ptr, head, HEAD_DIM, DIM_BLOCK, NUM_SPLITS, SPLIT_BLOCK)


def attend_paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    first_key: Tensor,
    num_keys: Tensor,
    *,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.attend_paged`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, _, block_size, _ = k_pool.shape
    group = num_q_heads // num_kv_heads
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if num_rows == 0:
        return out, lse
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(q.device))
    part = torch.empty((num_rows, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    _split_kernel[(num_splits, num_kv_heads, num_rows)](
        q, k_pool, v_pool, block_table, first_key, num_keys, part, part_lse, scale * _LOG2_E,
        q.stride(0), q.stride(1), k_pool.stride(0), block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, BLOCK_SIZE=block_size,
        BLOCK_KEYS=choose_tile_keys(dim_block, q.element_size()), NUM_SPLITS=num_splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # 16-bit numbers know one precision only
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge_splits_kernel[(num_rows * num_q_heads,)](
        part, part_lse, out, lse,
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, NUM_SPLITS=num_splits,
        SPLIT_BLOCK=triton.next_power_of_2(num_splits), num_warps=4,
    )  # fmt: skip
    return out, lse


def choose_num_splits(num_heads: int, num_multiprocessors: int) -> int:
    """Splits of each request's keys, so that all programs together fill the device.

    Args:
        num_heads: requests times KV heads.
    """
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_heads)
    return max(_MIN_SPLITS, min(wanted, _MAX_SPLITS))


def choose_tile_keys(dim_block: int, element_size: int) -> int:
    """Keys of a tile: a power of 2 from 16, by the bytes of its rows."""
    return max(16, min(64, _TILE_BYTES // (dim_block * element_size)))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _ON_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
