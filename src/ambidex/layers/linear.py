"""The linear layer, and several of them over the same input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ambidex.core.errors import InternalError
from ambidex.kernels.cpu.quantized import Weight
from ambidex.kernels.linear import LinearOp
from ambidex.layers.parameter import ParameterFactory
from ambidex.layers.split_matrix import SplitMatrix

StandIn = Callable[[Tensor], tuple[Tensor, ...]]
"""What computes a place of the model in the stead of its layers: x [T, num_in] → [T, num_out] for each matrix."""


class Linear(nn.Module):
    """`x @ weight.T + bias` over the last axis.

    Args:
        num_in, num_out: widths; `weight` is [num_out, num_in].
        bias: whether there is a bias [num_out].
        weight: a parameter to share (tied embeddings) instead of a new one.

    The weight is a parameter until `models/weights.py` puts a quantised matrix in its place, or `models/divided.py`
    one in pieces, and then `stand_in` computes.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, num_in: int, num_out: int, factory: ParameterFactory, *, bias: bool, weight: Weight | None = None
    ) -> None:
        super().__init__()
        self.weight: Weight | SplitMatrix = factory.new_matrix(num_out, num_in) if weight is None else weight
        self.bias = factory.new_vector(num_out) if bias else None
        self._multiply = factory.new_linear_op()
        self.stand_in: StandIn | None = None

    @property
    def ins(self) -> "tuple[Linear, ...]":
        """The layers over the same x: this one."""
        return (self,)

    def forward(self, x: Tensor) -> Tensor:
        if self.stand_in is not None:
            return self.stand_in(x)[0]
        return self._multiply(x, (self.whole_weight,), (self.bias,))[0]  # [..., num_out]

    @property
    def whole_weight(self) -> Weight:
        """The weight, which lies in one piece.

        Raises:
            InternalError: it does not, and what computes with it is another place's.
        """
        if isinstance(self.weight, SplitMatrix):
            raise InternalError("a layer whose weight lies in pieces was called without its group")
        return self.weight


class LinearGroup:
    """Linear layers over the same input, computed in one call. They stay the modules that they are, under their names.

    On a GPU their weights lie in one matrix, of which each layer's is a slice: one product has fewer launches than
    several, and reads small matrices faster. The native CPU op takes several matrices in one call as they are.

    Args:
        layers: of one width and dtype; all have a bias, or none.
    """

    def __init__(self, *layers: Linear, factory: ParameterFactory) -> None:
        self._layers = layers
        self._multiply = factory.new_linear_op()
        is_joint = factory.device.type == "cuda" and factory.matrix_device is None
        self._joint = _Joint(layers) if is_joint else None
        self.stand_in: StandIn | None = None

    @property
    def ins(self) -> tuple[Linear, ...]:
        """The layers."""
        return self._layers

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., num_in] → [..., num_out] for each layer."""
        if self.stand_in is not None:
            return self.stand_in(x)
        if self._joint is not None and self._joint.is_whole():
            return self._joint.multiply(x, self._multiply)
        weights = [layer.whole_weight for layer in self._layers]
        biases = [layer.bias for layer in self._layers]
        return self._multiply(x, weights, biases)


class _Joint:
    """The weights of several layers in one matrix, and their biases in one vector."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = layers
        self._sizes = [layer.weight.shape[0] for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._has_all = len(biases) in (0, len(layers))
        weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]  # on a GPU all are
        self._weight = _lay_side_by_side(weights)  # [Σ num_out, num_in]
        self._bias = _lay_side_by_side(biases) if len(biases) == len(layers) else None  # [Σ num_out]
        self._places = self._find_places()

    def is_whole(self) -> bool:
        """Whether the layers' parameters still are slices of this matrix."""
        return self._has_all and self._places == self._find_places()

    def _find_places(self) -> list[tuple[int, int | None]]:
        return [
            (layer.whole_weight.data_ptr(), layer.bias.data_ptr() if layer.bias is not None else None)
            for layer in self._layers
        ]

    def multiply(self, x: Tensor, op: LinearOp) -> tuple[Tensor, ...]:
        """x [..., num_in] → [..., num_out] for each layer, slices of one tensor."""
        return tuple(torch.split(op(x, (self._weight,), (self._bias,))[0], self._sizes, dim=-1))


def _lay_side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all rows; the parameters become slices of it."""
    joint = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joint[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return joint
