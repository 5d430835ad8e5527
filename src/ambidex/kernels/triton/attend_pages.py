"""Attention of one query a request over the pages of keys that each query head takes; sizes on the device.

    choose_pages   of each full page j a bound Σ_d max(q_d · low_jd, q_d · high_jd) on q · k of its keys, of each query
                   head, as an integer in its order; the newest page is above all; the cut of each query head as in
                   `attend_early`; the box of the page that the step's own key fills
    attend_pages   s_j = q · k_j · scale, j lying in a page that the head takes;  out = Σ_j e^(s_j − lse) · v_j
                   rows are read where any query head of a KV head takes their page

A box is made of all keys of its page, by the step that fills it, and may be made twice. As in `attend_early` launches
depend on shapes alone, so that a CUDA graph may hold them.
"""

from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.early_rows import BoxRows, EarlyRows, PageCut
from ambidex.kernels.triton.attend_early import find_cut, launch_attention
from ambidex.kernels.triton.attend_paged import _num_multiprocessors, choose_num_splits
from ambidex.kernels.triton.near_and_far import split_tiles

_BOUND_NUMBERS: Final = 2048
"""Of boxes in a tile, least ones and as many largest: with 128 threads, 32 in registers of each thread."""
_FILLED_KEYS: Final = 16
"""Rows of K of a page that are read at a time when it is filled: with 128 numbers, those of a tile, too."""


@triton.jit(do_not_specialize=["layer_idx", "box_layer"])
def _bound_kernel(
    q_ptr, near_k_ptr, near_slots_ptr, far_num_ptr, k_address_ptr, capacity_ptr, layer_rows_ptr, boxes_address_ptr,
    box_capacity_ptr, num_pages_ptr, bound_first_ptr, order_ptr, layer_idx, box_layer, near_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(near_slots_ptr + row)
    num_pages = tl.load(num_pages_ptr + row).to(tl.int32)
    tile_begin, tile_end = split_tiles(num_pages, split, BLOCK, NUM_SPLITS)
    if (slot < 0) | (tile_begin >= tile_end):
        return

    dims = tl.arange(0, DIM_BLOCK)
    is_dim = dims < HEAD_DIM
    boxes_ptr = tl.multiple_of(tl.load(boxes_address_ptr + row).to(tl.pointer_type(tl.float32)), 16)
    boxes_ptr += (box_layer * NUM_KV_HEADS + head) * tl.load(box_capacity_ptr + row) * (2 * HEAD_DIM)
    num_far = tl.load(far_num_ptr + row)
    if (split == 0) & ((num_far + 1) % PAGE_TOKENS == 0):  # nobody reads it in this step: its page is the newest
        low = tl.load(near_k_ptr + head * near_head_stride + slot * HEAD_DIM + dims, mask=is_dim, other=0.0)
        low = low.to(tl.float32)
        high = low
        k_ptr = tl.multiple_of(tl.load(k_address_ptr + row).to(near_k_ptr.dtype), 16)
        k_ptr += (layer_idx * tl.load(layer_rows_ptr + row) + head * tl.load(capacity_ptr + row)) * HEAD_DIM
        for first in range(0, PAGE_TOKENS - 1, ROW_BLOCK):
            places = first + tl.arange(0, ROW_BLOCK)
            is_number = (places < PAGE_TOKENS - 1)[:, None] & is_dim[None, :]
            rows = (num_far - (PAGE_TOKENS - 1) + places)[:, None] * HEAD_DIM + dims[None, :]
            k = tl.load(k_ptr + rows, mask=is_number, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(is_number, k, float("inf")), axis=0))
            high = tl.maximum(high, tl.max(tl.where(is_number, k, float("-inf")), axis=0))
        box_ptr = boxes_ptr + (num_pages - 1).to(tl.int64) * (2 * HEAD_DIM)
        tl.store(box_ptr + dims, low, mask=is_dim)
        tl.store(box_ptr + HEAD_DIM + dims, high, mask=is_dim)

    order_ptr += tl.load(bound_first_ptr + row) + head * GROUP * num_pages
    for tile in range(tile_begin, tile_end):
        pages = tile * BLOCK + tl.arange(0, BLOCK)
        numbers = pages.to(tl.int64)[:, None] * (2 * HEAD_DIM) + dims[None, :]
        is_number = (pages < num_pages - 1)[:, None] & is_dim[None, :]
        lows = tl.load(boxes_ptr + numbers, mask=is_number, other=0.0)
        highs = tl.load(boxes_ptr + HEAD_DIM + numbers, mask=is_number, other=0.0)
        for member in tl.static_range(GROUP):
            q_row = (row * NUM_KV_HEADS + head) * GROUP + member
            q = tl.load(q_ptr + q_row * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
            bounds = tl.sum(tl.maximum(q[None, :] * lows, q[None, :] * highs), axis=1)
            bits = tl.where(bounds == 0.0, 0.0, bounds).to(tl.int32, bitcast=True)  # −0 is no less than 0
            order = tl.where(pages < num_pages - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
            tl.store(order_ptr + member * num_pages + pages, order, mask=pages < num_pages)


def choose_pages(
    q: Tensor, near_k: Tensor, rows: EarlyRows, boxes: BoxRows, *, max_pages: int, layer_idx: int
) -> PageCut:
    """See `kernels.api.choose_pages`."""
    q = q.contiguous()
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = near_k.shape[0]
    order = torch.empty(num_q_heads * max_pages, dtype=torch.int32, device=q.device)
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(q.device))
    dim_block = triton.next_power_of_2(head_dim)
    _bound_kernel[(num_splits, num_kv_heads, num_rows)](
        q, near_k, rows.near_slots, rows.far_num, rows.k_address, rows.capacity, rows.layer_rows,
        boxes.boxes_address, boxes.box_capacity, boxes.num_pages, boxes.bound_first, order, layer_idx,
        layer_idx - boxes.first_layer, near_k.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, DIM_BLOCK=dim_block,
        PAGE_TOKENS=boxes.page_tokens, ROW_BLOCK=_FILLED_KEYS, BLOCK=max(1, _BOUND_NUMBERS // dim_block),
        NUM_SPLITS=num_splits, num_warps=4,
    )  # fmt: skip
    pages = replace(rows, far_num=boxes.num_pages, num_selected=boxes.num_taken, score_first=boxes.bound_first)
    bounds = find_cut(order, pages, num_kv_heads=num_q_heads, group=1, bits=32)
    return PageCut(order=order, bounds=bounds, boxes=boxes)


def attend_pages(
    q: Tensor, near_k: Tensor, near_v: Tensor, cut: PageCut, rows: EarlyRows, *, num_read: Tensor, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_pages`."""
    q = q.contiguous()
    num_read.zero_()
    out, _ = launch_attention(
        q, near_k, near_v, cut, rows, given=None, early=q, layer_idx=layer_idx, scale=scale, num_read=num_read
    )
    return out
