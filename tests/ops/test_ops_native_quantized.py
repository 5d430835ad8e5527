"""Native products with quantised matrices, and their layout: each type and instruction set against gguf and float64."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ambidex import _native
from ambidex.core.errors import ShapeError
from ambidex.kernels import dispatch
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix, packed_bytes
from ambidex.kernels.linear import MOST_NATIVE_TOKENS, LinearContext, LinearOp
from quantized_rows import SCALES, dequantize, packed, random_rows

KINDS = list(BLOCKS)


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> LinearPool:
    return LinearPool(native.ThreadPool(2))


def make_x(num_tokens: int, width: int) -> Tensor:
    """Normal numbers with outliers, as activations have them."""
    random = torch.Generator().manual_seed(width + num_tokens)
    x = torch.randn(num_tokens, width, generator=random)
    return torch.where(torch.rand(x.shape, generator=random) < 0.02, 300 * x, x)


def assert_near(y: Tensor, x: Tensor, kind: str, weight: Tensor, extra: Tensor | None = None) -> None:
    """Within what `LinearPool.multiply` states: a number of x is off by 2^-16 of the largest of its 32."""
    truth = x.double() @ weight.double().T + (0 if extra is None else extra.double())
    largest_x = x.view(x.shape[0], x.shape[1] // 32, 32).abs().amax(-1).repeat_interleave(32, dim=1)
    step = BLOCKS[kind][0]
    blocks = weight.abs().view(weight.shape[0], -1, step)
    parts = 2 * blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(weight.shape)
    rounding = 2.0**-24 * weight.shape[1] ** 0.5 * 4
    allowed = 2.0**-16 * largest_x.double() @ parts.double().T + rounding * (x.abs().double() @ parts.double().T)
    if extra is not None:
        allowed += 2.0**-22 * extra.abs()
    assert ((y.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_gguf(kind: str) -> None:
    assert BLOCKS[kind] == GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@given(st.sampled_from(KINDS), st.integers(1, 50), st.integers(1, 4), st.integers(0, 2**32 - 1), st.data())
def test_rows_that_are_packed_in_pieces_come_back_as_gguf_dequantizes_them(
    kind: str, num_rows: int, num_blocks: int, seed: int, data: st.DataObject
) -> None:
    rows = random_rows(kind, num_rows, num_blocks, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=3)))
    matrix = QuantizedMatrix.zeros(kind, (num_rows, num_blocks * BLOCKS[kind][0]))
    for start, stop in zip([0, *cuts], [*cuts, num_rows], strict=True):
        matrix.pack(start, rows[start:stop])
    expected = torch.from_numpy(dequantize(kind, rows))
    assert torch.equal(matrix.dense(), expected)
    indices = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=5)), dtype=torch.int64)
    assert torch.equal(matrix.rows(indices), expected[indices])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_bytes_are_those_of_gguf(kind: str, isa: str) -> None:
    """Damaged scales too: infinities and NaN stand where gguf has them."""
    rows = np.random.default_rng(1).integers(0, 256, (300, 2 * BLOCKS[kind][1]), dtype=np.uint8)
    got = packed(kind, rows).rows(torch.arange(300), isa=isa)
    torch.testing.assert_close(got, torch.from_numpy(dequantize(kind, rows)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_are_those_of_the_file(kind: str) -> None:
    rows = random_rows(kind, 48, 3, 0)
    matrix = packed(kind, rows)
    assert matrix.data.numel() == rows.size == packed_bytes(kind, matrix.shape)
    assert packed(kind, rows[:33]).data.numel() == rows.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 67, 192])
def test_multiply_any_size_is_near_float64(
    pool: LinearPool, isa: str, kind: str, num_blocks: int, num_rows: int
) -> None:
    rows = random_rows(kind, num_rows, num_blocks, num_rows)
    matrix, weight = packed(kind, rows), torch.from_numpy(dequantize(kind, rows))
    x = make_x(1 + num_rows % 9, matrix.shape[1])
    assert_near(pool.multiply(Matrices([matrix], [None]), x, isa=isa)[0], x, kind, weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 7, 8, 9, 33])
def test_multiply_any_number_of_tokens_is_near_float64(pool: LinearPool, isa: str, kind: str, num_tokens: int) -> None:
    rows = random_rows(kind, 100, 1536 // BLOCKS[kind][0], 5)
    matrices, weight = Matrices([packed(kind, rows)], [None]), torch.from_numpy(dequantize(kind, rows))
    x = make_x(num_tokens, 1536)
    y = pool.multiply(matrices, x, isa=isa)[0]
    assert y.shape == (num_tokens, 100)
    assert_near(y, x, kind, weight)
    for token in range(num_tokens):  # alone as among others
        assert torch.equal(pool.multiply(matrices, x[token : token + 1], isa=isa)[0][0], y[token])


@pytest.mark.parametrize("kind", KINDS)
def test_multiply_adds_bias_and_residual(pool: LinearPool, isa: str, kind: str) -> None:
    rows = random_rows(kind, 21, 2, 3)
    matrix, weight = packed(kind, rows), torch.from_numpy(dequantize(kind, rows))
    x, bias, residual = make_x(6, matrix.shape[1]), torch.randn(21), torch.randn(6, 21)
    y, *_ = pool.multiply(Matrices([matrix], [bias]), x, residual=residual, isa=isa)
    assert_near(y, x, kind, weight, bias + residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_multiply_several_matrices_in_one_call_equal_one_after_the_other(isa: str, kind: str, num_threads: int) -> None:
    pool = LinearPool(native.ThreadPool(num_threads, spin_us=0))
    matrices = [packed(kind, random_rows(kind, n, 3, n)) for n in (40, 1, 333)]
    biases = [torch.randn(40), None, torch.randn(333)]
    x = make_x(3, matrices[0].shape[1])
    together = pool.multiply(Matrices(matrices, biases), x, isa=isa)
    for y, matrix, bias in zip(together, matrices, biases, strict=True):
        assert torch.equal(y, pool.multiply(Matrices([matrix], [bias]), x, isa=isa)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [0x7E00, 0x7C00, 0xFC00])
def test_multiply_a_damaged_scale_shows_in_its_row_alone(pool: LinearPool, isa: str, kind: str, damage: int) -> None:
    for at in SCALES[kind]:
        rows = random_rows(kind, 20, 2, 9)
        rows[17, at : at + 2] = np.frombuffer(np.uint16(damage).tobytes(), np.uint8)
        y, *_ = pool.multiply(Matrices([packed(kind, rows)], [None]), make_x(2, 2 * BLOCKS[kind][0]), isa=isa)
        assert not y[:, 17].isfinite().any()
        assert y[:, [row for row in range(20) if row != 17]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_multiply_x_that_is_not_finite_shows_in_its_token_alone(pool: LinearPool, isa: str, kind: str) -> None:
    matrices = Matrices([packed(kind, random_rows(kind, 20, 2, 9))], [None])
    x = make_x(5, 2 * BLOCKS[kind][0])
    expected = pool.multiply(matrices, x, isa=isa)[0]
    x[1, 3], x[3, -1] = float("nan"), float("-inf")
    y = pool.multiply(matrices, x, isa=isa)[0]
    assert not y[[1, 3]].isfinite().any()
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [0.0, 1e-44, 1e-38, 1e-30, 1e30])
def test_multiply_tiny_and_huge_x_keep_their_size(pool: LinearPool, isa: str, kind: str, factor: float) -> None:
    rows = random_rows(kind, 20, 2, 9)
    matrix, weight = packed(kind, rows), torch.from_numpy(dequantize(kind, rows))
    x = torch.randn(2, matrix.shape[1]) * factor
    y = pool.multiply(Matrices([matrix], [None]), x, isa=isa)[0]
    truth = x.double() @ weight.double().T
    error, size = (y.double() - truth).abs(), x.abs().double() @ weight.abs().double().T
    assert (error <= 2.0**-10 * size + 2.0**-120 * weight.abs().double().sum(1)).all()


def test_linear_op_takes_matrices_of_several_formats() -> None:
    op = LinearOp(LinearContext(native.ThreadPool(2)))
    kinds = [KINDS[0], None, KINDS[-1], KINDS[0]]
    width = BLOCKS[KINDS[-1]][0] * 2
    rows = [kind and random_rows(kind, 30 + i, width // BLOCKS[kind][0], i) for i, kind in enumerate(kinds)]
    weights = [
        torch.randn(50, width).half() if kind is None else packed(kind, some)
        for kind, some in zip(kinds, rows, strict=True)
    ]
    biases = [torch.randn(weight.shape[0]) if i % 2 else None for i, weight in enumerate(weights)]
    for num_tokens in (1, 5, MOST_NATIVE_TOKENS, MOST_NATIVE_TOKENS + 1, 1):
        x = make_x(num_tokens, width)
        for i, y in enumerate(op(x, weights, biases)):
            weight = weights[i] if kinds[i] is None else torch.from_numpy(dequantize(kinds[i], rows[i]))
            assert_near(y, x, kinds[i] or KINDS[0], weight.float(), biases[i])
    weights[2] = packed(kinds[2], rows[2][:7])  # another one in its place
    assert [y.shape[1] for y in op(make_x(1, width), weights, [*biases[:2], None, None])] == [30, 50, 7, 33]


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS["linear"])
def test_linear_op_of_every_implementation_multiplies_quantised_weights(implementation: str) -> None:
    rows = random_rows("Q4_1", 30, 4, 1)
    x = make_x(3, 128)
    with dispatch.override("linear", implementation):
        (y,) = LinearOp(LinearContext(native.ThreadPool(1)))(x, [packed("Q4_1", rows)], [None])
    assert_near(y, x, "Q4_1", torch.from_numpy(dequantize("Q4_1", rows)))


def test_matrices_of_quantised_weights_lie_at_them_and_nowhere_else() -> None:
    rows = random_rows("Q8_0", 3, 1, 0)
    weight, other = packed("Q8_0", rows), packed("Q8_0", rows)
    matrices = Matrices([weight], [None])
    assert matrices.lies_at([weight], [None])
    assert not matrices.lies_at([other], [None])


def test_what_does_not_fit_is_refused(pool: LinearPool) -> None:
    matrix = packed("Q8_0", random_rows("Q8_0", 20, 2, 0))
    other = packed("Q8_0", random_rows("Q8_0", 20, 1, 0))
    mixed = packed("Q4_0", random_rows("Q4_0", 20, 2, 0))
    with pytest.raises(ShapeError, match="got Q3_K of shape"):
        QuantizedMatrix.zeros("Q3_K", (4, 256))
    with pytest.raises(ShapeError, match="got Q8_0 of shape"):
        QuantizedMatrix.zeros("Q8_0", (4, 48))
    with pytest.raises(ShapeError, match="rows 1 to 21 do not lie in 20 rows"):
        matrix.pack(1, random_rows("Q8_0", 20, 2, 0))
    with pytest.raises(ShapeError, match="rows: expected 68 for the bytes of a row"):
        matrix.pack(0, random_rows("Q8_0", 20, 1, 0))
    for index in (-1, 20, 31):
        with pytest.raises(ShapeError, match=f"indices: {index} is no row of 20"):
            matrix.rows(torch.tensor([0, index]))
    with pytest.raises(ShapeError, match="weights: expected 1088 for the bytes of a group"):
        Matrices([matrix, other], [None, None])
    with pytest.raises(ShapeError, match="weights: expected one format"):
        Matrices([matrix, mixed], [None, None])
    with pytest.raises(ShapeError, match="biases: expected 20 for the rows of its weight"):
        Matrices([matrix], [torch.ones(32)])
    with pytest.raises(ShapeError, match="biases, num_out: expected one for each of 1 weights"):
        Matrices([matrix], [])
    with pytest.raises(ShapeError, match="x: expected 64 for the columns of the weights"):
        pool.multiply(Matrices([matrix], [None]), torch.ones(1, 32))
