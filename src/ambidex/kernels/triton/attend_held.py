"""Attention of one query a request over the far keys that are held or recent, or the first and the newest, and what
they get of it.

    attend_held   s_j = q · k_j · scale, j being held, recent or near; out = Σ_j e^(s_j − lse) · v_j
    add_sums      sum_j += Σ_h w_hj over the query heads h of a KV head, in which
                  w_h = softmax(s_h), or softmax((s_h + ζ_h) / τ) with Gumbel noise ζ
                  the step's own key is held, too; of the held ones before `drop_end` the one with the least sum is not
    attend_windows   s_j = q' · k_j · scale of the first keys, q · k_j · scale of the newest and of near ones

Only attended keys have scores. The programs of `add_sums` share the keys of a KV head: with noise they go over them
once for the largest number and the sum of its softmax, then for sums and flags; at last one looks which key is dropped.
Noise: see `kernels/noise.py`. As in `attend_early` launches depend on shapes alone: a CUDA graph may hold them.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.early_rows import EarlyRows, SumRows, SumRule, WindowRows
from ambidex.kernels.noise import seed_words
from ambidex.kernels.triton.attend_early import launch_attention
from ambidex.kernels.triton.attend_paged import _num_multiprocessors, choose_num_splits
from ambidex.kernels.triton.near_and_far import split_tiles
from ambidex.kernels.triton.noise import noise_uniform, noise_words

_SUMMED_KEYS: Final = 512
"""Keys of a tile whose sums grow: with a group of 4 and 128 threads, 16 scores of each thread."""


@triton.jit
def _noise(position, heads, keys, noise_low, noise_high):
    """Gumbel noise of a query's heads [G] for keys [BLOCK]; see `kernels.noise.gumbel_noise`."""
    first, second = noise_words(heads * 0 + position, heads, noise_low, noise_high)
    return -tl.log(-tl.log(noise_uniform(keys[None, :], first[:, None], second[:, None])))


@triton.jit
def _weigh_tile(
    scores_ptr, held_ptr, tile, num_far, recent_first, position, q_heads, is_head, noise_low, noise_high, tau,
    GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, IS_NOISY: tl.constexpr,
):  # fmt: skip
    """Of a tile: its keys, which of them are held and attended, and what the softmax that adds to the sums is of."""
    keys = tile * BLOCK + tl.arange(0, BLOCK)
    is_held = tl.load(held_ptr + keys, mask=keys < num_far, other=0) != 0
    is_attended = is_held | ((keys >= recent_first) & (keys <= num_far))
    is_score = is_head[:, None] & is_attended[None, :]
    heads = tl.arange(0, GROUP_BLOCK)
    x = tl.load(scores_ptr + heads[:, None] * (num_far + 1) + keys[None, :], mask=is_score, other=0.0)
    if IS_NOISY:
        x = (x + _noise(position, q_heads, keys, noise_low, noise_high)) / tau
    return keys, is_held, is_attended, tl.where(is_score, x, float("-inf"))


@triton.jit(do_not_specialize=["layer_idx", "noise_low", "noise_high"])
def _noisy_kernel(
    scores_ptr, score_first_ptr, near_num_ptr, far_num_ptr, capacity_ptr, held_from_ptr, recent_first_ptr, tau_ptr,
    tops_ptr, totals_ptr, layer_idx, noise_low, noise_high,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Of a split: the largest number of the noisy softmax of each query head, and the sum of what it is to."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    num_far = tl.load(far_num_ptr + row).to(tl.int32)
    tile_begin, tile_end = split_tiles(num_far + 1, split, BLOCK, NUM_SPLITS)
    heads = tl.arange(0, GROUP_BLOCK)
    is_head = heads < GROUP
    q_heads = kv_head.to(tl.int32) * GROUP + heads
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    if (tl.load(near_num_ptr + row) > 0) & (tile_begin < tile_end):
        recent_first = tl.load(recent_first_ptr + row).to(tl.int32)
        first_row = (layer_idx * NUM_KV_HEADS + kv_head) * tl.load(capacity_ptr + row)
        held_from = tl.load(held_from_ptr + row).to(tl.pointer_type(tl.uint8)) + first_row
        tau = tl.load(tau_ptr + row).to(tl.int32).to(tl.float32, bitcast=True)
        scores_ptr += tl.load(score_first_ptr + row) + kv_head * GROUP * (num_far + 1)
        for tile in range(tile_begin, tile_end):
            _, _, _, x = _weigh_tile(
                scores_ptr, held_from, tile, num_far, recent_first, num_far, q_heads, is_head, noise_low, noise_high,
                tau, GROUP_BLOCK, BLOCK, True,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(x, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key has been attended yet
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
            top = new_top
    places = (row * NUM_KV_HEADS * GROUP + q_heads) * NUM_SPLITS + split
    tl.store(tops_ptr + places, top, mask=is_head)
    tl.store(totals_ptr + places, total, mask=is_head)


@triton.jit(do_not_specialize=["layer_idx", "noise_low", "noise_high"])
def _add_kernel(
    scores_ptr, lse_ptr, tops_ptr, totals_ptr, score_first_ptr, near_num_ptr, far_num_ptr, capacity_ptr, sums_from_ptr,
    sums_to_ptr, held_from_ptr, held_to_ptr, recent_first_ptr, drop_end_ptr, tau_ptr, least_ptr, places_ptr,
    counts_ptr, layer_idx, noise_low, noise_high,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, IS_NOISY: tl.constexpr, DROPS_FIRST: tl.constexpr,
):  # fmt: skip
    """Of a split: its sums and flags, the key that may go with the least sum (−1: none), and the keys attended."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    part = (row * NUM_KV_HEADS + kv_head) * NUM_SPLITS + split
    num_far = tl.load(far_num_ptr + row).to(tl.int32)
    tile_begin, tile_end = split_tiles(num_far + 1, split, BLOCK, NUM_SPLITS)
    if (tl.load(near_num_ptr + row) == 0) | (tile_begin >= tile_end):
        tl.store(least_ptr + part, float("inf"))
        tl.store(places_ptr + part, -1)
        tl.store(counts_ptr + part, 0)
        return

    recent_first = tl.load(recent_first_ptr + row).to(tl.int32)
    drop_end = tl.load(drop_end_ptr + row).to(tl.int32)
    first_row = (layer_idx * NUM_KV_HEADS + kv_head) * tl.load(capacity_ptr + row)
    sums_from = tl.multiple_of(tl.load(sums_from_ptr + row).to(tl.pointer_type(tl.float32)), 16) + first_row
    sums_to = tl.multiple_of(tl.load(sums_to_ptr + row).to(tl.pointer_type(tl.float32)), 16) + first_row
    held_from = tl.load(held_from_ptr + row).to(tl.pointer_type(tl.uint8)) + first_row
    held_to = tl.load(held_to_ptr + row).to(tl.pointer_type(tl.uint8)) + first_row
    tau = tl.load(tau_ptr + row).to(tl.int32).to(tl.float32, bitcast=True)
    scores_ptr += tl.load(score_first_ptr + row) + kv_head * GROUP * (num_far + 1)
    heads = tl.arange(0, GROUP_BLOCK)
    is_head = heads < GROUP
    q_heads = kv_head.to(tl.int32) * GROUP + heads
    all_heads = row * NUM_KV_HEADS * GROUP + q_heads

    if IS_NOISY:
        splits = tl.arange(0, SPLIT_BLOCK)
        is_split = is_head[:, None] & (splits < NUM_SPLITS)[None, :]
        of_splits = all_heads[:, None] * NUM_SPLITS + splits[None, :]
        tops = tl.load(tops_ptr + of_splits, mask=is_split, other=float("-inf"))
        totals = tl.load(totals_ptr + of_splits, mask=is_split, other=0.0)
        top = tl.where(is_head, tl.max(tops, axis=1), 0.0)  # the step's own key is always attended
        total = tl.where(is_head, tl.sum(totals * tl.exp(tops - top[:, None]), axis=1), 1.0)
    else:
        top = tl.load(lse_ptr + all_heads, mask=is_head, other=0.0)
        total = tl.full([GROUP_BLOCK], 1.0, dtype=tl.float32)

    least = tl.full([BLOCK], float("inf"), dtype=tl.float32)  # of the tiles before, of each lane
    places = tl.full([BLOCK], -1, dtype=tl.int32)
    num_attended = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(tile_begin, tile_end):
        keys, is_held, is_attended, x = _weigh_tile(
            scores_ptr, held_from, tile, num_far, recent_first, num_far, q_heads, is_head, noise_low, noise_high, tau,
            GROUP_BLOCK, BLOCK, IS_NOISY,
        )  # fmt: skip
        sums = tl.load(sums_from + keys, mask=keys < num_far, other=0.0)
        sums += tl.sum(tl.exp(x - top[:, None]) / total[:, None], axis=0)
        tl.store(sums_to + keys, sums, mask=keys <= num_far)
        is_now = is_held | (keys == num_far)
        tl.store(held_to + keys, is_now.to(tl.uint8), mask=keys <= num_far)
        num_attended += (is_attended & (keys < num_far)).to(tl.int32)
        may_go = is_now & (keys < drop_end)
        is_less = may_go & ((sums < least) if DROPS_FIRST else (sums <= least))
        least = tl.where(is_less, sums, least)
        places = tl.where(is_less, keys, places)
    place = _find_least(least, places, DROPS_FIRST)
    tl.store(least_ptr + part, tl.min(least, axis=0))
    tl.store(places_ptr + part, place)
    tl.store(counts_ptr + part, tl.sum(num_attended, axis=0))


@triton.jit
def _find_least(least, places, DROPS_FIRST: tl.constexpr):
    """Of some places, −1 being none, the first or the last of those with the least sum; −1: there is none."""
    is_least = (places >= 0) & (least == tl.min(least, axis=0))
    if DROPS_FIRST:
        first = tl.min(tl.where(is_least, places, 0x7FFFFFFF), axis=0)
        found = tl.where(first == 0x7FFFFFFF, -1, first)
    else:
        found = tl.max(tl.where(is_least, places, -1), axis=0)
    return found


@triton.jit(do_not_specialize=["layer_idx"])
def _drop_kernel(
    near_num_ptr, capacity_ptr, held_to_ptr, least_ptr, places_ptr, counts_ptr, num_attended_ptr, layer_idx,
    NUM_KV_HEADS: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, DROPS_FIRST: tl.constexpr,
):  # fmt: skip
    """Of a KV head: the key with the least sum of all splits is held no more."""
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    head = row * NUM_KV_HEADS + kv_head
    splits = tl.arange(0, SPLIT_BLOCK)
    is_split = splits < NUM_SPLITS
    parts = head * NUM_SPLITS + splits
    counts = tl.load(counts_ptr + parts, mask=is_split, other=0)
    tl.store(num_attended_ptr + head, tl.sum(counts, axis=0))
    least = tl.load(least_ptr + parts, mask=is_split, other=float("inf"))
    dropped = _find_least(least, tl.load(places_ptr + parts, mask=is_split, other=-1), DROPS_FIRST)
    if (tl.load(near_num_ptr + row) > 0) & (dropped >= 0):
        first_row = (layer_idx * NUM_KV_HEADS + kv_head) * tl.load(capacity_ptr + row)
        held_to = tl.load(held_to_ptr + row).to(tl.pointer_type(tl.uint8)) + first_row
        tl.store(held_to + dropped, 0)


def attend_held(
    q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, held: SumRows, *, max_far: int, layer_idx: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `kernels.api.attend_held`."""
    q = q.contiguous()
    scores = torch.empty(q.shape[1] * (max_far + len(q)), dtype=torch.float32, device=q.device)
    out, lse = launch_attention(
        q, near_k, near_v, held, rows, given=None, early=q, layer_idx=layer_idx, scale=scale, scores=scores
    )
    return out, lse, scores


def attend_windows(
    q: Tensor, sink_q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, windows: WindowRows, *,
    layer_idx: int, scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_windows`."""
    out, _ = launch_attention(
        q.contiguous(), near_k, near_v, windows, rows, given=None, early=sink_q.contiguous(), layer_idx=layer_idx,
        scale=scale,
    )  # fmt: skip
    return out


def add_sums(
    scores: Tensor, lse: Tensor, rows: EarlyRows, held: SumRows, rule: SumRule, *, num_attended: Tensor, layer_idx: int
) -> None:
    """See `kernels.api.add_sums`."""
    num_rows, num_kv_heads = num_attended.shape
    group = lse.shape[1] // num_kv_heads
    low, high = seed_words(rule.noise_seed) if rule.noise_seed is not None else (0, 0)
    num_splits = choose_num_splits(num_rows * num_kv_heads, _num_multiprocessors(scores.device))
    split_block = triton.next_power_of_2(num_splits)
    grid = (num_splits, num_kv_heads, num_rows)
    tops = totals = lse
    sizes = {"NUM_KV_HEADS": num_kv_heads, "NUM_SPLITS": num_splits}
    tiles = {"GROUP": group, "GROUP_BLOCK": triton.next_power_of_2(group), "BLOCK": _SUMMED_KEYS, "num_warps": 4}
    if rule.noise_seed is not None:
        tops, totals = torch.empty((2, num_rows, lse.shape[1], num_splits), dtype=torch.float32, device=scores.device)
        _noisy_kernel[grid](
            scores, rows.score_first, rows.near_num, rows.far_num, rows.capacity, held.held_from, held.recent_first,
            held.tau, tops, totals, layer_idx, low, high, **sizes, **tiles,
        )  # fmt: skip
    least = torch.empty((num_rows, num_kv_heads, num_splits), dtype=torch.float32, device=scores.device)
    places, counts = torch.empty((2, *least.shape), dtype=torch.int32, device=scores.device)
    _add_kernel[grid](
        scores, lse, tops, totals, rows.score_first, rows.near_num, rows.far_num, rows.capacity, held.sums_from,
        held.sums_to, held.held_from, held.held_to, held.recent_first, held.drop_end, held.tau, least, places, counts,
        layer_idx, low, high, **sizes, **tiles,
        SPLIT_BLOCK=split_block, IS_NOISY=rule.noise_seed is not None, DROPS_FIRST=rule.drops_first,
    )  # fmt: skip
    _drop_kernel[num_kv_heads, num_rows](
        rows.near_num, rows.capacity, held.held_to, least, places, counts, num_attended, layer_idx, **sizes,
        SPLIT_BLOCK=split_block, DROPS_FIRST=rule.drops_first, num_warps=1,
    )  # fmt: skip
