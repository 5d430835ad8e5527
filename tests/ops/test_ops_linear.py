"""`LinearOp`: every implementation against float64, and what it refuses."""

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.dispatch import IMPLEMENTATIONS, choose, override
from ambidex.kernels.linear import MOST_NATIVE_TOKENS, LinearContext, LinearOp
from ambidex.kernels.torch_ops import linear as torch_linear
from truth import assert_within_twice_plain


@pytest.fixture(scope="module")
def context() -> LinearContext:
    return LinearContext(native.ThreadPool(2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS["linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, MOST_NATIVE_TOKENS + 3])
def test_linear_every_implementation_equals_float64(
    context: LinearContext, implementation: str, dtype: torch.dtype, num_tokens: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 65, generator=random)
    weights = [torch.randn(n, 65, generator=random).to(dtype) for n in (30, 1)]
    biases = [torch.randn(30, generator=random), None]
    with override("linear", implementation):
        ys = LinearOp(context)(x, weights, biases)
    rounds_x = dtype == torch.bfloat16 and context.multiplies_bf16 and implementation != "reference"
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        assert y.shape == (num_tokens, len(weight))
        if num_tokens == 0:
            continue
        shift = torch.zeros(len(weight)) if bias is None else bias
        is_plain_bf16 = rounds_x and (num_tokens > MOST_NATIVE_TOKENS or implementation == "torch")
        product = (x.bfloat16() @ weight.T).float() if is_plain_bf16 else x @ weight.float().T
        assert_within_twice_plain(y, product + shift, x.double() @ weight.double().T + shift.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_x_in_the_dtype_of_the_weights_stays_in_it(context: LinearContext, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.randn(4, 8).to(dtype)
    (y,) = LinearOp(context)(x, [weight], [None])
    assert_within_twice_plain(y, x @ weight.T, x.double() @ weight.double().T)


def test_linear_x_that_is_not_contiguous_is_multiplied_all_the_same(context: LinearContext) -> None:
    x, weight = torch.randn(8, 3).T, torch.randn(4, 8)
    (y,) = LinearOp(context)(x, [weight], [None])
    torch.testing.assert_close(y, x @ weight.T)


def test_linear_rows_of_a_batch_get_the_bits_that_they_get_alone(context: LinearContext) -> None:
    x, weight = torch.randn(MOST_NATIVE_TOKENS, 200), torch.randn(37, 200).bfloat16()
    op = LinearOp(context)
    (together,) = op(x, [weight], [None])
    assert all(torch.equal(together[i], op(x[i : i + 1], [weight], [None])[0][0]) for i in range(len(x)))


@pytest.mark.parametrize("num_tokens", [1, MOST_NATIVE_TOKENS + 1])
def test_linear_x_of_another_width_is_refused(context: LinearContext, num_tokens: int) -> None:
    with pytest.raises(ShapeError, match="x: expected"):
        LinearOp(context)(torch.ones(num_tokens, 3), [torch.ones(2, 4)], [None])


def test_choose_linear_says_why() -> None:
    assert choose("linear", "cpu").name == "native"
    assert choose("linear", "cuda").name == "torch"
    assert choose("linear", "cpu").reason


def test_product_with_the_weight_first_is_the_product() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64), torch.randn(24, 64).bfloat16(), torch.randn(24)
    scratch = torch_linear.Scratch()
    forms = [
        torch_linear.linear(x, weight, bias, scratch=scratch, multiplies_bf16=True, weight_first=first)
        for first in (False, True)
    ]
    torch.testing.assert_close(forms[0], forms[1], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(forms[1], x @ weight.float().T + bias, rtol=3e-2, atol=0.2)
