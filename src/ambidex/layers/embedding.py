"""Embedding tables, of tokens and of learned positions."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ambidex.layers.parameter import ParameterFactory


class Embedding(nn.Module):
    """Rows of a table: ids [T] int64 → [T, width] in the format of activations."""

    __call__: Callable[..., Tensor]

    def __init__(self, num_rows: int, width: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.weight = factory.new_matrix(num_rows, width)
        self._dtype = factory.activation_dtype or factory.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight).to(self._dtype)
