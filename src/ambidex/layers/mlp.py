"""The gated MLP of the Llama line; families with a plain two-matrix MLP write it in their own file."""

from collections.abc import Callable

from torch import Tensor, nn

from ambidex.core.model_spec import Activation
from ambidex.kernels import api
from ambidex.layers.linear import Linear, LinearGroup
from ambidex.layers.parameter import ParameterFactory


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU with `Activation.SILU`. Source: arXiv:2002.05202, equation 6.

    Args:
        width: numbers of a hidden state, E.
        inner_width: numbers between the matrices, F.
        bias: whether the three matrices have one.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, width: int, inner_width: int, factory: ParameterFactory, *, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner_width, factory, bias=bias)
        self.up_proj = Linear(width, inner_width, factory, bias=bias)
        self.down_proj = Linear(inner_width, width, factory, bias=bias)
        self._gate_and_up = LinearGroup(self.gate_proj, self.up_proj, factory=factory)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._gated(*self._gate_and_up(x)))  # [T, E]

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.activation is Activation.SILU:
            return api.silu_mul(gate, up)
        return api.activate(gate, self.activation.value) * up  # [T, F]
