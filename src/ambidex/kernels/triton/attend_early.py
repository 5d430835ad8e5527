"""Attention of one query a request over near keys and the far ones that early scores put first; sizes on the device.

    chosen far keys of a KV head   the K largest of max over its query heads of s_j, the earlier of equal ones first
    s_j = given_j, j being chosen;  q · k_j · scale for near j
    out = Σ_j e^(s_j − lse) · v_j

    bring   scores in host memory ─▶ the device, and of each key an integer in the order of its largest score
    cut     the K-th largest of these, digit by digit: a pass over the keys counts those above 16 candidates
    attend  as in `attend_chosen`, with all far keys gone over: rows of V that are not chosen are not read; without
            given scores the chosen keys get those of an early query, for which their rows of K are read likewise
            (`attend_predicted`), or of q (`attend_held`, `attend_windows`, where flags or places say which are chosen,
            and `attend_pages`, where each query head has its own)
    merge   as in `attend_paged`

How many keys a request has, how many are chosen, where its scores and its rows of V begin: all of that is read on the
device, and the launches depend on the shapes alone, so that a CUDA graph may hold them.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.early_rows import EarlyRows, FarCut, PageCut, SumRows, WindowRows
from ambidex.kernels.triton.attend_paged import (
    _LOG2_E,
    _MIN_GROUP,
    _merge_splits_kernel,
    _num_multiprocessors,
    choose_num_splits,
    choose_tile_keys,
)
from ambidex.kernels.triton.near_and_far import add_tile, split_tiles, store_part

_BROUGHT_KEYS: Final = 512
"""Keys of a tile whose scores are brought: 1 KiB of each query head in 16-bit numbers."""
_COUNTED_KEYS: Final = 2048
"""Keys of a tile that are counted: with 16 candidates and 1024 threads, 32 counts of each thread, in registers."""
_COUNT_WARPS: Final = 32
_DIGIT_BITS: Final = 4


@triton.jit
def _bring_kernel(
    scores_ptr, score_first_ptr, far_num_ptr, given_ptr, order_ptr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2)
    num = tl.load(far_num_ptr + row).to(tl.int32)
    first = tl.load(score_first_ptr + row)
    places = first + head * GROUP * num
    orders = first // GROUP + head * num
    tile_begin, tile_end = split_tiles(num, split, BLOCK, NUM_SPLITS)
    for tile in range(tile_begin, tile_end):
        keys = tile * BLOCK + tl.arange(0, BLOCK)
        is_key = keys < num
        best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for member in tl.static_range(GROUP):
            given = tl.load(scores_ptr + places + member * num + keys, mask=is_key, other=0.0)
            tl.store(given_ptr + places + member * num + keys, given, mask=is_key)
            best = tl.maximum(best, given.to(tl.float32))
        if IS_WIDE:
            bits = best.to(tl.int32, bitcast=True)
            order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        else:
            bits = best.to(given_ptr.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
            order = bits ^ ((bits >> 31) & 0x7FFF)
        tl.store(order_ptr + orders + keys, order, mask=is_key)


@triton.jit
def _cut_kernel(
    order_ptr, score_first_ptr, far_num_ptr, num_selected_ptr, counts_ptr, num_chosen_ptr, cut_ptr,
    NUM_KV_HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr, LOWEST: tl.constexpr, IS_COUNTED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    num = tl.load(far_num_ptr + row).to(tl.int32)
    wanted = tl.minimum(tl.load(num_selected_ptr + row).to(tl.int32), num)
    if IS_COUNTED:
        heads = tl.arange(0, HEAD_BLOCK)
        counts_of_heads = tl.load(counts_ptr + row * NUM_KV_HEADS + heads, mask=heads < NUM_KV_HEADS, other=0)
        wanted = tl.minimum(wanted, tl.sum(counts_of_heads, axis=0) // NUM_KV_HEADS)
        if head == 0:
            tl.store(num_chosen_ptr + row, wanted)
    orders_ptr = order_ptr + tl.load(score_first_ptr + row) // GROUP + head * num
    num_tiles = tl.cdiv(num, BLOCK)
    places = tl.arange(0, BLOCK)
    digits = tl.arange(0, 1 << DIGIT_BITS)
    low = tl.full([], LOWEST, dtype=tl.int32)  # so many keys as are wanted lie at it or above it
    for step in tl.static_range(BITS // DIGIT_BITS):
        candidates = low + (digits << (BITS - DIGIT_BITS * (step + 1)))
        counts = tl.zeros([1 << DIGIT_BITS, BLOCK], dtype=tl.int32)
        for tile in range(0, num_tiles):
            keys = tile * BLOCK + places
            order = tl.load(orders_ptr + keys, mask=keys < num, other=LOWEST)
            counts += ((order[None, :] >= candidates[:, None]) & (keys < num)[None, :]).to(tl.int32)
        is_enough = tl.sum(counts, axis=1) >= wanted
        digit = tl.sum(is_enough.to(tl.int32), axis=0) - 1
        low += digit << (BITS - DIGIT_BITS * (step + 1))
    above = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(0, num_tiles):
        keys = tile * BLOCK + places
        order = tl.load(orders_ptr + keys, mask=keys < num, other=LOWEST)
        above += ((order > low) & (keys < num)).to(tl.int32)
    num_equal = wanted - tl.sum(above, axis=0)  # of those at the cut
    seen = tl.full([], 0, dtype=tl.int32)
    cut = tl.full([], 0, dtype=tl.int32)
    for tile in range(0, num_tiles):
        keys = tile * BLOCK + places
        order = tl.load(orders_ptr + keys, mask=keys < num, other=LOWEST)
        is_equal = ((order == low) & (keys < num)).to(tl.int32)
        is_taken = (is_equal > 0) & (seen + tl.cumsum(is_equal, 0) <= num_equal)
        cut = tl.maximum(cut, tl.max(tl.where(is_taken, keys + 1, 0), axis=0))
        seen += tl.sum(is_equal, axis=0)
    cut_ptr += 2 * (row * NUM_KV_HEADS + head)
    tl.store(cut_ptr, low)
    tl.store(cut_ptr + 1, cut)


@triton.jit(do_not_specialize=["layer_idx"])
def _attend_kernel(
    q_ptr, early_ptr, near_k_ptr, near_v_ptr, near_first_ptr, near_num_ptr, given_ptr, order_ptr, cut_ptr,
    score_first_ptr, far_num_ptr, k_address_ptr, v_address_ptr, capacity_ptr, layer_rows_ptr, held_address_ptr,
    recent_first_ptr, sink_end_ptr, num_pages_ptr, bound_first_ptr, num_read_ptr, scores_ptr, part_ptr, part_lse_ptr,
    scale_log2, layer_idx, near_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    LOG2_E: tl.constexpr, IS_GIVEN: tl.constexpr, IS_HELD: tl.constexpr, IS_WINDOW: tl.constexpr,
    IS_PAGED: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    num_far = tl.load(far_num_ptr + row).to(tl.int32)
    num_keys = num_far + tl.load(near_num_ptr + row).to(tl.int32)
    tile_begin, tile_end = split_tiles(num_keys, split, BLOCK_KEYS, NUM_SPLITS)

    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    is_head = heads < GROUP
    is_dim = dims < HEAD_DIM
    is_q = is_head[:, None] & is_dim[None, :]
    q_heads = (row * NUM_KV_HEADS + kv_head) * GROUP + heads
    part_rows = q_heads * NUM_SPLITS + split
    if tile_begin >= tile_end:
        tl.store(part_lse_ptr + part_rows, tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32), mask=is_head)
        return

    q = tl.load(q_ptr + q_heads[:, None] * HEAD_DIM + dims[None, :], mask=is_q, other=0.0)
    near_first = tl.load(near_first_ptr + row)
    near_k_ptr += kv_head * near_head_stride + near_first * HEAD_DIM
    near_v_ptr += kv_head * near_head_stride + near_first * HEAD_DIM
    score_first = tl.load(score_first_ptr + row)
    capacity = tl.load(capacity_ptr + row)
    far_head = (layer_idx * tl.load(layer_rows_ptr + row) + kv_head * capacity) * HEAD_DIM
    if IS_GIVEN:
        given_ptr += score_first + kv_head * GROUP * num_far
    else:
        k_ptr = tl.multiple_of(tl.load(k_address_ptr + row).to(near_k_ptr.dtype), 16) + far_head
        early = tl.load(early_ptr + q_heads[:, None] * HEAD_DIM + dims[None, :], mask=is_q, other=0.0)
    if IS_HELD:
        held_ptr = tl.load(held_address_ptr + row).to(tl.pointer_type(tl.uint8))
        held_ptr += (layer_idx * NUM_KV_HEADS + kv_head) * capacity
        recent_first = tl.load(recent_first_ptr + row).to(tl.int32)
        scores_ptr += score_first + kv_head * GROUP * num_keys
    elif IS_WINDOW:
        sink_end = tl.load(sink_end_ptr + row).to(tl.int32)
        recent_first = tl.load(recent_first_ptr + row).to(tl.int32)
    elif IS_PAGED:
        num_pages = tl.load(num_pages_ptr + row).to(tl.int32)
        order_ptr += tl.load(bound_first_ptr + row) + kv_head * GROUP * num_pages
        lows = tl.load(cut_ptr + 2 * q_heads, mask=is_head, other=0)
        ends = tl.load(cut_ptr + 2 * q_heads + 1, mask=is_head, other=0)
        num_read = tl.full([], 0, dtype=tl.int32)
    else:
        order_ptr += score_first // GROUP + kv_head * num_far
        cut_ptr += 2 * (row * NUM_KV_HEADS + kv_head)
        low, cut = tl.load(cut_ptr), tl.load(cut_ptr + 1)
    v_ptr = tl.multiple_of(tl.load(v_address_ptr + row).to(near_v_ptr.dtype), 16) + far_head
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], dtype=tl.float32)
    for tile in range(tile_begin, tile_end):
        keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        is_far = keys < num_far
        is_near = (keys >= num_far) & (keys < num_keys)
        if IS_HELD:
            held = tl.load(held_ptr + keys, mask=is_far, other=0)
            is_chosen = is_far & ((held != 0) | (keys >= recent_first))
        elif IS_WINDOW:
            is_chosen = is_far & ((keys < sink_end) | (keys >= recent_first))
        elif IS_PAGED:
            pages = keys // PAGE_TOKENS
            is_pair = is_head[:, None] & is_far[None, :]
            order = tl.load(order_ptr + heads[:, None] * num_pages + pages[None, :], mask=is_pair, other=0)
            is_at_cut = (order == lows[:, None]) & (pages[None, :] < ends[:, None])
            is_taken = is_pair & ((order > lows[:, None]) | is_at_cut)
            is_chosen = tl.max(is_taken.to(tl.int32), axis=0) > 0
            num_read += tl.sum(is_chosen.to(tl.int32), axis=0)
        else:
            order = tl.load(order_ptr + keys, mask=is_far, other=0)
            is_chosen = is_far & ((order > low) | ((order == low) & (keys < cut)))
        far_rows = keys.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        is_far_row = is_chosen[:, None] & is_dim[None, :]
        far_v = tl.load(v_ptr + far_rows, mask=is_far_row, other=0.0)
        if IS_GIVEN:
            given = tl.load(
                given_ptr + heads[:, None] * num_far + keys[None, :], mask=is_head[:, None] & is_chosen[None, :],
                other=0.0,
            )  # fmt: skip
            far_scores = given.to(tl.float32) * LOG2_E
        else:
            far_k = tl.load(k_ptr + far_rows, mask=is_far_row, other=0.0)
            far_scores = tl.dot(early, tl.trans(far_k), input_precision=PRECISION) * scale_log2
            if IS_WINDOW:
                recent_scores = tl.dot(q, tl.trans(far_k), input_precision=PRECISION) * scale_log2
                far_scores = tl.where((keys < sink_end)[None, :], far_scores, recent_scores)
            elif IS_PAGED:
                far_scores = tl.where(is_taken, far_scores, float("-inf"))
        top, total, acc, scores = add_tile(
            top, total, acc, q, keys, is_chosen, is_near, far_scores, far_v, near_k_ptr, near_v_ptr, num_far, dims,
            is_dim, scale_log2, HEAD_DIM, PRECISION,
        )  # fmt: skip
        if IS_HELD:
            tl.store(
                scores_ptr + heads[:, None] * num_keys + keys[None, :], scores / LOG2_E,
                mask=is_head[:, None] & (is_chosen | is_near)[None, :],
            )  # fmt: skip
    store_part(part_ptr, part_lse_ptr, part_rows, top, total, acc, dims, is_head, is_q, HEAD_DIM)
    if IS_PAGED:
        tl.atomic_add(num_read_ptr + row * NUM_KV_HEADS + kv_head, num_read)


def attend_early(
    q: Tensor, near_k: Tensor, near_v: Tensor, scores: Tensor, rows: EarlyRows, *, layer_idx: int, scale: float
) -> Tensor:
    """See `kernels.api.attend_early`."""
    q = q.contiguous()
    num_kv_heads, num_rows = near_k.shape[0], len(q)
    group = q.shape[1] // num_kv_heads
    given = torch.empty(scores.shape, dtype=scores.dtype, device=q.device)
    order = torch.empty(scores.numel() // group, dtype=torch.int32, device=q.device)
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(q.device))
    is_wide = scores.dtype == torch.float32
    _bring_kernel[(num_splits, num_kv_heads, num_rows)](
        scores, rows.score_first, rows.far_num, given, order,
        GROUP=group, BLOCK=_BROUGHT_KEYS, NUM_SPLITS=num_splits, IS_WIDE=is_wide, num_warps=4,
    )  # fmt: skip
    bounds = find_cut(order, rows, num_kv_heads=num_kv_heads, group=group, bits=32 if is_wide else 16)
    cut = FarCut(order=order, bounds=bounds)
    out, _ = launch_attention(q, near_k, near_v, cut, rows, given=given, early=None, layer_idx=layer_idx, scale=scale)
    return out


def find_cut(
    order: Tensor,
    rows: EarlyRows,
    *,
    num_kv_heads: int,
    group: int,
    bits: int,
    counts: Tensor | None = None,
    num_chosen: Tensor | None = None,
) -> Tensor:
    """Launch: find the bounds of `FarCut`.

    Args:
        order: see `FarCut`; `bits` of these integers are used, 16 or 32.
        counts: [B, Hkv] int32, whose mean over the heads is how many are chosen, if `num_selected` is not less;
            `num_chosen` [B] int32 is told how many. None: `num_selected` are.
    """
    num_rows = len(rows.far_num)
    bounds = torch.empty((num_rows, num_kv_heads, 2), dtype=torch.int32, device=order.device)
    _cut_kernel[(num_kv_heads, num_rows)](
        order, rows.score_first, rows.far_num, rows.num_selected, counts, num_chosen, bounds,
        NUM_KV_HEADS=num_kv_heads, HEAD_BLOCK=triton.next_power_of_2(num_kv_heads), GROUP=group, BLOCK=_COUNTED_KEYS,
        BITS=bits, DIGIT_BITS=_DIGIT_BITS, LOWEST=-(1 << (bits - 1)), IS_COUNTED=counts is not None,
        num_warps=_COUNT_WARPS,
    )  # fmt: skip
    return bounds


def launch_attention(
    q: Tensor,
    near_k: Tensor,
    near_v: Tensor,
    chosen: FarCut | SumRows | WindowRows | PageCut,
    rows: EarlyRows,
    *,
    given: Tensor | None,
    early: Tensor | None,
    layer_idx: int,
    scale: float,
    scores: Tensor | None = None,
    num_read: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch: attend over near keys and chosen far ones; [B, Hq, D], and the lse [B, Hq].

    Args:
        chosen: which far keys; those of `SumRows` are the held and the recent ones, of `WindowRows` the first and the
            newest; `PageCut` says it of each query head.
        given: scores of all far keys; None: the chosen ones get those of the `early` queries, which lie as q does; of
            `WindowRows` the first ones alone.
        scores: takes the scores of attended keys, of each request [Hkv, G, far + near] from `score_first` on; goes with
            `SumRows`.
        num_read: [B, Hkv] int32, to which is added how many far rows are read; goes with `PageCut`.
    """
    cut = chosen if isinstance(chosen, FarCut | PageCut) else None
    boxes = chosen.boxes if isinstance(chosen, PageCut) else None
    held = chosen if isinstance(chosen, SumRows) else None
    windows = chosen if isinstance(chosen, WindowRows) else None
    recent_first = held.recent_first if held is not None else None if windows is None else windows.window_first
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, device = near_k.shape[0], q.device
    group = num_q_heads // num_kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(device))
    part = torch.empty((num_rows, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=device)
    part_lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=device)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    _attend_kernel[(num_splits, num_kv_heads, num_rows)](
        q, early, near_k, near_v, rows.near_first, rows.near_num, given, None if cut is None else cut.order,
        None if cut is None else cut.bounds, rows.score_first, rows.far_num, rows.k_address, rows.v_address,
        rows.capacity, rows.layer_rows, None if held is None else held.held_from, recent_first,
        None if windows is None else windows.sink_end, None if boxes is None else boxes.num_pages,
        None if boxes is None else boxes.bound_first, num_read, scores, part, part_lse, scale * _LOG2_E,
        layer_idx, near_k.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(_MIN_GROUP, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, BLOCK_KEYS=choose_tile_keys(dim_block, near_v.element_size()),
        NUM_SPLITS=num_splits, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", LOG2_E=_LOG2_E,
        IS_GIVEN=given is not None, IS_HELD=held is not None, IS_WINDOW=windows is not None, IS_PAGED=boxes is not None,
        PAGE_TOKENS=1 if boxes is None else boxes.page_tokens, num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_splits_kernel[(num_rows * num_q_heads,)](
        part, part_lse, out, lse,
        HEAD_DIM=head_dim, DIM_BLOCK=dim_block, NUM_SPLITS=num_splits,
        SPLIT_BLOCK=triton.next_power_of_2(num_splits), num_warps=4,
    )  # fmt: skip
    return out, lse
