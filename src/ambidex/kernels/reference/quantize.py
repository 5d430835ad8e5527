"""Rows of 8-bit integers with one scale each.

    scale = max |x| / 127        numbers = round(x / scale)        x ≈ numbers · scale,  error at most scale / 2

Source: absmax quantisation, arXiv:2208.07339, section 2.1, with rows as its blocks.
"""

import torch
from torch import Tensor


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.api.quantize_rows`."""
    values = rows.float()
    scales = values.abs().amax(dim=-1) / 127  # [...]
    numbers = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().to(torch.int8)
    return numbers, scales
