"""`gather_blocks` and `store_rows`."""

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels import api

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("block_ids", [[], [2], [4, 0, 3]])
def test_gather_blocks_puts_blocks_side_by_side(block_ids: list[int], block_size: int, device: str) -> None:
    pool = torch.randn(2, 5, block_size, 4, device=device)
    rows = api.gather_blocks(pool, torch.tensor(block_ids, dtype=torch.int64, device=device))
    expected = [pool[:, block_id] for block_id in block_ids]
    assert torch.equal(rows, torch.cat(expected, 1) if expected else pool.new_empty(2, 0, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_store_rows_writes_its_slots_and_no_others(device: str) -> None:
    pool = torch.zeros(2, 4, 3, 5, device=device)
    rows = torch.randn(3, 2, 5, device=device)
    api.store_rows(pool, torch.tensor([7, 0, 11], device=device), rows)
    assert torch.equal(pool[:, 2, 1], rows[0])
    assert torch.equal(pool[:, 0, 0], rows[1])
    assert torch.equal(pool[:, 3, 2], rows[2])
    assert int(pool.count_nonzero()) == rows.numel()


def test_store_rows_in_another_dtype_raises() -> None:
    with pytest.raises(ShapeError, match=r"rows is torch\.float16 on cpu, but pool is torch\.float32 on cpu"):
        api.store_rows(torch.zeros(2, 4, 3, 5), torch.tensor([1]), torch.zeros(1, 2, 5).half())


def test_store_rows_with_too_few_slots_raises() -> None:
    with pytest.raises(ShapeError, match="rows: expected T=1"):
        api.store_rows(torch.zeros(2, 4, 3, 5), torch.tensor([1]), torch.zeros(2, 2, 5))
