"""What queries of a prompt give the keys that they see, added up over the queries.

    x_ij = q_i · k_j · scale        or (q_i · k_j · scale + ζ_ij) / τ with Gumbel noise ζ
    top_i = max_j x_ij              over the keys j that query i sees: those up to its own
    part_i = 1 / Σ_j e^(x_ij − top_i)
    sum_j = Σ_i part_i · e^(x_ij − top_i)    over the queries i that see key j

The log of the sum would do for top and part; rounded, where x is large, it is off by as much as x itself is.

Scores are held by nobody: they are made twice. One program of the first kernel goes over the keys that a tile of
queries of one head sees, one of the second over the queries that see a tile of keys; the tiles that are seen by all are
not masked, those that nobody sees are left out. Sums are added up in one order whatever runs beside them: by tile of
queries, then over the heads of a group.

The floor: n queries that see p pairs of query and key (n · S / 2 where n = S) cost each kernel 2 · p · D · Hq
operations of matrix units and p · Hq exponentials. With D = 128 an H200, whose multiprocessors make 16 exponentials a
cycle and 4,096 operations in 16 bits, needs as long for either: 37 ms for a prompt of 16K tokens, 32 heads and 32
layers, in both kernels twice that, if neither unit waits for the other. With noise instructions are the limit, of which
128 are issued a cycle: as compiled some 95 a pair, half of them in two logarithms and a third in hashes, 0.45 s in each
kernel for such a prompt.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.noise import Noise, seed_words
from ambidex.kernels.triton.noise import noise_uniform, noise_words

_LOG2_E: Final = 1.4426950408889634


class _Tiles(NamedTuple):
    """`own` rows belong to a program, and so many `others` it sees at once."""

    own: int
    others: int
    num_warps: int
    num_stages: int


_TILES: Final = _Tiles(own=128, others=64, num_warps=8, num_stages=3)
"""Compiled for compute capability 9.0 with D = 128: 80 KiB of shared memory and at most 128 registers a thread, so that
two programs share a multiprocessor, one making exponentials while the other multiplies."""
_TILES_NOISY: Final = _Tiles(own=128, others=32, num_warps=4, num_stages=3)
"""56 KiB and at most 175 registers: two programs, and what a thread hashes for a query serves four keys. Tiles twice as
large spill."""
_TILES_FP32: Final = _Tiles(own=64, others=16, num_warps=8, num_stages=2)
"""Products without matrix units: larger tiles spill with D = 64, 128 or 256."""


@triton.jit
def _exponents(
    scores, positions, keys, head, scale_log2, inv_tau, noise_low, noise_high,
    IS_NOISY: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """x · log2(e) of scores q · k, up to a number that all have in common; −inf where a key comes after the query.

    `positions` and `keys` are [n, 1] and [1, n], or the other way round.
    """
    x = scores * scale_log2
    if IS_NOISY:
        first, second = noise_words(positions, head, noise_low, noise_high)
        # ζ = −log(−log u); the inner logarithm must be exact near u = 1, where ζ is large.
        x -= tl.log2(-tl.log(noise_uniform(keys, first, second))) * inv_tau
    if IS_MASKED:
        x = tl.where(keys <= positions, x, float("-inf"))
    return x


@triton.jit
def _load_rows(ptr, tile, row_stride, num_rows, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Rows of a tile, [BLOCK, DIM_BLOCK], 0 where there is none."""
    rows = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    mask = (rows < num_rows - tile * BLOCK)[:, None]
    if DIM_BLOCK != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    ptr += tl.cast(tile, tl.int64) * BLOCK * row_stride
    return tl.load(ptr + rows[:, None] * row_stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _see_keys(
    top, total, q, k_ptr, tile_begin, tile_end, positions, head, num_keys, k_row_stride, scale_log2, inv_tau,
    noise_low, noise_high,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
    IS_NOISY: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The largest number and the sum of the softmax of a tile of queries, with some more tiles of keys."""
    for tile in range(tile_begin, tile_end):
        k = _load_rows(k_ptr, tile, k_row_stride, num_keys, BLOCK_KEYS, HEAD_DIM, DIM_BLOCK)
        keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        x = _exponents(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), positions[:, None], keys[None, :], head, scale_log2,
            inv_tau, noise_low, noise_high, IS_NOISY, IS_MASKED,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(x, axis=1))  # the first tile has a key that each query sees
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(x - new_top[:, None]), axis=1)
        top = new_top
    return top, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "noise_low", "noise_high"])
def _top_kernel(
    q_ptr, k_ptr, tops_ptr, parts_ptr, num_queries, num_keys, scale_log2, inv_tau, noise_low, noise_high,
    q_row_stride, q_head_stride, k_head_stride, k_row_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr, IS_NOISY: tl.constexpr,
):  # fmt: skip
    """top and part of a tile of queries of one head."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # those that see the most keys begin
    first = num_keys - num_queries  # where the first query stands
    rows = tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    positions = first + rows
    q = _load_rows(
        q_ptr + head.to(tl.int64) * q_head_stride, tile, q_row_stride, num_queries, BLOCK_QUERIES, HEAD_DIM, DIM_BLOCK
    )
    k_ptr += (head // GROUP).to(tl.int64) * k_head_stride
    top = tl.full([BLOCK_QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_QUERIES], dtype=tl.float32)
    seen_by_all = (first + tile * BLOCK_QUERIES + 1) // BLOCK_KEYS
    end = tl.cdiv(tl.minimum(first + (tile + 1) * BLOCK_QUERIES, num_keys), BLOCK_KEYS)
    top, total = _see_keys(
        top, total, q, k_ptr, 0, seen_by_all, positions, head, num_keys, k_row_stride, scale_log2, inv_tau,
        noise_low, noise_high, HEAD_DIM, DIM_BLOCK, BLOCK_KEYS, PRECISION, IS_NOISY, False,
    )  # fmt: skip
    top, total = _see_keys(
        top, total, q, k_ptr, seen_by_all, end, positions, head, num_keys, k_row_stride, scale_log2, inv_tau,
        noise_low, noise_high, HEAD_DIM, DIM_BLOCK, BLOCK_KEYS, PRECISION, IS_NOISY, True,
    )  # fmt: skip
    places = head.to(tl.int64) * num_queries + rows
    tl.store(tops_ptr + places, top, mask=rows < num_queries)
    tl.store(parts_ptr + places, 1.0 / total, mask=rows < num_queries)


@triton.jit
def _see_queries(
    sums, k, q_ptr, tops_ptr, parts_ptr, tile_begin, tile_end, keys, head, first, num_queries, q_row_stride,
    scale_log2, inv_tau, noise_low, noise_high,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_QUERIES: tl.constexpr, PRECISION: tl.constexpr,
    IS_NOISY: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """What a tile of keys has got, with some more tiles of queries."""
    for tile in range(tile_begin, tile_end):
        q = _load_rows(q_ptr, tile, q_row_stride, num_queries, BLOCK_QUERIES, HEAD_DIM, DIM_BLOCK)
        rows = tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
        top = tl.load(tops_ptr + rows, mask=rows < num_queries, other=0.0)
        part = tl.load(parts_ptr + rows, mask=rows < num_queries, other=0.0)  # of no query: it gives nothing
        # Keys by queries, so that what is added up lies in one thread, or in four side by side.
        x = _exponents(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), (first + rows)[None, :], keys[:, None], head, scale_log2,
            inv_tau, noise_low, noise_high, IS_NOISY, IS_MASKED,
        )  # fmt: skip
        sums += tl.sum(tl.exp2(x - top[None, :]) * part[None, :], axis=1)
    return sums


@triton.jit(do_not_specialize=["num_queries", "num_keys", "noise_low", "noise_high"])
def _sum_kernel(
    q_ptr, k_ptr, tops_ptr, parts_ptr, sums_ptr, num_queries, num_keys, scale_log2, inv_tau, noise_low, noise_high,
    q_row_stride, q_head_stride, k_head_stride, k_row_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr, IS_NOISY: tl.constexpr,
):  # fmt: skip
    """What all queries of one head give a tile of keys."""
    head = tl.program_id(0)
    tile = tl.program_id(1)  # those that the most queries see begin
    first = num_keys - num_queries
    keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    k = _load_rows(
        k_ptr + (head // GROUP).to(tl.int64) * k_head_stride, tile, k_row_stride, num_keys, BLOCK_KEYS, HEAD_DIM,
        DIM_BLOCK,
    )  # fmt: skip
    q_ptr += head.to(tl.int64) * q_head_stride
    tops_ptr += head.to(tl.int64) * num_queries
    parts_ptr += head.to(tl.int64) * num_queries
    end = tl.cdiv(num_queries, BLOCK_QUERIES)
    begin = tl.maximum(tile * BLOCK_KEYS - first, 0) // BLOCK_QUERIES
    sees_all = tl.minimum(tl.cdiv(tl.maximum((tile + 1) * BLOCK_KEYS - 1 - first, 0), BLOCK_QUERIES), end)
    sums = tl.zeros([BLOCK_KEYS], dtype=tl.float32)
    sums = _see_queries(
        sums, k, q_ptr, tops_ptr, parts_ptr, begin, sees_all, keys, head, first, num_queries, q_row_stride,
        scale_log2, inv_tau, noise_low, noise_high, HEAD_DIM, DIM_BLOCK, BLOCK_QUERIES, PRECISION, IS_NOISY, True,
    )  # fmt: skip
    sums = _see_queries(
        sums, k, q_ptr, tops_ptr, parts_ptr, sees_all, end, keys, head, first, num_queries, q_row_stride,
        scale_log2, inv_tau, noise_low, noise_high, HEAD_DIM, DIM_BLOCK, BLOCK_QUERIES, PRECISION, IS_NOISY, False,
    )  # fmt: skip
    tl.store(sums_ptr + head.to(tl.int64) * num_keys + keys, sums, mask=keys < num_keys)


def sum_prompt_weights(q: Tensor, k: Tensor, *, scale: float, noise: Noise | None) -> Tensor:
    """See `kernels.api.sum_prompt_weights`."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    q, k = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (q, k))
    group = num_q_heads // num_kv_heads
    tops, parts = torch.empty((2, num_q_heads, num_queries), dtype=torch.float32, device=q.device)
    sums = torch.empty((num_q_heads, num_keys), dtype=torch.float32, device=q.device)
    low, high = seed_words(noise.seed) if noise is not None else (0, 0)
    inv_tau = 1 / noise.tau if noise is not None else 1.0
    dim_block = max(16, triton.next_power_of_2(head_dim))
    tiles = _choose_tiles(q.dtype, is_noisy=noise is not None)
    numbers = (num_queries, num_keys, scale * inv_tau * _LOG2_E, inv_tau, low, high)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    shape = {
        "GROUP": group, "HEAD_DIM": head_dim, "DIM_BLOCK": dim_block, "IS_NOISY": noise is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # 16-bit numbers know one precision only
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    _top_kernel[(num_q_heads, triton.cdiv(num_queries, tiles.own))](
        q, k, tops, parts, *numbers, *strides, BLOCK_QUERIES=tiles.own, BLOCK_KEYS=tiles.others, **shape
    )
    _sum_kernel[(num_q_heads, triton.cdiv(num_keys, tiles.own))](
        q, k, tops, parts, sums, *numbers, *strides, BLOCK_QUERIES=tiles.others, BLOCK_KEYS=tiles.own, **shape
    )
    return sums.view(num_kv_heads, group, num_keys).sum(1)


def _choose_tiles(dtype: torch.dtype, *, is_noisy: bool) -> _Tiles:
    if dtype == torch.float32:
        return _TILES_FP32
    return _TILES_NOISY if is_noisy else _TILES
