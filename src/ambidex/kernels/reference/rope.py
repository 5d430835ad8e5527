"""Rotary position embedding, half-split ("neox") order. Source: arXiv:2104.09864."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.api.rotate`."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, dim/2]
    first, second = x.narrow(-1, 0, half), x.narrow(-1, half, half)
    turned = x.to(torch.float32, copy=True)
    turned.narrow(-1, 0, half).mul_(cos).addcmul_(second.float(), sin, value=-1)
    turned.narrow(-1, half, half).mul_(cos).addcmul_(first.float(), sin)
    return turned.to(x.dtype)
