"""`LookAhead`: a layer's queries one layer early, made from what the layer before was given.

The residual stream changes little from layer to layer, so the input of a layer's attention stands in for the next one's
(arXiv:2406.19707, section 4.2). It is read off as the model runs: nothing is there, and nothing costs, without it.
"""

from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from ambidex.core.errors import InternalError
from ambidex.models.base import CausalLM


@runtime_checkable
class Attention(Protocol):
    """What a model's attention must offer."""

    layer_idx: int

    def query(self, x: Tensor) -> Tensor:
        """The queries [T, Hq, D] of an input [T, E], not rotated."""
        ...


class LookAhead:
    """Remembers the input of each layer's attention until the next layer's has been asked for.

    Raises:
        InternalError: the model's attention cannot make queries.
    """

    def __init__(self, model: CausalLM, num_layers: int) -> None:
        self._layers: dict[int, Attention] = {}
        self._inputs: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Attention):
                self._layers[module.layer_idx] = module
                module.register_forward_pre_hook(partial(self._remember, module.layer_idx))
        if sorted(self._layers) != list(range(num_layers)):
            raise InternalError(f"{type(model).__name__} has queries for layers {sorted(self._layers)} of {num_layers}")

    def query(self, layer_idx: int) -> Tensor | None:
        """See `attention.selective.LookAhead`."""
        before = self._inputs.pop(layer_idx - 1, None)
        return self._layers[layer_idx].query(before) if before is not None else None

    def ahead(self, layer_idx: int) -> Tensor | None:
        """Queries of the layer behind one whose attention has its input; see `attention.early_decode.LookAhead`."""
        own = self._inputs.get(layer_idx)
        return self._layers[layer_idx + 1].query(own) if own is not None else None

    def _remember(self, layer_idx: int, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if layer_idx == 0:
            self._inputs.clear()
        self._inputs[layer_idx] = args[0]
