"""`silu_mul` and `activate`."""

import math

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api
from truth import assert_within_twice_plain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def formula(x: Tensor, name: str) -> Tensor:
    match name:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        case _:
            return x.clamp(min=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_activate_equals_the_formula(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 33).to(device, dtype)
    assert_within_twice_plain(api.activate(x, name), formula(x, name), formula(x.double(), name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_the_formula(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(7, 33).to(device, dtype), torch.randn(7, 33).to(device, dtype)
    truth = formula(gate.double(), "silu") * up.double()
    assert_within_twice_plain(api.silu_mul(gate, up), formula(gate, "silu") * up, truth)


def test_activate_with_unknown_name_raises() -> None:
    with pytest.raises(ShapeError, match="no activation is called 'swish': choose from silu, gelu, relu"):
        api.activate(torch.ones(2), "swish")


def test_silu_mul_of_different_shapes_raises() -> None:
    with pytest.raises(ShapeError, match=r"up: expected shape \(2, 3\) of gate, got \(2, 4\)"):
        api.silu_mul(torch.ones(2, 3), torch.ones(2, 4))
