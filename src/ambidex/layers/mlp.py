"""MLPs: the gated one of the Llama line as a module, and what all of them compute, whatever their layers are called."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ambidex.core.model_spec import Activation
from ambidex.kernels import api
from ambidex.layers.linear import Linear, LinearGroup, StandIn
from ambidex.layers.parameter import ParameterFactory


class Neurons:
    """The MLP over layers that stay the modules that they are, under their names.

    A neuron is a row of each matrix of `ins` and a column of `out`: `out(activation(ins(x)))` with one matrix,
    `out(activation(gate(x)) * up(x))` with two.

    Args:
        ins: one layer, or gate and up.
        out: back to the width of hidden states.
    """

    def __init__(self, *ins: Linear, out: Linear, activation: Activation, factory: ParameterFactory) -> None:
        self.ins = ins
        self.out = out
        self.activation = activation
        self._group = LinearGroup(*ins, factory=factory) if len(ins) > 1 else None
        self.stand_in: StandIn | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, E] → [T, E]."""
        if self.stand_in is not None:
            return self.stand_in(x)[0]
        inner = self._group(x) if self._group is not None else (self.ins[0](x),)
        return self.out(activate_neurons(inner, self.activation))


def activate_neurons(inner: Sequence[Tensor], activation: Activation) -> Tensor:
    """What neurons give, [T, F], from the products of their rows: one tensor [T, F], or gate and up."""
    if len(inner) == 1:
        return api.activate(inner[0], activation.value)
    gate, up = inner
    if activation is Activation.SILU:
        return api.silu_mul(gate, up)
    return api.activate(gate, activation.value) * up


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
        self.neurons = Neurons(self.gate_proj, self.up_proj, out=self.down_proj, activation=activation, factory=factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.neurons(x)  # [T, E]
