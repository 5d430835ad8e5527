"""The linear layer, and several of them over the same input."""

from collections.abc import Callable

from torch import Tensor, nn

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
        self.weight = factory.new_matrix(num_out, num_in) if weight is None else weight
        self.bias = factory.new_vector(num_out) if bias else None
        self._multiply = factory.new_linear_op()

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, (self.weight,), (self.bias,))[0]  # [..., num_out]


class LinearGroup:
    """Linear layers over the same input, computed in one call. They stay the modules that they are, under their names.

    Args:
        layers: of one width and dtype.
    """

    def __init__(self, *layers: Linear, factory: ParameterFactory) -> None:
        self._layers = layers
        self._multiply = factory.new_linear_op()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., num_in] → [..., num_out] for each layer."""
        weights = [layer.weight for layer in self._layers]
        biases = [layer.bias for layer in self._layers]
        return self._multiply(x, weights, biases)
