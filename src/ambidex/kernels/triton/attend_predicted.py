"""Attention of one query a request over near keys and the far ones that partial keys put first; sizes on the device.

    predict_far        p = q̂ A, of each far key j the largest p · p_j · scale of its query heads, as an integer in its
                       order; the step's own key k leaves its row k A behind the others; the cut as in `attend_early`,
                       of a number that is given, or of Σ_h |{j: p_hj > max_j p_hj − α}| / Hkv, rounded down
    attend_predicted   s_j = q̂ · k_j · scale, j being chosen;  q · k_j · scale for near j
                       out = Σ_j e^(s_j − lse) · v_j

q̂ are early queries (`attend_predicted` may be given q for them), A the kept columns of what turns a key
(`attention/select/partial_keys.py`). Rows of K and V of the
chosen keys are read where they lie, over the link if that is in pinned host memory. As in `attend_early` launches
depend on shapes alone, so that a CUDA graph may hold them.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.early_rows import AlphaCount, EarlyRows, FarCut, PartialRows
from ambidex.kernels.triton.attend_early import find_cut, launch_attention
from ambidex.kernels.triton.attend_paged import (
    _MIN_GROUP,
    _num_multiprocessors,
    choose_num_splits,
    choose_tile_keys,
)
from ambidex.kernels.triton.near_and_far import split_tiles

_DIM_CHUNK: Final = 32
"""Numbers of a query that are turned at a time: with 32 columns, a tile of 4 KiB in fp32."""
_COUNTED_KEYS: Final = 2048
"""Keys of a tile that are held against the best: 8 KiB, 8 of each of 256 threads."""


@triton.jit
def _predict_kernel(
    early_ptr, near_k_ptr, near_slots_ptr, near_num_ptr, far_num_ptr, score_first_ptr, rows_address_ptr,
    turn_address_ptr, rows_capacity_ptr, order_ptr, scale, near_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_CHUNK: tl.constexpr, NUM_COLUMNS: tl.constexpr, COLUMN_BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(near_slots_ptr + row)
    num = tl.load(far_num_ptr + row).to(tl.int32)
    tile_begin, tile_end = split_tiles(num, split, BLOCK_KEYS, NUM_SPLITS)
    if (slot < 0) | ((split > 0) & (tile_begin >= tile_end)):
        return

    members = tl.arange(0, GROUP_BLOCK)
    columns = tl.arange(0, COLUMN_BLOCK)
    is_query = members < GROUP
    is_own = members == GROUP  # the step's own key is turned beside the queries
    is_column = columns < NUM_COLUMNS
    turn_ptr = tl.multiple_of(tl.load(turn_address_ptr + row).to(tl.pointer_type(tl.float32)), 16)
    turn_ptr += head * HEAD_DIM * NUM_COLUMNS
    q_rows = (row * NUM_KV_HEADS + head) * GROUP + members
    turned = tl.zeros([GROUP_BLOCK, COLUMN_BLOCK], dtype=tl.float32)
    for first in tl.static_range(0, HEAD_DIM, DIM_CHUNK):
        dims = first + tl.arange(0, DIM_CHUNK)
        is_dim = dims < HEAD_DIM
        q = tl.load(
            early_ptr + q_rows[:, None] * HEAD_DIM + dims[None, :], mask=is_query[:, None] & is_dim[None, :], other=0.0
        )
        own_rows = (members * 0 + slot)[:, None] * HEAD_DIM + dims[None, :]
        own = tl.load(
            near_k_ptr + head * near_head_stride + own_rows, mask=is_own[:, None] & is_dim[None, :], other=0.0
        )
        turn = tl.load(
            turn_ptr + dims[:, None] * NUM_COLUMNS + columns[None, :], mask=is_dim[:, None] & is_column[None, :],
            other=0.0,
        )  # fmt: skip
        turned += tl.dot(tl.where(is_own[:, None], own, q).to(tl.float32), turn, input_precision="ieee")

    rows_ptr = tl.multiple_of(tl.load(rows_address_ptr + row).to(tl.pointer_type(tl.float32)), 16)
    rows_ptr += head * tl.load(rows_capacity_ptr + row) * NUM_COLUMNS
    if split == 0:  # nobody reads it in this step: it is near
        place = tl.load(far_num_ptr + row) + tl.load(near_num_ptr + row) - 1
        own_places = (members * 0 + place)[:, None] * NUM_COLUMNS + columns[None, :]
        tl.store(rows_ptr + own_places, turned, mask=is_own[:, None] & is_column[None, :])
    order_ptr += tl.load(score_first_ptr + row) // GROUP + head * num
    for tile in range(tile_begin, tile_end):
        keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        is_key = keys < num
        partial = tl.load(
            rows_ptr + keys.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :],
            mask=is_key[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(turned, tl.trans(partial), input_precision="ieee") * scale
        best = tl.max(tl.where(is_query[:, None], scores, float("-inf")), axis=0)
        bits = best.to(tl.int32, bitcast=True)
        tl.store(order_ptr + keys, bits ^ ((bits >> 31) & 0x7FFFFFFF), mask=is_key)


@triton.jit
def _count_kernel(
    order_ptr, score_first_ptr, far_num_ptr, counts_ptr, alpha,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    num = tl.load(far_num_ptr + row).to(tl.int32)
    order_ptr += tl.load(score_first_ptr + row) // GROUP + head * num
    num_tiles = tl.cdiv(num, BLOCK)
    places = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], LOWEST, dtype=tl.int32)
    for tile in range(0, num_tiles):
        keys = tile * BLOCK + places
        highest = tl.maximum(highest, tl.load(order_ptr + keys, mask=keys < num, other=LOWEST))
    best = tl.max(highest, axis=0)
    least = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - alpha
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(0, num_tiles):
        keys = tile * BLOCK + places
        order = tl.load(order_ptr + keys, mask=keys < num, other=0)
        scores = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        counts += ((scores > least) & (keys < num)).to(tl.int32)
    tl.store(counts_ptr + row * NUM_KV_HEADS + head, tl.sum(counts, axis=0))


def predict_far(
    early: Tensor,
    near_k: Tensor,
    rows: EarlyRows,
    partial: PartialRows,
    *,
    max_far: int,
    scale: float,
    count: AlphaCount | None,
) -> FarCut:
    """See `kernels.api.predict_far`."""
    early = early.contiguous()
    num_rows, num_q_heads, head_dim = early.shape
    num_kv_heads = near_k.shape[0]
    group = num_q_heads // num_kv_heads
    order = torch.empty(num_kv_heads * max_far, dtype=torch.int32, device=early.device)
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(early.device))
    column_block = max(16, triton.next_power_of_2(partial.num_columns))
    _predict_kernel[(num_splits, num_kv_heads, num_rows)](
        early, near_k, rows.near_slots, rows.near_num, rows.far_num, rows.score_first, partial.rows_address,
        partial.turn_address, partial.capacity, order, scale, near_k.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(group + 1)),
        HEAD_DIM=head_dim, DIM_CHUNK=_DIM_CHUNK, NUM_COLUMNS=partial.num_columns, COLUMN_BLOCK=column_block,
        BLOCK_KEYS=choose_tile_keys(column_block, 4), NUM_SPLITS=num_splits, num_warps=4,
    )  # fmt: skip
    counts = num_chosen = None
    if count is not None:
        counts = torch.empty((num_rows, num_kv_heads), dtype=torch.int32, device=early.device)
        num_chosen = count.num_chosen
        _count_kernel[(num_kv_heads, num_rows)](
            order, rows.score_first, rows.far_num, counts, float(count.alpha),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, BLOCK=_COUNTED_KEYS, LOWEST=-(1 << 31), num_warps=8,
        )  # fmt: skip
    bounds = find_cut(
        order, rows, num_kv_heads=num_kv_heads, group=group, bits=32, counts=counts, num_chosen=num_chosen
    )
    return FarCut(order=order, bounds=bounds)


def attend_predicted(
    q: Tensor, early: Tensor, near_k: Tensor, near_v: Tensor, cut: FarCut, rows: EarlyRows, *, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_predicted`."""
    out, _ = launch_attention(
        q.contiguous(), near_k, near_v, cut, rows, given=None, early=early.contiguous(), layer_idx=layer_idx,
        scale=scale,
    )  # fmt: skip
    return out
