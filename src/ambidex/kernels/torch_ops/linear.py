"""torch's own matrix products, for weights stored in the format of x and for those stored in another."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


class Scratch:
    """Memory that is used again from call to call; it grows to the largest tensor asked for."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def widen(self, weight: Tensor) -> Tensor:
        """`weight` in fp32, good until the next call."""
        if self._buffer.numel() < weight.numel() or self._buffer.device != weight.device:
            self._buffer = torch.empty(weight.numel(), device=weight.device)
        return self._buffer[: weight.numel()].view(weight.shape).copy_(weight)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scratch: Scratch,
    multiplies_bf16: bool,
    weight_first: bool = False,
) -> Tensor:
    """x · Wᵀ + bias over the last axis, in the dtype of x.

    Weights of another dtype than x are widened to fp32 first. On a processor that multiplies bf16, bf16 weights are
    not: x is rounded to bf16 instead, and so is the product. The error then is that of a run in bf16 throughout.

    Args:
        weight_first: compute (W · xᵀ)ᵀ: a library that packs its second matrix packs x then, not the weights.
    """
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    if multiplies_bf16 and weight.dtype == torch.bfloat16:
        rounded = x.to(torch.bfloat16)
        if weight_first and x.dim() == 2:
            product = torch.mm(weight, rounded.T).T.to(x.dtype)
        else:
            product = F.linear(rounded, weight).to(x.dtype)
        return product if bias is None else product.add_(bias)
    return F.linear(x.float(), scratch.widen(weight), bias).to(x.dtype)
