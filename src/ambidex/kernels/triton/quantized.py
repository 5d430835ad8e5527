"""x · Wᵀ with W quantised, from the layout of native products (csrc/ops/quant.h), on a GPU.

y[t, n] = Σ over blocks b of d[n, b] · Σ over k of x[t, 32 b + k] · q[n, 32 b + k]          sums in fp32
          + m[n, b] · Σ over k of x[t, 32 b + k]                                           Q4_1 alone

16 rows are a group, a group is a run of records of 32 numbers: 16 fp16 scales d, 16 fp16 minima m (Q4_1), then lines of
64 bytes of which row r has the word 4 r … 4 r + 3. A word of Q8_0 holds numbers 4 l + 0, 2, 1, 3 in its bytes; one of
Q4_0 or Q4_1 the numbers 8 l + 2 p in bits 4 p and 8 l + 2 p + 1 in bits 16 + 4 p, in Q4_0 each more by 8. So integers
of a record are taken as they come, and the numbers of x in the same order. Integers are exact in every format of x;
scales are applied to sums.
"""

from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS: Final = 16
RECORD_BYTES: Final[Mapping[str, int]] = {"Q8_0": 32 + 8 * 64, "Q4_0": 32 + 4 * 64, "Q4_1": 64 + 4 * 64}
"""Types with a kernel, and bytes of a record of 16 rows and 32 numbers."""
_TILE_N: Final = 64
"""Rows of a program: 4 groups; a matrix of 8192 rows makes 128 programs, one for each multiprocessor."""


@triton.jit
def _multiply_kernel(
    x_ptr, words_ptr, scales_ptr, y_ptr, num_tokens, num_rows, num_blocks, x_stride, y_stride,
    RECORD: tl.constexpr, HEAD: tl.constexpr, OFFSET: tl.constexpr, LINES: tl.constexpr, PER_WORD: tl.constexpr,
    TILE_T: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
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
    for block in range(num_blocks):
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
    out = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + rows[None, :]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=is_token[:, None] & (rows < num_rows)[None, :])


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
    tile_t = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    _multiply_kernel[(triton.cdiv(num_rows, _TILE_N), triton.cdiv(num_tokens, tile_t))](
        x, data.view(torch.int32), data.view(torch.float16), y, num_tokens, num_rows, width // 32, x.stride(0),
        y.stride(0), RECORD=RECORD_BYTES[kind], HEAD=64 if kind == "Q4_1" else 32, OFFSET=8 if kind == "Q4_0" else 0,
        LINES=8 if kind == "Q8_0" else 4, PER_WORD=4 if kind == "Q8_0" else 8, TILE_T=tile_t, TILE_N=_TILE_N,
        num_warps=4,
    )  # fmt: skip
    return y
