"""`rotate`."""

import math

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels import api
from truth import assert_within_twice_plain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_rotate_by_a_right_angle_swaps_the_halves() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
    assert api.rotate(x, cos, sin).tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


def test_rotate_leaves_numbers_behind_dim_as_they_were() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert api.rotate(x, torch.tensor([[-1.0]]), torch.tensor([[0.0]])).tolist() == [[[-1.0, -2.0, 3.0, 4.0]]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 2), (5, 3, 16), (7, 9, 80)])
def test_rotate_equals_complex_multiplication(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, num_heads, head_dim).to(device, dtype)
    angles = (torch.rand(num_tokens, head_dim // 2) * 2 * math.pi).to(device)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    low_first, low_second = x.chunk(2, -1)
    low_cos, low_sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    plain = torch.cat((low_first * low_cos - low_second * low_sin, low_second * low_cos + low_first * low_sin), -1)
    assert_within_twice_plain(api.rotate(x, cos, sin), plain, torch.cat((turned.real, turned.imag), -1))


def test_rotate_with_too_many_angles_raises() -> None:
    with pytest.raises(ShapeError, match="3 angles turn 6 numbers, but a head has 4"):
        api.rotate(torch.ones(1, 1, 4), torch.ones(1, 3), torch.ones(1, 3))
