"""Merge of two partial attentions (`docs/merge.md`), in fp32.

    lse = m + log(e^(lse_a − m) + e^(lse_b − m))          m = max(lse_a, lse_b)
    out = out_a + w (out_b − out_a)                       w = e^(lse_b − lse)

One program merges one query head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < HEAD_DIM
    lse_a, lse_b = tl.load(lse_a_ptr + head), tl.load(lse_b_ptr + head)
    out_a = tl.load(out_a_ptr + head * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + head * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    largest = tl.where(lse_a > lse_b, lse_a, lse_b)
    # NOTE: −inf − (−inf) is NaN: where neither side saw a key, both weights are 0 and so is the result.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    total = weight_a + weight_b
    share_b = tl.where(total == 0.0, 0.0, weight_b / tl.where(total == 0.0, 1.0, total))
    out = out_a + share_b * (out_b - out_a)
    tl.store(out_ptr + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=is_dim)
    tl.store(lse_ptr + head, tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total))))


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.merge_states`."""
    out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a, dtype=out_dtype), torch.empty_like(lse_a)
    if lse.numel() == 0:
        return out, lse
    head_dim = out.shape[-1]
    _merge_kernel[(lse.numel(),)](
        out_a, lse_a, out_b, lse_b, out, lse,
        HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return out, lse
