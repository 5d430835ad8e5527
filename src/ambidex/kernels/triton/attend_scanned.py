"""Bounded decode attention over keys that lie in pinned host memory: the scan lane (docs/bounded.md).

    scan      K in 8 bits: u_j = z̃_j + δ_j ≥ q·k_j · scale, as a code; Σ exp(u − 2δ)
    choose    for each head, the highest threshold below which Σ exp(u) is at most what may be left out
    keep      keys that some head of the group keeps: scores by K itself, softmax, V; Σ exp(u) of the others
    join      the splits of each head, and what is reported

The first and the third read host memory where it lies, whole lines and each once: K in 8 bits in tile order, 16 keys as
[Dp / 4][16 keys][4 dims], and of a key that is kept K and V side by side. Codes stay on the device: whole eighths of a
factor of 2, rounded up. Counts are whole numbers and sums have a fixed order: the same inputs give the same answer.

The launches depend on shapes alone. Many programs share a multiprocessor: a program waits 2 µs for a tile, of which
`keep` often wants two or three rows only.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ambidex.kernels.reference.scanned import NUM_LANE_FIGURES
from ambidex.kernels.triton.attend_paged import _LOG2_E, _MIN_GROUP, _num_multiprocessors, merge_splits

_PROGRAMS_PER_MULTIPROCESSOR: Final = 4
_MAX_SPLITS: Final = 64
_MAX_TILE_KEYS: Final = 64
_CHUNK: Final = 4096
"""Codes that are counted at a time."""
_ROUNDING: Final = tl.constexpr(2e-5)
"""Of a row's scale times ‖q‖₁: what fp32 takes from a score in each of D additions, beside the half that rounding K to
8 bits may take: 127 · 2⁻²³ at most, since matrix units cut off; the few roundings behind them find room, too."""
_MOST_UNITS: Final = tl.constexpr(3900.0)
"""Scores beyond so many factors of 2 have no code: their row keeps all of its keys."""
_LOWEST: Final = tl.constexpr(-32768)
_NUM_COUNTS: Final = tl.constexpr(256)
_LN_2: Final = tl.constexpr(0.6931471805599453)
_ROUND_UP: Final = tl.constexpr(1.0 + 1e-4)
"""What a sum of fp32 numbers may have lost, with room."""


@triton.jit
def _first_place(num_ptr, row, NUM_ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr):
    """Where the codes of a row's keys begin: behind those of the rows before it."""
    rows = tl.arange(0, ROWS_BLOCK)
    return tl.sum(tl.load(num_ptr + rows, mask=(rows < row) & (rows < NUM_ROWS), other=0).to(tl.int32), axis=0)


@triton.jit
def _scan_kernel(
    q_ptr, scanned_ptr, scales_ptr, norms_ptr, table_ptr, num_ptr, codes_ptr, tops_ptr, lowers_ptr, longest_ptr,
    scale_log2, q_row_stride, q_head_stride, head_blocks, table_stride, max_keys,
    NUM_ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
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
    dims = tl.arange(0, DIM)
    q_heads = kv_head * GROUP + heads
    part_rows = (row * NUM_KV_HEADS * GROUP + q_heads).to(tl.int64) * NUM_SPLITS + split
    part_head = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_SPLITS + split
    # Codes as fp32, which holds them exactly.
    top = tl.full([GROUP_BLOCK], _LOWEST, dtype=tl.float32)
    lower = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    longest = 0.0
    if tile_begin < tile_end:
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row_stride + q_heads[:, None].to(tl.int64) * q_head_stride + dims[None, :],
            mask=(heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        size = tl.sum(tl.abs(q.to(tl.float32)), axis=1)
        first_place = _first_place(num_ptr, row, NUM_ROWS, ROWS_BLOCK)
        codes_row_ptr = codes_ptr + q_heads[:, None].to(tl.int64) * max_keys + first_place
        table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
        numbers = tl.arange(0, KEYS * DIM)
        places = tl.arange(0, KEYS)
        for tile in range(tile_begin, tile_end):
            is_visible = tile * KEYS + places < num_keys
            block_id = tl.load(table_row_ptr + tile * KEYS // BLOCK_SIZE).to(tl.int64)
            block = kv_head.to(tl.int64) * head_blocks + block_id
            slot = block * BLOCK_SIZE + tile * KEYS % BLOCK_SIZE
            lines = tl.load(scanned_ptr + slot * DIM + numbers)
            units = tl.load(scales_ptr + slot + places) * scale_log2
            norm = tl.load(norms_ptr + block * 2 + 1)
            longest = tl.where((norm > longest) | (norm != norm), norm, longest)
            k = tl.reshape(lines, [KEYS // 16, DIM // 4, 16, 4])
            k = tl.reshape(tl.permute(k, [0, 2, 1, 3]), [KEYS, DIM]).to(q.dtype)  # exact: whole numbers up to 127
            errors = size[:, None] * (units * (0.5 + DIM * _ROUNDING))[None, :]
            uppers = tl.dot(q, tl.trans(k), input_precision=PRECISION) * units[None, :] + errors
            is_wild = (uppers >= _MOST_UNITS) | (uppers != uppers)
            codes = tl.where(uppers <= -_MOST_UNITS, -8 * _MOST_UNITS, tl.ceil(uppers * 8))
            codes = tl.where(is_wild, 8 * _MOST_UNITS, codes)
            codes = tl.where(is_visible[None, :], codes, _LOWEST)
            is_code = (heads < GROUP)[:, None] & is_visible[None, :]
            tl.store(codes_row_ptr + tile * KEYS + places[None, :], codes.to(tl.int16), mask=is_code)
            new_top = tl.maximum(top, tl.max(codes, axis=1))
            lowers = tl.minimum(uppers - 2 * errors - new_top[:, None] / 8, 0.0)
            shares = tl.where(is_wild, float("nan"), tl.exp2(lowers))
            shares = tl.where(is_visible[None, :], shares, 0.0)
            lower = lower * tl.exp2((top - new_top) / 8) + tl.sum(shares, axis=1)
            top = new_top
    tl.store(tops_ptr + part_rows, top.to(tl.int32), mask=heads < GROUP)
    tl.store(lowers_ptr + part_rows, lower, mask=heads < GROUP)
    tl.store(longest_ptr + part_head, longest)


@triton.jit
def _choose_kernel(
    codes_ptr, num_ptr, tops_ptr, lowers_ptr, near_lse_ptr, near_part_ptr, all_tops_ptr, thresholds_ptr, max_mass,
    max_keys,
    NUM_ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program finds the threshold of one query head: codes below it count at most what may be left out."""
    q_head = tl.program_id(0)
    row = tl.program_id(1)
    place = (row * NUM_Q_HEADS + q_head).to(tl.int64)
    num_keys = tl.load(num_ptr + row).to(tl.int32)
    splits = tl.arange(0, SPLIT_BLOCK)
    tops = tl.load(tops_ptr + place * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=_LOWEST)
    lowers = tl.load(lowers_ptr + place * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=0.0)
    top = tl.max(tops, axis=0)
    anchor = top.to(tl.float32) / 8
    near = (tl.load(near_lse_ptr + place) + tl.load(near_part_ptr + row)) / _LN_2
    # In units of 2^anchor; NaN where all keys must be kept.
    whole = tl.sum(lowers * tl.exp2((tops - top).to(tl.float32) / 8), axis=0)
    # NOTE: on a GPU tl.minimum of NaN and 60 is 60, by which all keys might be left out.
    whole += tl.exp2(tl.where(near - anchor > 60.0, 60.0, near - anchor))
    limit = max_mass * whole
    first_place = _first_place(num_ptr, row, NUM_ROWS, ROWS_BLOCK)
    codes_row_ptr = codes_ptr + q_head.to(tl.int64) * max_keys + first_place
    places = tl.arange(0, CHUNK)
    counts = tl.zeros([_NUM_COUNTS], dtype=tl.int32)
    for start in range(0, num_keys, CHUNK):
        codes = tl.load(codes_row_ptr + start + places, mask=start + places < num_keys, other=_LOWEST).to(tl.int32)
        counts += tl.histogram(tl.minimum(top - codes, _NUM_COUNTS - 1), _NUM_COUNTS)
    depths = tl.arange(0, _NUM_COUNTS)
    num_unseen = tl.cdiv(num_keys, CHUNK) * CHUNK - num_keys  # counted as the deepest
    counts -= tl.where(depths == _NUM_COUNTS - 1, num_unseen, 0)
    masses = counts.to(tl.float32) * tl.exp2(-depths.to(tl.float32) / 8)
    sums = tl.cumsum(masses, axis=0, reverse=True) * _ROUND_UP  # of this depth and all deeper ones
    num_kept = _NUM_COUNTS - tl.sum((sums <= limit).to(tl.float32), axis=0).to(tl.int32)
    tl.store(all_tops_ptr + place, top)
    tl.store(thresholds_ptr + place, tl.where(num_kept == _NUM_COUNTS, _LOWEST, top + 1 - num_kept))


@triton.jit
def _keep_kernel(
    q_ptr, rows_ptr, table_ptr, num_ptr, codes_ptr, all_tops_ptr, thresholds_ptr, part_ptr, part_lse_ptr, dropped_ptr,
    num_kept_ptr, kept_ptr, scale_log2, q_row_stride, q_head_stride, head_blocks, table_stride, max_keys,
    NUM_ROWS: tl.constexpr, ROWS_BLOCK: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PRECISION: tl.constexpr, COUNTS: tl.constexpr,
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
    dims = tl.arange(0, DIM)
    q_heads = kv_head * GROUP + heads
    is_q = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head_rows = (row * NUM_KV_HEADS * GROUP + q_heads).to(tl.int64)
    part_rows = head_rows * NUM_SPLITS + split
    part_head = (row * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_SPLITS + split
    if tile_begin >= tile_end:
        tl.store(part_lse_ptr + part_rows, tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32), mask=heads < GROUP)
        tl.store(dropped_ptr + part_rows, tl.zeros([GROUP_BLOCK], dtype=tl.float32), mask=heads < GROUP)
        tl.store(num_kept_ptr + part_head, 0.0)
        return
    q = tl.load(
        q_ptr + row.to(tl.int64) * q_row_stride + q_heads[:, None].to(tl.int64) * q_head_stride + dims[None, :],
        mask=is_q, other=0.0,
    )  # fmt: skip
    all_tops = tl.load(all_tops_ptr + head_rows, mask=heads < GROUP, other=0)
    thresholds = tl.load(thresholds_ptr + head_rows, mask=heads < GROUP, other=32768)  # above all codes
    first_place = _first_place(num_ptr, row, NUM_ROWS, ROWS_BLOCK)
    codes_row_ptr = codes_ptr + q_heads[:, None].to(tl.int64) * max_keys + first_place
    table_row_ptr = table_ptr + row.to(tl.int64) * table_stride
    places = tl.arange(0, KEYS)
    top = tl.full([GROUP_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    dropped = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM], dtype=tl.float32)
    num_kept = 0.0  # a whole number, in fp32: so are sums of it in the interpreter
    for tile in range(tile_begin, tile_end):
        is_visible = tile * KEYS + places < num_keys
        is_code = (heads < GROUP)[:, None] & is_visible[None, :]
        codes = tl.load(codes_row_ptr + tile * KEYS + places[None, :], mask=is_code, other=_LOWEST).to(tl.int32)
        is_wanted = tl.max((codes >= thresholds[:, None]).to(tl.int32), axis=0) > 0
        is_kept = is_visible & is_wanted
        num_kept += tl.sum(is_kept.to(tl.float32), axis=0)
        masses = tl.exp2((codes - all_tops[:, None]).to(tl.float32) / 8)
        dropped += tl.sum(tl.where((is_visible & (is_kept == 0))[None, :], masses, 0.0), axis=1)
        block_id = tl.load(table_row_ptr + tile * KEYS // BLOCK_SIZE).to(tl.int64)
        if COUNTS:
            num_new = tl.sum(is_kept.to(tl.int32), axis=0)
            tl.atomic_add(kept_ptr + block_id, num_new, mask=num_new > 0, sem="relaxed")
        slots = (kv_head.to(tl.int64) * head_blocks + block_id) * BLOCK_SIZE + tile * KEYS % BLOCK_SIZE + places
        k_ptrs = rows_ptr + slots[:, None] * (2 * DIM) + dims[None, :]
        k = tl.load(k_ptrs, mask=is_kept[:, None], other=0.0)
        v = tl.load(k_ptrs + DIM, mask=is_kept[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(is_kept[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    is_empty = num_kept == 0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), (top + tl.log2(tl.where(is_empty, 1.0, total))) * _LN_2)
    tl.store(part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :], out, mask=is_q)
    tl.store(part_lse_ptr + part_rows, lse, mask=heads < GROUP)
    tl.store(dropped_ptr + part_rows, dropped, mask=heads < GROUP)
    tl.store(num_kept_ptr + part_head, num_kept)


@triton.jit
def _join_kernel(
    part_ptr, part_lse_ptr, dropped_ptr, num_kept_ptr, longest_ptr, all_tops_ptr, near_lse_ptr, near_part_ptr, out_ptr,
    lse_ptr, figures_ptr,
    NUM_Q_HEADS: tl.constexpr, GROUP: tl.constexpr, NUM_FIGURES: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program joins the splits of one query head, and says what was left out."""
    head = tl.program_id(0).to(tl.int64)
    row = head // NUM_Q_HEADS
    lse = merge_splits(part_ptr, part_lse_ptr, out_ptr, lse_ptr, head, HEAD_DIM, DIM_BLOCK, NUM_SPLITS, SPLIT_BLOCK)
    splits = tl.arange(0, SPLIT_BLOCK)
    is_split = splits < NUM_SPLITS
    dropped = tl.sum(tl.load(dropped_ptr + head * NUM_SPLITS + splits, mask=is_split, other=0.0), axis=0) * _ROUND_UP
    of_head = (head // GROUP) * NUM_SPLITS + splits
    num_kept = tl.sum(tl.load(num_kept_ptr + of_head, mask=is_split, other=0.0), axis=0)
    norms = tl.load(longest_ptr + of_head, mask=is_split, other=0.0)
    longest = tl.max(norms, axis=0)
    longest = tl.where(tl.sum((norms != norms).to(tl.int32), axis=0) > 0, float("nan"), longest)
    # Of the softmax over these keys and their part of what is near: N / (Z + N), N that of those left out, at most.
    near = tl.load(near_lse_ptr + head) + tl.load(near_part_ptr + row)
    larger = tl.maximum(lse, near)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    whole = base + tl.log(tl.exp(lse - base) + tl.exp(near - base) + 1e-37)
    anchor = tl.load(all_tops_ptr + head).to(tl.float32) / 8 * _LN_2
    mass = 1.0 / (1.0 + tl.exp(tl.minimum(whole - anchor - tl.log(tl.where(dropped > 0, dropped, 1.0)), 80.0)))
    tl.store(figures_ptr + head * NUM_FIGURES, tl.where(dropped > 0, mass, 0.0))
    tl.store(figures_ptr + head * NUM_FIGURES + 1, longest)
    tl.store(figures_ptr + head * NUM_FIGURES + 2, num_kept)


def attend_scanned(
    q: Tensor,
    scanned: Tensor,
    scales: Tensor,
    rows: Tensor,
    norms: Tensor,
    block_table: Tensor,
    num_keys: Tensor,
    near_lse: Tensor,
    near_part: Tensor,
    *,
    scale: float,
    max_mass: float,
    max_keys: int,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.api.attend_scanned`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, num_blocks, block_size, dim = scanned.shape
    group = num_q_heads // num_kv_heads
    q = q if q.stride(2) == 1 else q.contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    out, lse, figures = new(*q.shape), new(*q.shape[:2]), new(*q.shape[:2], NUM_LANE_FIGURES)
    if num_rows == 0:
        return out, lse, figures
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(q.device) // (num_rows * num_kv_heads))
    num_splits = max(1, min(wanted, _MAX_SPLITS))
    by_split = (num_rows, num_q_heads, num_splits)
    codes = new(num_q_heads, max_keys, dtype=torch.int16)
    tops, lowers = new(*by_split, dtype=torch.int32), new(*by_split)
    longest, num_kept = (new(num_rows, num_kv_heads, num_splits) for _ in range(2))
    all_tops, thresholds = (new(*by_split[:2], dtype=torch.int32) for _ in range(2))
    part, part_lse, dropped = new(*by_split, head_dim), new(*by_split), new(*by_split)
    grid = (num_splits, num_kv_heads, num_rows)
    strides = (q.stride(0), q.stride(1), num_blocks, block_table.stride(0), max_keys)
    rows_block, split_block = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_splits)
    sizes = {
        "NUM_ROWS": num_rows, "ROWS_BLOCK": rows_block, "NUM_KV_HEADS": num_kv_heads, "GROUP": group,
        "GROUP_BLOCK": max(_MIN_GROUP, triton.next_power_of_2(group)), "HEAD_DIM": head_dim, "DIM": dim,
        "BLOCK_SIZE": block_size, "KEYS": min(_MAX_TILE_KEYS, block_size & -block_size), "NUM_SPLITS": num_splits,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # 16-bit numbers know one precision only
    }  # fmt: skip
    _scan_kernel[grid](
        q, scanned, scales, norms, block_table, num_keys, codes, tops, lowers, longest, scale * _LOG2_E, *strides,
        **sizes, num_warps=4,
    )  # fmt: skip
    _choose_kernel[num_q_heads, num_rows](
        codes, num_keys, tops, lowers, near_lse, near_part, all_tops, thresholds, max_mass * (1 - 2**-10), max_keys,
        NUM_ROWS=num_rows, ROWS_BLOCK=rows_block, NUM_Q_HEADS=num_q_heads, NUM_SPLITS=num_splits,
        SPLIT_BLOCK=split_block, CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _keep_kernel[grid](
        q, rows, block_table, num_keys, codes, all_tops, thresholds, part, part_lse, dropped, num_kept,
        num_kept if kept is None else kept, scale * _LOG2_E, *strides, **sizes, COUNTS=kept is not None, num_warps=4,
    )  # fmt: skip
    _join_kernel[(num_rows * num_q_heads,)](
        part, part_lse, dropped, num_kept, longest, all_tops, near_lse, near_part, out, lse, figures,
        NUM_Q_HEADS=num_q_heads, GROUP=group, NUM_FIGURES=NUM_LANE_FIGURES, HEAD_DIM=head_dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)), NUM_SPLITS=num_splits, SPLIT_BLOCK=split_block,
        num_warps=4,
    )  # fmt: skip
    return out, lse, figures
