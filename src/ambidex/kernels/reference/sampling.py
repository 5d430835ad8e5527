"""Choosing tokens."""

import torch
from torch import Tensor


def likeliest(logits: Tensor) -> Tensor:
    """See `kernels.api.likeliest`."""
    low, high = torch.aminmax(logits, dim=-1)  # both NaN if any number is
    is_finite = (low > -torch.inf) & (high < torch.inf)
    return logits.argmax(dim=-1).masked_fill_(~is_finite, -1)
