"""The linear layer."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ambidex.layers.parameter import ParameterFactory


class Linear(nn.Module):
    """`x @ weight.T + bias` over the last axis.

    Args:
        num_in, num_out: widths; `weight` is [num_out, num_in].
        bias: whether there is a bias [num_out].
        weight: a parameter to share (tied embeddings) instead of a new one.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, num_in: int, num_out: int, factory: ParameterFactory, *, bias: bool, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.weight = factory.new(num_out, num_in) if weight is None else weight
        self.bias = factory.new(num_out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)  # [..., num_out]
