"""Turn the heads of a chunk's tokens by their positions' angles.

    turned[i]        = x[i] · cos[i] − x[i + half] · sin[i]          i < half
    turned[i + half] = x[i + half] · cos[i] + x[i] · sin[i]          in fp32; arXiv:2104.09864
    turned[i]        = x[i]                                          i ≥ 2 · half

One program handles some heads of one token. (Decode steps turn and store in one launch: `rotate_store.py`.)
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8
"""Heads of one program."""


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, token_stride, head_stride, num_heads,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x_ptr + token * token_stride + heads[:, None] * head_stride
    target = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM
    pairs = tl.arange(0, HALF_BLOCK)
    is_pair = (heads[:, None] < num_heads) & (pairs[None, :] < HALF)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    first = tl.load(source + pairs[None, :], mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pairs[None, :], mask=is_pair, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(target + pairs[None, :], (first * cos - second * sin).to(dtype), mask=is_pair)
    tl.store(target + HALF + pairs[None, :], (second * cos + first * sin).to(dtype), mask=is_pair)
    if 2 * HALF < HEAD_DIM:
        dims = 2 * HALF + tl.arange(0, KEPT_BLOCK)
        is_kept = (heads[:, None] < num_heads) & (dims[None, :] < HEAD_DIM)
        tl.store(target + dims[None, :], tl.load(source + dims[None, :], mask=is_kept, other=0.0), mask=is_kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.api.rotate`."""
    num_tokens, num_heads, head_dim = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    half = cos.shape[1]
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), num_heads,
        HEAD_DIM=head_dim, HALF=half, HEADS=_HEADS, HALF_BLOCK=triton.next_power_of_2(max(1, half)),
        KEPT_BLOCK=triton.next_power_of_2(max(1, head_dim - 2 * half)), num_warps=4,
    )  # fmt: skip
    return out
