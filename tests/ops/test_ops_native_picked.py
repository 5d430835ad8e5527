"""Picked neurons: each instruction set that this machine runs, against float64."""

import pytest
import torch
from torch import Tensor

from ambidex import _native
from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.picked import PickedPool


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).to(dtype), torch.randn(width, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_picked", "width", "num_threads"), [(0, 64, 2), (1, 128, 1), (7, 64, 2), (40, 832, 3)])
def test_sums_of_picked_neurons_equal_float64(
    num_picked: int, width: int, num_threads: int, dtype: torch.dtype, isa: str
) -> None:
    table, x = make(100, width, dtype)
    generator = torch.Generator().manual_seed(num_picked)
    in_rows, out_rows = (torch.randperm(100, generator=generator)[:num_picked] for _ in range(2))
    bias = torch.randn(num_picked, generator=generator)
    pool = PickedPool(ThreadPool(num_threads))
    h, y = pool.relu_sum(table, in_rows, out_rows, bias, x, isa=isa)
    wanted_h = torch.relu(table[in_rows].double() @ x.double() + bias.double())
    wanted = wanted_h @ table[out_rows].double()
    torch.testing.assert_close(h.double(), wanted_h, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-3)
    again = pool.relu_sum(table, in_rows, out_rows, bias, x, isa=isa)
    assert torch.equal(again[1], y)
    without, _ = pool.relu_sum(table, in_rows, out_rows, None, x, isa=isa)
    torch.testing.assert_close(without.double(), torch.relu(table[in_rows].double() @ x.double()), rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    pool, none = PickedPool(ThreadPool(1)), torch.zeros(0, dtype=torch.int64)
    table, x = make(4, 96, torch.float32)
    with pytest.raises(ShapeError, match="a multiple of 64"):
        pool.relu_sum(table, none, none, None, x)
    table, x = make(4, 64, torch.float32)
    with pytest.raises(ShapeError, match="expected 0 to 4"):
        pool.relu_sum(table, torch.tensor([4]), torch.tensor([0]), None, x)
    with pytest.raises(ShapeError, match="the picked neurons"):
        pool.relu_sum(table, torch.tensor([1]), none, None, x)
