"""Normalisations, in fp32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.api.rms_norm`. Source: arXiv:1910.07467."""
    x_fp32 = x.float()
    scaled = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.api.add_rms_norm`."""
    total = x + update
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `kernels.api.layer_norm`. Source: arXiv:1607.06450."""
    x_fp32 = x.float()
    centred = x_fp32 - x_fp32.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)
