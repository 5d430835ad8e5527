"""Products with quantised matrices on a GPU: the Triton kernel against the numbers that GGUF defines."""

import pytest
import torch

from ambidex.kernels.cpu.quantized import QuantizedMatrix
from ambidex.kernels.dispatch import override
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.kernels.reference import quantized as reference_quantized
from quantized_rows import dequantize, packed, random_rows
from triton_device import DTYPE_CASES

pytest.importorskip("triton")

from ambidex.kernels.triton import quantized  # needs triton


@pytest.mark.parametrize("kind", quantized.RECORD_BYTES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_blocks"),
    [(1, 64, 2), (3, 130, 1), (17, 16, 3), (40, 7, 2), (2, 50, 37), (70, 96, 4), (129, 37, 3)],
)
def test_product_equals_that_with_dequantised_numbers(
    num_tokens: int, num_rows: int, num_blocks: int, device: str, dtype: torch.dtype, kind: str
) -> None:
    rows = random_rows(kind, num_rows, num_blocks, seed=num_rows)
    weight = torch.from_numpy(dequantize(kind, rows)).double()
    torch.manual_seed(num_tokens)
    x = (torch.randn(num_tokens, num_blocks * 32) / 64).to(dtype)
    got = quantized.multiply(x.to(device), packed(kind, rows).data.to(device), kind, num_rows)
    wanted = x.double() @ weight.T
    size = (x.double().abs() @ weight.abs().T).max()
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
    assert got.dtype == dtype
    assert (got.cpu().double() - wanted).abs().max() <= tolerance * size
    assert wanted.abs().max() > 10 * tolerance * size


@pytest.mark.parametrize("kind", quantized.RECORD_BYTES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("times", [1, 2])
def test_every_number_is_in_its_place(
    times: int, device: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit vector reads a column; twice as many of them are too many for one tile."""
    monkeypatch.setattr(quantized, "_PIECE_NUMBERS", 16 * 64)  # one group after the other
    rows = random_rows(kind, 32, 2, seed=3)
    weight = torch.from_numpy(dequantize(kind, rows))
    x = torch.eye(64, dtype=dtype, device=device).repeat(times, 1)
    got = quantized.multiply(x, packed(kind, rows).data.to(device), kind, 32)
    torch.testing.assert_close(got.float().cpu(), weight.T.to(dtype).float().repeat(times, 1), rtol=1e-2, atol=0)


def test_few_tiles_are_cut_along_the_rows_so_that_there_are_many_programs() -> None:
    assert quantized.choose_num_splits(num_tiles=128, num_blocks=256) == 8
    assert quantized.choose_num_splits(num_tiles=2000, num_blocks=256) == 1
    assert quantized.choose_num_splits(num_tiles=1, num_blocks=256) == 16
    assert quantized.choose_num_splits(num_tiles=1, num_blocks=17) == 2
    assert quantized.choose_num_splits(num_tiles=1, num_blocks=1) == 1


@pytest.mark.parametrize("kind", reference_quantized.RECORD_BYTES)
@pytest.mark.parametrize("num_rows", [1, 16, 37])
def test_reference_gives_the_numbers_that_gguf_defines(num_rows: int, kind: str) -> None:
    rows = random_rows(kind, num_rows, 3, seed=num_rows)
    got = reference_quantized.dense(packed(kind, rows).data, kind, num_rows)
    assert torch.equal(got, torch.from_numpy(dequantize(kind, rows)))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["reference", "triton"])
@pytest.mark.parametrize("kind", quantized.RECORD_BYTES)
def test_rows_packed_into_gpu_memory_piece_by_piece_are_the_matrix(kind: str, op: str) -> None:
    rows = random_rows(kind, 70, 2, seed=1)
    there = QuantizedMatrix(kind, (70, 64), torch.zeros_like(packed(kind, rows).data, device="cuda"))
    for start, stop in ((0, 7), (7, 33), (33, 70)):
        there.pack(start, rows[start:stop])
    assert torch.equal(there.data.cpu(), packed(kind, rows).data)
    x, bias = torch.randn(2, 64, device="cuda"), torch.randn(70, device="cuda")
    with override("quantized_linear", op):
        got = LinearOp(LinearContext())(x, (there,), (bias,))[0]
    wanted = torch.nn.functional.linear(x.cpu(), torch.from_numpy(dequantize(kind, rows)), bias.cpu())
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-2)
