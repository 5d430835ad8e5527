"""`rms_norm` and `layer_norm`."""

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from truth import assert_within_twice_plain

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 8), (5, 77), (3, 2, 64)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    exact, wide = x.double(), weight.double()
    truth = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    with dispatch.override("rms_norm", name):
        assert_within_twice_plain(api.rms_norm(x, weight, 1e-5), plain, truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_equals_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool, name: str, device: str
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    bias = torch.randn(shape[-1]).to(device, dtype) if has_bias else None
    truth = torch.nn.functional.layer_norm(
        x.double(), shape[-1:], weight.double(), None if bias is None else bias.double(), 1e-5
    )
    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * weight
    plain = plain if bias is None else plain + bias
    with dispatch.override("layer_norm", name):
        assert_within_twice_plain(api.layer_norm(x, weight, bias, 1e-5), plain, truth)


def test_rms_norm_with_weight_of_wrong_length_raises() -> None:
    with pytest.raises(ShapeError, match=r"expected shape \(8,\)"):
        api.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)


def test_layer_norm_with_bias_of_wrong_length_raises() -> None:
    with pytest.raises(ShapeError, match=r"expected shape \(8,\)"):
        api.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(1), 1e-5)
