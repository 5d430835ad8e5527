import torch
from torch.testing import assert_close

from ambidex.layers.norm import LayerNorm, RMSNorm
from ambidex.layers.parameter import ParameterFactory

FACTORY = ParameterFactory(torch.device("cpu"), torch.float32)
WEIGHT = torch.tensor([1.0, 2.0, 0.5])
BIAS = torch.tensor([0.0, 1.0, -1.0])


def make_rms_norm(eps: float, factory: ParameterFactory = FACTORY) -> RMSNorm:
    norm = RMSNorm(3, eps, factory)
    norm.weight.copy_(WEIGHT)
    return norm


def make_layer_norm(eps: float) -> LayerNorm:
    norm = LayerNorm(3, eps, FACTORY)
    norm.weight.copy_(WEIGHT)
    norm.bias.copy_(BIAS)
    return norm


def test_rms_norm_divides_by_root_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0, 5.0], [-1.0, 0.0, 2.0]])
    expected = x / ((x**2).sum(-1, keepdim=True) / 3 + 0.5).sqrt() * WEIGHT
    assert_close(make_rms_norm(0.5)(x), expected)


def test_rms_norm_over_heads_norms_each_head_alone() -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))  # [T, Hq, D]
    norm = make_rms_norm(1e-6)
    assert_close(norm(x)[1, 2], norm(x[1, 2][None])[0])


def test_rms_norm_of_fp16_beyond_its_square_range_is_exact() -> None:
    norm = make_rms_norm(0.0, ParameterFactory(torch.device("cpu"), torch.float16))
    out = norm(torch.full((1, 3), 1000.0, dtype=torch.float16))  # 1000² does not fit into fp16
    assert_close(out.float(), WEIGHT[None])


def test_layer_norm_removes_mean_and_divides_by_deviation() -> None:
    x = torch.tensor([[3.0, 4.0, 8.0], [-1.0, 0.0, 2.0]])
    mean = x.sum(-1, keepdim=True) / 3
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / 3
    assert_close(make_layer_norm(0.25)(x), (x - mean) / (variance + 0.25).sqrt() * WEIGHT + BIAS)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert make_rms_norm(1e-5)(torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_layer_norm_of_equal_numbers_is_the_bias() -> None:
    assert_close(make_layer_norm(1e-5)(torch.full((1, 3), 7.0)), BIAS[None])
