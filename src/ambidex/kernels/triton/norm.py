"""RMS norm, and the sum of residual and update that is normalised next.

    total = x + update                                        rounded to the dtype of x, as torch's + does
    out   = total / sqrt(mean(total²) + eps) · weight         in fp32; arXiv:1910.07467, equation 4

One program normalises one row, which it keeps in registers: x is read once, nothing is read back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr, update_ptr, weight_ptr, total_ptr, out_ptr, x_stride, update_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    if HAS_UPDATE:
        update = tl.load(update_ptr + row * update_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=is_column)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + columns, (scaled * weight).to(out_ptr.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.api.rms_norm`."""
    rows = _as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.api.add_rms_norm`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_as_rows(x), _as_rows(update), weight, total, out, eps)
    return total, out


def _as_rows(x: Tensor) -> Tensor:
    """[rows, width] with neighbouring numbers side by side; a view where x allows it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(x: Tensor, update: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x, x if update is None else update, weight, out if total is None else total, out,
        x.stride(0), x.stride(0) if update is None else update.stride(0), eps,
        WIDTH=width, BLOCK=block, HAS_UPDATE=update is not None,
        num_warps=min(16, max(1, block // 512)),  # 16 numbers a thread: one or two 16-byte loads of 16-bit numbers
    )  # fmt: skip
