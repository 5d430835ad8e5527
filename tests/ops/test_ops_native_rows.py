"""Native ops over rows: each instruction set that this machine runs, against float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ambidex import _native
from ambidex.kernels import api
from ambidex.kernels.cpu import rows
from ambidex.kernels.dispatch import override
from ambidex.kernels.reference import sampling as reference_sampling
from truth import assert_within_twice_plain

WIDTHS = [1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 576]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_rms_norm_equals_float64(isa: str, width: int, scale: float) -> None:
    x, weight = make(3, 2, width, scale=scale), make(width, seed=1)
    with override("rms_norm", "reference"):
        plain = api.rms_norm(x, weight, 1e-5)
    square = x.double().square().mean(-1, keepdim=True)
    truth = x.double() / (square + 1e-5).sqrt() * weight.double()
    assert_within_twice_plain(rows.rms_norm(x, weight, 1e-5, isa=isa), plain, truth)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_silu_mul_equals_float64(isa: str, width: int, scale: float) -> None:
    gate, up = make(3, width, scale=scale), make(3, width, seed=1)
    truth = gate.double() * torch.sigmoid(gate.double()) * up.double()
    plain = torch.nn.functional.silu(gate) * up
    assert_within_twice_plain(rows.silu_mul(gate, up, isa=isa), plain, truth)


def test_silu_mul_nan_is_not_hidden_and_the_ends_are_right(isa: str) -> None:
    inf = float("inf")
    gate = torch.tensor([float("nan"), inf, -1e30, 0.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, float("nan")])
    y = rows.silu_mul(gate, up, isa=isa)
    assert y[0].isnan()
    assert y[1] == inf
    assert abs(y[2]) < 1e-7
    assert y[3] == 0
    assert y[4].isnan()


@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (64, 16), (80, 20), (6, 3), (5, 1), (128, 64)])
def test_rotate_equals_float64(isa: str, head_dim: int, half: int) -> None:
    x, angles = make(3, 5, head_dim), make(3, half, seed=1)
    cos, sin = angles.cos(), angles.sin()
    c, s = cos.double()[:, None], sin.double()[:, None]
    first, second = x.double()[..., :half], x.double()[..., half : 2 * half]
    turned = [first * c - second * s, second * c + first * s, x.double()[..., 2 * half :]]
    with override("rotate", "reference"):
        plain = api.rotate(x, cos, sin)
    y = rows.rotate(x, cos, sin, isa=isa)
    assert_within_twice_plain(y, plain, torch.cat(turned, -1))
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])


def test_api_few_rows_and_many_rows_agree() -> None:
    few, weight = make(4, 64), make(64, seed=1)
    many = few.repeat(rows.MOST_NUMBERS // few.numel() + 1, 1)
    torch.testing.assert_close(api.rms_norm(many, weight, 1e-5)[:4], api.rms_norm(few, weight, 1e-5))
    torch.testing.assert_close(api.silu_mul(many, many)[:4], api.silu_mul(few, few))


@pytest.mark.parametrize("flaw", ["width", "float64"])
def test_rows_native_refuses_what_does_not_fit(flaw: str) -> None:
    x, y = make(2, 8).numpy(), make(2, 8).numpy()
    weight = make(9).numpy() if flaw == "width" else make(8).double().numpy()
    with pytest.raises((TypeError, ValueError), match=r"weight: expected 8|rms_norm"):
        _native.rms_norm(x, weight, 1e-5, y)


@pytest.mark.parametrize("width", [1, 5, 16, 250, 256, 257, 1000])
def test_likeliest_is_the_first_largest(isa: str, width: int) -> None:
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    x[1] = 3.0  # all alike
    x[2, -1] = 100.0
    x[3] = torch.arange(width, 0, -1) // 2  # the largest twice where there are two
    x[4] = -1e30
    x[5, width // 2] = x[5].max() + 1
    assert torch.equal(rows.likeliest(x, isa=isa), x.argmax(dim=-1))
    for place in {0, width // 2, width - 1}:
        for fault in (torch.nan, torch.inf, -torch.inf):
            broken = x.clone()
            broken[3, place] = fault
            wanted = x.argmax(dim=-1)
            wanted[3] = -1
            assert torch.equal(rows.likeliest(broken, isa=isa), wanted)
            assert torch.equal(reference_sampling.likeliest(broken), wanted)


@pytest.mark.parametrize("width", [1, 15, 16, 576, 1000])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_equals_float64(isa: str, width: int, has_bias: bool) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 4 + 7
    weight, bias = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    shift = bias if has_bias else None
    y = np.empty((3, width), np.float32)
    _native.layer_norm(x.numpy(), weight.numpy(), None if shift is None else shift.numpy(), 1e-5, y, isa=isa)
    truth = F.layer_norm(x.double(), (width,), weight.double(), None if shift is None else shift.double(), 1e-5)
    assert_within_twice_plain(torch.from_numpy(y), F.layer_norm(x, (width,), weight, shift, 1e-5), truth)
