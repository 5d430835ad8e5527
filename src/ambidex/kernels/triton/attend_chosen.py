"""Attention of one query over chosen far keys, whose scores are given, and near ones, split over the keys.

    s_j = given_j, places_j being chosen;  q · k_j · scale for near j
    out = Σ_j e^(s_j − lse) · v_j

Rows of V of the chosen keys are read where they lie, over the link if that is in pinned host memory, each once for all
query heads of its group: a split has its own rows on their way, and all splits together more than the link delivers in
a round trip. Joined as in `attend_paged`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.triton.attend_paged import (
    _LOG2_E,
    _MIN_GROUP,
    _merge_splits_kernel,
    _num_multiprocessors,
    choose_num_splits,
    choose_tile_keys,
)
from ambidex.kernels.triton.near_and_far import add_tile, split_tiles, store_part


@triton.jit(do_not_specialize=["num_chosen", "num_near"])
def _split_kernel(
    q_ptr, near_k_ptr, near_v_ptr, places_ptr, given_ptr, v_ptr, part_ptr, part_lse_ptr, scale_log2,
    num_chosen, num_near, near_head_stride, v_head_stride,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_keys = num_chosen + num_near
    tile_begin, tile_end = split_tiles(num_keys, split, BLOCK_KEYS, NUM_SPLITS)

    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = heads < GROUP
    is_dim = dims < HEAD_DIM
    is_q = is_head[:, None] & is_dim[None, :]
    q_heads = kv_head * GROUP + heads
    part_rows = q_heads * NUM_SPLITS + split
    if tile_begin >= tile_end:
        tl.store(part_lse_ptr + part_rows, tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32), mask=is_head)
        return

    q = tl.load(q_ptr + q_heads[:, None] * HEAD_DIM + dims[None, :], mask=is_q, other=0.0)
    near_k_ptr += kv_head * near_head_stride
    near_v_ptr += kv_head * near_head_stride
    v_ptr += kv_head * v_head_stride
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], dtype=tl.float32)
    for tile in range(tile_begin, tile_end):
        keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        is_chosen = keys < num_chosen
        is_near = (keys >= num_chosen) & (keys < num_keys)
        places = tl.load(places_ptr + kv_head * num_chosen + keys, mask=is_chosen, other=0).to(tl.int64)
        far_v = tl.load(
            v_ptr + places[:, None] * HEAD_DIM + dims[None, :], mask=is_chosen[:, None] & is_dim[None, :], other=0.0
        )
        given = tl.load(
            given_ptr + q_heads[:, None] * num_chosen + keys[None, :], mask=is_head[:, None] & is_chosen[None, :],
            other=0.0,
        )  # fmt: skip
        far_scores = given.to(tl.float32) * LOG2_E
        top, total, acc, _ = add_tile(
            top, total, acc, q, keys, is_chosen, is_near, far_scores, far_v, near_k_ptr, near_v_ptr, num_chosen, dims,
            is_dim, scale_log2, HEAD_DIM, PRECISION,
        )  # fmt: skip
    store_part(part_ptr, part_lse_ptr, part_rows, top, total, acc, dims, is_head, is_q, HEAD_DIM)


def attend_chosen(
    q: Tensor, near_k: Tensor, near_v: Tensor, places: Tensor, given: Tensor, v: Tensor, *, scale: float
) -> Tensor:
    """See `kernels.api.attend_chosen`."""
    q, places, given = q.contiguous(), places.contiguous(), given.contiguous()
    num_q_heads, head_dim = q.shape
    num_kv_heads, num_chosen = places.shape
    group = num_q_heads // num_kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(num_q_heads, dtype=torch.float32, device=q.device)
    num_splits = choose_num_splits(num_kv_heads, _num_multiprocessors(q.device))
    part = torch.empty((num_q_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_q_heads, num_splits), dtype=torch.float32, device=q.device)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    _split_kernel[(num_splits, num_kv_heads)](
        q, near_k, near_v, places, given, v, part, part_lse, scale * _LOG2_E,
        num_chosen, near_k.shape[1], near_k.stride(0), v.stride(0),
        GROUP=group, GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, BLOCK_KEYS=choose_tile_keys(dim_block, v.element_size()),
        NUM_SPLITS=num_splits, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", LOG2_E=_LOG2_E,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_splits_kernel[(num_q_heads,)](
        part, part_lse, out, lse,
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, NUM_SPLITS=num_splits,
        SPLIT_BLOCK=triton.next_power_of_2(num_splits), num_warps=4,
    )  # fmt: skip
    return out
