"""Normalisation over the last axis; statistics are computed in fp32 whatever the format of the input."""

from collections.abc import Callable

from torch import Tensor, nn

from ambidex.kernels import api
from ambidex.layers.parameter import ParameterFactory


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight`. Source: arXiv:1910.07467, equation 4."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, eps: float, factory: ParameterFactory) -> None:
        super().__init__()
        self.weight = factory.new_vector(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return api.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x + update` (None: x itself), which is the residual stream, and its norm, which the next block reads."""
        if update is None:
            return x, self(x)
        return api.add_rms_norm(x, update, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`. Source: arXiv:1607.06450, equation 4."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, eps: float, factory: ParameterFactory) -> None:
        super().__init__()
        self.weight = factory.new_vector(width)
        self.bias = factory.new_vector(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return api.layer_norm(x, self.weight, self.bias, self.eps)
