"""Embedding tables, of tokens and of learned positions."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ambidex.layers.parameter import ParameterFactory


class Embedding(nn.Module):
    """Rows of a table: ids [T] int64 → [T, width]."""

    __call__: Callable[..., Tensor]

    def __init__(self, num_rows: int, width: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.weight = factory.new(num_rows, width)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)
