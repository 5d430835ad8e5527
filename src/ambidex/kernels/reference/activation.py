"""Non-linearities of the MLP, in fp32."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.api.silu_mul`."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return F.silu(x.float()).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x), the exact (erf) form."""
    return F.gelu(x.float()).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)
