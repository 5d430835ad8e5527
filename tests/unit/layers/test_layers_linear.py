import pytest
import torch

from ambidex.kernels.cpu import native
from ambidex.kernels.linear import MOST_NATIVE_TOKENS, LinearContext
from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear, LinearGroup, _Joint
from ambidex.layers.parameter import ParameterFactory
from truth import assert_within_twice_plain

FACTORY = ParameterFactory(torch.device("cpu"), torch.float32)


def make_factory(dtype: torch.dtype) -> ParameterFactory:
    """Matrices in `dtype`, everything else in fp32, native products on two threads."""
    context = LinearContext(native.ThreadPool(2))
    return ParameterFactory(torch.device("cpu"), dtype, torch.float32, context)


def test_new_parameters_have_shape_and_dtype_and_no_gradient() -> None:
    factory = make_factory(torch.bfloat16)
    matrix, vector = factory.new_matrix(3, 5), factory.new_vector(3)
    assert (matrix.shape, matrix.dtype, matrix.requires_grad) == ((3, 5), torch.bfloat16, False)
    assert (vector.shape, vector.dtype, vector.requires_grad) == ((3,), torch.float32, False)


def test_new_vector_without_a_format_of_activations_is_like_matrices() -> None:
    assert ParameterFactory(torch.device("cpu"), torch.bfloat16).new_vector(3).dtype == torch.bfloat16


def test_new_matrix_on_meta_allocates_nothing() -> None:
    assert ParameterFactory(torch.device("meta"), torch.float32).new_matrix(1 << 20, 1 << 20).is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, MOST_NATIVE_TOKENS, MOST_NATIVE_TOKENS + 1])
def test_linear_with_16_bit_weights_gives_fp32_of_the_stored_values(dtype: torch.dtype, num_tokens: int) -> None:
    linear = Linear(40, 30, make_factory(dtype), bias=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in linear.parameters():
        parameter.normal_(generator=generator)
    x = torch.randn(num_tokens, 40, generator=generator)
    assert linear.bias is not None
    y, weight = linear(x), linear.weight.float()
    assert y.dtype == torch.float32
    if native.isa() in ("avx512bf16", "amx") and dtype == torch.bfloat16 and num_tokens > MOST_NATIVE_TOKENS:
        plain = (x.bfloat16() @ linear.weight.T).float() + linear.bias
    else:
        plain = x @ weight.T + linear.bias
    assert_within_twice_plain(y, plain, x.double() @ weight.double().T + linear.bias.double())


def test_linear_whose_weight_is_replaced_multiplies_the_new_one() -> None:
    linear, x = Linear(2, 2, make_factory(torch.float32), bias=False), torch.ones(1, 2)
    linear.weight.fill_(1.0)
    assert linear(x).tolist() == [[2.0, 2.0]]
    linear.weight = torch.nn.Parameter(torch.full((2, 2), 3.0), requires_grad=False)
    assert linear(x).tolist() == [[6.0, 6.0]]


def test_linear_group_equals_its_layers_one_by_one() -> None:
    factory = make_factory(torch.bfloat16)
    layers = [Linear(16, n, factory, bias=n == 4) for n in (8, 4, 5)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    for y, layer in zip(LinearGroup(*layers, factory=factory)(x), layers, strict=True):
        assert torch.equal(y, layer(x))


def test_embedding_gives_rows_in_the_format_of_activations() -> None:
    table = Embedding(3, 2, make_factory(torch.float16))
    table.weight.fill_(0.5)
    assert table(torch.tensor([1])).dtype == torch.float32


def test_linear_with_bias_is_product_plus_bias() -> None:
    linear = Linear(2, 3, FACTORY, bias=True)
    linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert linear.bias is not None
    linear.bias.copy_(torch.tensor([10.0, 20.0, 30.0]))
    assert linear(torch.tensor([[1.0, -1.0]])).tolist() == [[9.0, 19.0, 29.0]]


def test_linear_without_bias_has_only_a_weight() -> None:
    assert [name for name, _ in Linear(2, 3, FACTORY, bias=False).named_parameters()] == ["weight"]


def test_linear_with_shared_weight_keeps_that_parameter() -> None:
    table = Embedding(7, 4, FACTORY)
    assert Linear(4, 7, FACTORY, bias=False, weight=table.weight).weight is table.weight


def test_embedding_returns_rows_in_order_of_ids() -> None:
    table = Embedding(3, 2, FACTORY)
    table.weight.copy_(torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    assert table(torch.tensor([2, 0, 2])).tolist() == [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]


@pytest.mark.parametrize("bias", [True, False])
def test_joint_weights_give_what_the_layers_give_and_are_filled_through_them(bias: bool) -> None:
    factory = ParameterFactory(torch.device("cpu"), torch.float32)
    layers = [Linear(8, width, factory, bias=bias) for width in (6, 2, 2)]
    joint = _Joint(layers)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_()
    x = torch.randn(3, 8)
    assert joint.is_whole()
    for got, layer in zip(joint.multiply(x, factory.new_linear_op()), layers, strict=True):
        torch.testing.assert_close(got, torch.nn.functional.linear(x, layer.weight, layer.bias))
    layers[1].weight = torch.nn.Parameter(torch.zeros(2, 8), requires_grad=False)
    assert not joint.is_whole()
