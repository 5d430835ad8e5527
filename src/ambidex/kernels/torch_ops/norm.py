"""torch's own normalisations: one call each, in fp32 inside."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.api.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.api.add_rms_norm`."""
    total = x + update
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `kernels.api.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
