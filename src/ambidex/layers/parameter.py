"""How layers get their parameters: uninitialised, on one device and in one format, never trained."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Makes the parameters of one model; `models/weights.py` fills them."""

    device: torch.device
    dtype: torch.dtype

    def new(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter of that shape that takes no gradient."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)
