"""Attention of one query a request over the far keys that are held or recent, or the first and the newest, and what
they get of it.

    attend_held   s_j = q · k_j · scale, j being held, recent or near; out = Σ_j e^(s_j − lse) · v_j
    add_sums      sum_j += Σ_h w_hj over the query heads h of a KV head, in which
                  w_h = softmax(s_h), or softmax((s_h + ζ_h) / τ) with Gumbel noise ζ
                  the step's own key is held, too; of the held ones before `drop_end` the one with the least sum is not
    attend_windows   s_j = q' · k_j · scale of the first keys, q · k_j · scale of the newest and of near ones

Only attended keys have scores. A program of `add_sums` goes over the keys of a KV head: with noise once for the largest
number and the sum of its softmax, once for the sums, and once for the flags, when it is known which key is dropped.
Noise: see `kernels/noise.py`. As in `attend_early` launches depend on
shapes alone, so that a CUDA graph may hold them.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.early_rows import EarlyRows, SumRows, SumRule, WindowRows
from ambidex.kernels.noise import seed_words
from ambidex.kernels.triton.attend_early import launch_attention

_SUMMED_KEYS: Final = 1024
"""Keys of a tile whose sums grow: with a group of 4 and 256 threads, 16 scores of each thread."""


@triton.jit
def _hash(words):
    """See `kernels.noise.hash_`; products of 32-bit words wrap as those do that are cut to 32 bits."""
    words ^= words >> 16
    words *= 0x21F0AAAD
    words ^= words >> 15
    words *= 0x735A2D97
    words ^= words >> 15
    return words


@triton.jit
def _noise(position, heads, keys, noise_low, noise_high):
    """Gumbel noise of a query's heads [G] for keys [BLOCK]; see `kernels.noise.gumbel_noise`."""
    position = (heads * 0 + position).to(tl.uint32)
    heads = heads.to(tl.uint32)
    first = _hash(_hash(position ^ noise_low.to(tl.uint32)) ^ heads)
    second = _hash(_hash(heads ^ noise_high.to(tl.uint32)) ^ position)
    bits = _hash(_hash(keys.to(tl.uint32)[None, :] ^ first[:, None]) ^ second[:, None])
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


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
def _add_kernel(
    scores_ptr, lse_ptr, score_first_ptr, near_num_ptr, far_num_ptr, capacity_ptr, sums_from_ptr, sums_to_ptr,
    held_from_ptr, held_to_ptr, recent_first_ptr, drop_end_ptr, tau_ptr, num_attended_ptr, layer_idx, noise_low,
    noise_high,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    IS_NOISY: tl.constexpr, DROPS_FIRST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    num_attended_ptr += row * NUM_KV_HEADS + kv_head
    if tl.load(near_num_ptr + row) == 0:
        tl.store(num_attended_ptr, 0)
        return

    num_far = tl.load(far_num_ptr + row).to(tl.int32)
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
    num_tiles = tl.cdiv(num_far + 1, BLOCK)

    if IS_NOISY:
        top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
        for tile in range(0, num_tiles):
            _, _, _, x = _weigh_tile(
                scores_ptr, held_from, tile, num_far, recent_first, num_far, q_heads, is_head, noise_low, noise_high,
                tau, GROUP_BLOCK, BLOCK, IS_NOISY,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(x, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key has been attended yet
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
            top = new_top
        top = tl.where(is_head, top, 0.0)
        total = tl.where(is_head, total, 1.0)
    else:
        top = tl.load(lse_ptr + row * NUM_KV_HEADS * GROUP + q_heads, mask=is_head, other=0.0)
        total = tl.full([GROUP_BLOCK], 1.0, dtype=tl.float32)

    least = tl.full([BLOCK], float("inf"), dtype=tl.float32)  # of the tiles before, of each lane
    places = tl.full([BLOCK], -1, dtype=tl.int32)
    num_attended = tl.zeros([BLOCK], dtype=tl.int32)
    for tile in range(0, num_tiles):
        keys, is_held, is_attended, x = _weigh_tile(
            scores_ptr, held_from, tile, num_far, recent_first, num_far, q_heads, is_head, noise_low, noise_high, tau,
            GROUP_BLOCK, BLOCK, IS_NOISY,
        )  # fmt: skip
        sums = tl.load(sums_from + keys, mask=keys < num_far, other=0.0)
        sums += tl.sum(tl.exp(x - top[:, None]) / total[:, None], axis=0)
        tl.store(sums_to + keys, sums, mask=keys <= num_far)
        num_attended += (is_attended & (keys < num_far)).to(tl.int32)
        may_go = (is_held | (keys == num_far)) & (keys < drop_end)
        is_less = may_go & ((sums < least) if DROPS_FIRST else (sums <= least))
        least = tl.where(is_less, sums, least)
        places = tl.where(is_less, keys, places)
    tl.store(num_attended_ptr, tl.sum(num_attended, axis=0))

    is_least = (places >= 0) & (least == tl.min(least, axis=0))
    if DROPS_FIRST:
        dropped = tl.min(tl.where(is_least, places, 0x7FFFFFFF), axis=0)
    else:
        dropped = tl.max(tl.where(is_least, places, -1), axis=0)
    for tile in range(0, num_tiles):
        keys = tile * BLOCK + tl.arange(0, BLOCK)
        held = tl.load(held_from + keys, mask=keys < num_far, other=1)
        tl.store(held_to + keys, tl.where(keys == dropped, 0, held), mask=keys <= num_far)


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
    _add_kernel[(num_kv_heads, num_rows)](
        scores, lse, rows.score_first, rows.near_num, rows.far_num, rows.capacity, held.sums_from, held.sums_to,
        held.held_from, held.held_to, held.recent_first, held.drop_end, held.tau, num_attended, layer_idx, low, high,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=triton.next_power_of_2(group), BLOCK=_SUMMED_KEYS,
        IS_NOISY=rule.noise_seed is not None, DROPS_FIRST=rule.drops_first, num_warps=8,
    )  # fmt: skip
