"""MLPs: the gated one of the Llama line as a module, and what all of them compute, whatever their layers are called."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import NeuronMask, SparsityKind
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
        self.mask: NeuronMask | None = None
        self.observer: NeuronObserver | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, E] → [T, E]."""
        if self.stand_in is not None:
            return self.stand_in(x)[0]
        inner = self._group(x) if self._group is not None else (self.ins[0](x),)
        neurons = activate_neurons(inner, self.activation, self.mask)
        if self.observer is not None:
            gate = api.activate(inner[0], self.activation.value) if len(inner) > 1 else None
            self.observer(gate, neurons)
        return self.out(neurons)


NeuronObserver = Callable[[Tensor | None, Tensor], None]
"""Is told of each step's neurons [T, F]: activation(gate), None without a gate, and the input of the last matrix."""


def activate_neurons(inner: Sequence[Tensor], activation: Activation, mask: NeuronMask | None = None) -> Tensor:
    """What neurons give, [T, F], from the products of their rows: one tensor [T, F], or gate and up.

    Args:
        mask: sets some of them to 0.
    """
    if mask is not None and mask.kind is SparsityKind.CATS:
        gate, up = inner
        return keep_large(api.activate(gate, activation.value), mask.threshold) * up
    neurons = _activate(inner, activation)
    return neurons if mask is None else keep_large(neurons, mask.threshold)


def keep_large(values: Tensor, threshold: float) -> Tensor:
    """The values whose size is at least the threshold, and 0 elsewhere."""
    return torch.where(values.abs() >= threshold, values, 0.0)


def _activate(inner: Sequence[Tensor], activation: Activation) -> Tensor:
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
