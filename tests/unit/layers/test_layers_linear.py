import torch

from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear
from ambidex.layers.parameter import ParameterFactory

FACTORY = ParameterFactory(torch.device("cpu"), torch.float32)


def test_new_parameter_has_shape_and_dtype_and_no_gradient() -> None:
    parameter = ParameterFactory(torch.device("cpu"), torch.bfloat16).new(3, 5)
    assert parameter.shape == (3, 5)
    assert parameter.dtype == torch.bfloat16
    assert not parameter.requires_grad


def test_new_parameter_on_meta_allocates_nothing() -> None:
    assert ParameterFactory(torch.device("meta"), torch.float32).new(1 << 20, 1 << 20).is_meta


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
