import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ambidex.core.model_spec import Activation
from ambidex.layers.mlp import GatedMLP
from ambidex.layers.parameter import ParameterFactory

FORMULAS = {
    Activation.SILU: lambda x: x / (1 + (-x).exp()),
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.GELU: lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
}


def make_mlp(activation: Activation, *, bias: bool) -> GatedMLP:
    factory = ParameterFactory(torch.device("cpu"), torch.float32)
    mlp = GatedMLP(4, 6, factory, activation=activation, bias=bias)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.normal_(generator=generator)
    return mlp


def make_input() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", list(Activation))
def test_gated_mlp_follows_its_formula(activation: Activation) -> None:
    mlp, x = make_mlp(activation, bias=False), make_input()
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    assert_close(mlp(x), (FORMULAS[activation](gate) * up) @ mlp.down_proj.weight.T)


def test_gated_mlp_with_bias_adds_it_to_each_matrix() -> None:
    mlp, x = make_mlp(Activation.RELU, bias=True), make_input()
    gate = x @ mlp.gate_proj.weight.T + mlp.gate_proj.bias
    up = x @ mlp.up_proj.weight.T + mlp.up_proj.bias
    assert_close(mlp(x), (gate.clamp(min=0) * up) @ mlp.down_proj.weight.T + mlp.down_proj.bias)


def test_gated_mlp_parameters_are_named_as_in_checkpoints() -> None:
    names = {name for name, _ in make_mlp(Activation.SILU, bias=False).named_parameters()}
    assert names == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
