"""Embedding tables, of tokens and of learned positions."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ambidex.kernels.cpu.quantized import QuantizedMatrix, Weight
from ambidex.layers.parameter import ParameterFactory


class Embedding(nn.Module):
    """Rows of a table: ids [T] int64 → [T, width] in the format of activations.

    The table is a parameter until `models/weights.py` puts a quantised matrix in its place.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, num_rows: int, width: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.weight: Weight = factory.new_matrix(num_rows, width)
        self._dtype = factory.activation_dtype or factory.dtype

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, QuantizedMatrix):
            return self.weight.rows(ids).to(self._dtype)
        return functional.embedding(ids, self.weight).to(self._dtype)
