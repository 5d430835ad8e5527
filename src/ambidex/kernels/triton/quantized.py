"""x · Wᵀ with W quantised, from the layout of native products (csrc/ops/quant.h), on a GPU.

y[t, n] = Σ over blocks b of d[n, b] · Σ over k of x[t, 32 b + k] · q[n, 32 b + k]          sums in fp32
          + m[n, b] · Σ over k of x[t, 32 b + k]                                           Q4_1 alone

16 rows are a group, a group is a run of records of 32 numbers: 16 fp16 scales d, 16 fp16 minima m (Q4_1), then lines of
64 bytes of which row r has the word 4 r … 4 r + 3. A word of Q8_0 holds numbers 4 l + 0, 2, 1, 3 in its bytes; one of
Q4_0 or Q4_1 the numbers 8 l + 2 p in bits 4 p and 8 l + 2 p + 1 in bits 16 + 4 p, in Q4_0 each more by 8. So integers
of a record are taken as they come, and the numbers of x in the same order. Integers are exact in every format of x;
scales are applied to sums.

With many tokens each tile of them would take the integers apart anew. Then some rows at a time are widened to the
format of x, in their order in memory, and torch multiplies them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS: Final = 16
RECORD_BYTES: Final[Mapping[str, int]] = {"Q8_0": 32 + 8 * 64, "Q4_0": 32 + 4 * 64, "Q4_1": 64 + 4 * 64}
"""Types with a kernel, and bytes of a record of 16 rows and 32 numbers."""
_TILE_N: Final = 64
"""Rows of a program: 4 groups."""
_LEAST_PROGRAMS: Final = 1024
"""A program waits for memory in each of its records, so a multiprocessor needs several: fewer tiles than this are cut
along the rows, too, and a second kernel sums up what the pieces give."""
_MOST_SPLITS: Final = 16
_LEAST_BLOCKS: Final = 8
"""Of a piece of a row."""
_SUM_NUMBERS: Final = 1024

MOST_TILED_TOKENS: Final = 64
"""Up to one tile of tokens, which takes each integer apart once. With two tiles widening costs as much: a number is
written and read once more in 16 bits, 4 bytes beside the kernel's half byte, at a rate some 5 times the kernel's."""
_PIECE_NUMBERS: Final = 1 << 24
"""That are widened at a time: 32 MiB in 16 bits; 2048 rows of 8192 numbers make with 1024 tokens a product that fills a
GPU, beside which two launches are nothing."""
_ITEMS: Final = 128
"""Rows of blocks that a program widens: those of 8 records, 4096 numbers."""


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "blocks_per_split"])  # each piece of a matrix has its own
def _multiply_kernel(
    x_ptr, words_ptr, scales_ptr, y_ptr, num_tokens, num_rows, num_blocks, blocks_per_split, x_stride, y_stride,
    RECORD: tl.constexpr, HEAD: tl.constexpr, OFFSET: tl.constexpr, LINES: tl.constexpr, PER_WORD: tl.constexpr,
    TILE_T: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2).to(tl.int64)
    first_block = tl.program_id(2) * blocks_per_split
    last_block = tl.minimum(first_block + blocks_per_split, num_blocks)
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    tokens = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    is_token = tokens < num_tokens
    group = (rows // 16).to(tl.int64)
    is_group = rows < (num_rows + 15) // 16 * 16
    line, place = tl.arange(0, LINES), tl.arange(0, PER_WORD)
    if PER_WORD == 4:
        number = tl.where(place == 1, 2, tl.where(place == 2, 1, place))
    else:
        number = tl.where(place < 4, 2 * place, 2 * place - 7)
    shift = place * (32 // PER_WORD)
    order = tl.reshape(
        line[:, None] * PER_WORD + number[None, :], (32,)
    )  # which number of a block is the k-th one here
    acc = tl.zeros((TILE_T, TILE_N), dtype=tl.float32)
    for block in range(first_block, last_block):
        record = (group * num_blocks + block) * RECORD
        words = tl.load(
            words_ptr + ((record + HEAD) // 4)[:, None] + line[None, :] * 16 + (rows % 16)[:, None],
            mask=is_group[:, None], other=0,
        )  # [TILE_N, LINES]  # fmt: skip
        scales = tl.load(scales_ptr + record // 2 + rows % 16, mask=is_group, other=0.0).to(tl.float32)
        if PER_WORD == 4:
            numbers = (words[:, :, None] << (24 - shift)[None, None, :]) >> 24  # the sign comes along
        else:
            numbers = ((words[:, :, None] >> shift[None, None, :]) & 15) - OFFSET
        q = tl.reshape(numbers, (TILE_N, 32)).to(x_ptr.dtype.element_ty)
        x = tl.load(
            x_ptr + tokens.to(tl.int64)[:, None] * x_stride + block * 32 + order[None, :],
            mask=is_token[:, None], other=0.0,
        )  # fmt: skip
        acc += tl.dot(x, tl.trans(q), input_precision="ieee") * scales[None, :]
        if HEAD == 64:
            minima = tl.load(scales_ptr + record // 2 + 16 + rows % 16, mask=is_group, other=0.0).to(tl.float32)
            acc += tl.sum(x.to(tl.float32), axis=1)[:, None] * minima[None, :]
    out = y_ptr + (split * num_tokens + tokens.to(tl.int64))[:, None] * y_stride + rows[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=is_token[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _sum_kernel(part_ptr, y_ptr, num_numbers, num_splits, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_number = places < num_numbers
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(part_ptr + split * num_numbers + places, mask=is_number, other=0.0)
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["num_items", "num_blocks"])
def _widen_kernel(
    words_ptr, scales_ptr, out_ptr, num_items, num_blocks,
    RECORD: tl.constexpr, HEAD: tl.constexpr, OFFSET: tl.constexpr, LINES: tl.constexpr, PER_WORD: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)  # record after record, of each its 16 rows
    is_item = item < num_items
    row, record = item % 16, item // 16
    line, place = tl.arange(0, LINES), tl.arange(0, PER_WORD)
    shift = place * (32 // PER_WORD)
    words = tl.load(
        words_ptr + ((record * RECORD + HEAD) // 4 + row)[:, None] + line[None, :] * 16, mask=is_item[:, None], other=0
    )  # [ITEMS, LINES]
    scales = tl.load(scales_ptr + record * RECORD // 2 + row, mask=is_item, other=0.0).to(tl.float32)
    if PER_WORD == 4:
        numbers = (words[:, :, None] << (24 - shift)[None, None, :]) >> 24  # the sign comes along
    else:
        numbers = ((words[:, :, None] >> shift[None, None, :]) & 15) - OFFSET
    values = tl.reshape(numbers, (ITEMS, 32)).to(tl.float32) * scales[:, None]
    if HEAD == 64:
        minima = tl.load(scales_ptr + record * RECORD // 2 + 16 + row, mask=is_item, other=0.0).to(tl.float32)
        values += minima[:, None]
    to = (record // num_blocks * 16 + row) * num_blocks * 32 + record % num_blocks * 32
    tl.store(
        out_ptr + to[:, None] + tl.arange(0, 32)[None, :], values.to(out_ptr.dtype.element_ty), mask=is_item[:, None]
    )


def multiply(x: Tensor, data: Tensor, kind: str, num_rows: int) -> Tensor:
    """The product with a packed matrix.

    Args:
        x: [T, K] fp32, bf16 or fp16, rows contiguous.
        data: [ceil(N / 16), bytes of 16 rows] uint8 on the same device, of a kind in RECORD_BYTES.
        num_rows: N.
    Returns:
        [T, N] in the dtype of x.
    """
    num_tokens, width = x.shape
    y = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    if num_tokens > MOST_TILED_TOKENS:
        _multiply_widened(x, data, kind, y)
        return y
    tile_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    num_tiles, num_blocks = triton.cdiv(num_rows, _TILE_N), width // 32
    blocks_per_split = triton.cdiv(num_blocks, choose_num_splits(num_tiles, num_blocks))
    num_splits = triton.cdiv(num_blocks, blocks_per_split)
    to = y if num_splits == 1 else x.new_empty((num_splits, num_tokens, num_rows), dtype=torch.float32)
    _multiply_kernel[(num_tiles, 1, num_splits)](
        x, data.view(torch.int32), data.view(torch.float16), to, num_tokens, num_rows, num_blocks, blocks_per_split,
        x.stride(0), num_rows, **_layout(kind), TILE_T=tile_t, TILE_N=_TILE_N, num_warps=4,
    )  # fmt: skip
    if num_splits > 1:
        _sum_kernel[(triton.cdiv(y.numel(), _SUM_NUMBERS),)](
            to, y, y.numel(), num_splits, BLOCK=_SUM_NUMBERS, num_warps=4
        )
    return y


def choose_num_splits(num_tiles: int, num_blocks: int) -> int:
    """Pieces of each row, so that there are enough programs."""
    most = max(1, min(_MOST_SPLITS, num_blocks // _LEAST_BLOCKS))
    return min(most, -(-_LEAST_PROGRAMS // num_tiles))


def _multiply_widened(x: Tensor, data: Tensor, kind: str, y: Tensor) -> None:
    """Some rows after the other, in the format of x."""
    (num_tokens, width), num_rows = x.shape, y.shape[1]
    num_blocks = width // 32
    x = x.view(num_tokens, num_blocks, 32)[:, :, _order(kind, x.device)].view(num_tokens, width)
    num_groups = max(1, _PIECE_NUMBERS // (GROUP_ROWS * width))
    scratch = torch.empty((min(num_groups, len(data)) * GROUP_ROWS, width), dtype=x.dtype, device=x.device)
    for first in range(0, len(data), num_groups):
        piece = data[first : first + num_groups]
        num_items = len(piece) * num_blocks * GROUP_ROWS
        _widen_kernel[(triton.cdiv(num_items, _ITEMS),)](
            piece.view(torch.int32), piece.view(torch.float16), scratch, num_items, num_blocks, **_layout(kind),
            ITEMS=_ITEMS, num_warps=4,
        )  # fmt: skip
        start = first * GROUP_ROWS
        stop = min(num_rows, start + len(piece) * GROUP_ROWS)
        torch.mm(x, scratch[: stop - start].T, out=y[:, start:stop])


def _layout(kind: str) -> dict[str, int]:
    """A record's, as kernels take it."""
    return {
        "RECORD": RECORD_BYTES[kind],
        "HEAD": 64 if kind == "Q4_1" else 32,
        "OFFSET": 8 if kind == "Q4_0" else 0,
        "LINES": 8 if kind == "Q8_0" else 4,
        "PER_WORD": 4 if kind == "Q8_0" else 8,
    }


@cache
def _order(kind: str, device: torch.device) -> Tensor:
    """[32] int64: which number of a block is the k-th one in memory."""
    within = (0, 2, 1, 3) if kind == "Q8_0" else (0, 2, 4, 6, 1, 3, 5, 7)
    numbers = [start + number for start in range(0, 32, len(within)) for number in within]
    return torch.tensor(numbers, device=device)
