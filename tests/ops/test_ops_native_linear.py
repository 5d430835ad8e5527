"""Native matrix products: each instruction set that this machine runs, against float64."""

import threading

import pytest
import torch
from torch import Tensor

from ambidex import _native
from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from truth import assert_within_twice_plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> LinearPool:
    return LinearPool(native.ThreadPool(2))


def make(dtype: torch.dtype, *, tokens: int, width: int, heights: list[int]) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(width * 100 + tokens)
    x = torch.randn(tokens, width, generator=random)
    return x, [(torch.randn(n, width, generator=random) * width**-0.5).to(dtype) for n in heights]


def check(pool: LinearPool, isa: str, x: Tensor, weights: list[Tensor]) -> None:
    ys = pool.multiply(Matrices(weights, [None] * len(weights)), x, isa=isa)
    assert len(ys) == len(weights)
    for y, weight in zip(ys, weights, strict=True):
        assert_within_twice_plain(y, x @ weight.float().T, x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 33])
def test_multiply_any_number_of_tokens_equals_float64(
    pool: LinearPool, isa: str, dtype: torch.dtype, tokens: int
) -> None:
    if tokens == 0:
        y, *_ = pool.multiply(Matrices([torch.ones(3, 5, dtype=dtype)], [None]), torch.ones(0, 5), isa=isa)
        assert y.shape == (0, 3)
        return
    check(pool, isa, *make(dtype, tokens=tokens, width=576, heights=[192]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 31, 32, 33, 100, 1536])
@pytest.mark.parametrize("height", [1, 3, 5, 16, 67])
def test_multiply_odd_sizes_equal_float64(
    pool: LinearPool, isa: str, dtype: torch.dtype, width: int, height: int
) -> None:
    check(pool, isa, *make(dtype, tokens=1 + height % 5, width=width, heights=[height]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_several_matrices_in_one_call_equal_one_after_the_other(
    pool: LinearPool, isa: str, dtype: torch.dtype
) -> None:
    x, weights = make(dtype, tokens=3, width=96, heights=[40, 1, 333])
    biases = [torch.randn(40), None, torch.randn(333)]
    together = pool.multiply(Matrices(weights, biases), x, isa=isa)
    for y, weight, bias in zip(together, weights, biases, strict=True):
        assert torch.equal(y, pool.multiply(Matrices([weight], [bias]), x, isa=isa)[0])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_multiply_any_number_of_threads_gives_the_same_bits(isa: str, num_threads: int) -> None:
    x, weights = make(torch.bfloat16, tokens=5, width=300, heights=[700])
    matrices = Matrices(weights, [None])
    expected = LinearPool(native.ThreadPool(1)).multiply(matrices, x, isa=isa)[0]
    got = LinearPool(native.ThreadPool(num_threads, spin_us=0)).multiply(matrices, x, isa=isa)[0]
    assert torch.equal(got, expected)


def test_multiply_adds_bias_and_residual(pool: LinearPool, isa: str) -> None:
    x, weights = make(torch.float32, tokens=6, width=50, heights=[21])
    bias, residual = torch.randn(21), torch.randn(6, 21)
    y, *_ = pool.multiply(Matrices(weights, [bias]), x, residual=residual, isa=isa)
    truth = x.double() @ weights[0].double().T + bias.double() + residual.double()
    assert_within_twice_plain(y, x @ weights[0].T + bias + residual, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_multiply_nan_and_infinity_in_a_weight_are_not_hidden(pool: LinearPool, isa: str, dtype: torch.dtype) -> None:
    weight = torch.zeros(5, 37, dtype=dtype)
    weight[1, 36], weight[3, 0] = float("nan"), float("inf")
    y, *_ = pool.multiply(Matrices([weight], [None]), torch.ones(2, 37), isa=isa)
    assert y[:, 1].isnan().all()
    assert y[:, 3].isposinf().all()
    assert (y[:, [0, 2, 4]] == 0).all()


def test_multiply_subnormal_fp16_weights_keep_their_value(pool: LinearPool, isa: str) -> None:
    weight = torch.full((1, 16), 2.0**-24, dtype=torch.float16)
    y, *_ = pool.multiply(Matrices([weight], [None]), torch.full((1, 16), 2.0**20), isa=isa)
    assert y.item() == 1.0


def test_multiply_from_several_python_threads_at_a_time_stays_right(pool: LinearPool) -> None:
    x, weights = make(torch.bfloat16, tokens=2, width=256, heights=[512])
    matrices = Matrices(weights, [None])
    expected = pool.multiply(matrices, x)[0]
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(1 for _ in range(50) if not torch.equal(pool.multiply(matrices, x)[0], expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_matrices_lie_at_their_tensors_and_nowhere_else() -> None:
    weight, bias = torch.ones(2, 3), torch.ones(2)
    matrices = Matrices([weight], [bias])
    assert matrices.lies_at([weight], [bias])
    assert not matrices.lies_at([weight.clone()], [bias])
    assert not matrices.lies_at([weight], [None])


@pytest.mark.parametrize(
    ("weights", "biases", "message"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], [None, None], "weights: expected 3 for the numbers of x"),
        ([torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)], [None, None], "weights: expected one format"),
        ([torch.ones(2, 3)], [torch.ones(3)], "biases: expected 2 for the rows of its weight"),
        ([torch.ones(2, 3)], [torch.ones(2, dtype=torch.float64)], "matrices"),
        ([torch.ones(2, 3)], [], "biases: expected one or None for each of 1 weights"),
        ([torch.ones(2, 3, dtype=torch.int8)], [None], "expected fp32, bf16 or fp16, got int8"),
        ([torch.ones(2, 3, dtype=torch.float64)], [None], "torch.float64"),
        ([torch.ones(3, 2).T], [None], "contiguous"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(weights: list[Tensor], biases: list[Tensor | None], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Matrices(weights, biases)


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        (torch.ones(1, 4), None, "x: expected 3 for the columns of the weights"),
        (torch.ones(1, 3, dtype=torch.bfloat16).float().double(), None, "linear"),
        (torch.ones(3, 1).T.expand(2, 3), None, "linear"),
        (torch.ones(1, 3), torch.ones(2, 2), "residual: expected 1 for the rows of x"),
        (torch.ones(1, 3), torch.ones(1, 3), "residual: expected 2 for the rows of the weight"),
    ],
)
def test_multiply_tensors_that_do_not_fit_are_refused(
    pool: LinearPool, x: Tensor, residual: Tensor | None, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        pool.multiply(Matrices([torch.ones(2, 3)], [None]), x, residual=residual)


def test_multiply_residual_with_several_matrices_is_refused(pool: LinearPool) -> None:
    two = Matrices([torch.ones(2, 3), torch.ones(2, 3)], [None, None])
    with pytest.raises(ShapeError, match="residual: goes with one weight, got 2"):
        pool.multiply(two, torch.ones(1, 3), residual=torch.ones(1, 2))
