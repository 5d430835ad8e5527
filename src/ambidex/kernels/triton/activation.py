"""silu(gate) · up.

out = gate · sigmoid(gate) · up                                    in fp32
sigmoid(x) = 1 / (1 + z) for x ≥ 0, else z / (1 + z)               z = exp(−|x|), which never overflows
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 1024
"""Numbers of one program: a row of 14336 makes 14 programs, so that batch 1 is spread over several multiprocessors."""


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    z = tl.exp(-tl.abs(gate))
    out = gate * tl.where(gate >= 0.0, 1.0, z) / (1.0 + z) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=is_column)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.api.silu_mul`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    width = gate.shape[-1]
    gate_rows, up_rows = (x.reshape(-1, width) for x in (gate, up))
    if gate_rows.stride(1) != 1 or up_rows.stride(1) != 1:
        gate_rows, up_rows = gate_rows.contiguous(), up_rows.contiguous()
    _silu_mul_kernel[(gate_rows.shape[0], triton.cdiv(width, _BLOCK))](
        gate_rows, up_rows, out, gate_rows.stride(0), up_rows.stride(0), width, BLOCK=_BLOCK, num_warps=4
    )
    return out
