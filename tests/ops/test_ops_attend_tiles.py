"""`attend_tiles`: both implementations against the formula in fp64, over tiles whose unseen rows are NaN."""

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.reference import kv_tiles
from triton_device import INTERPRETED
from truth import assert_within_twice_plain, naive_attend

CASES = [
    pytest.param("cpu", torch.float16, marks=INTERPRETED),  # the interpreter computes products of bf16 wrongly
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
SIZES = [  # Hq, Hkv, D, P, number of keys of each request
    (8, 2, 64, 64, (1, 64, 0, 200)),
    (4, 4, 128, 16, (16, 37)),
    (7, 1, 32, 32, (130, 2)),
    (6, 2, 50, 96, (96, 97)),
    (4, 4, 80, 64, (200, 0, 64)),  # rows of 3 chunks of 32 dims, the last of which is half padding
    (6, 2, 96, 32, (33, 1)),
    (7, 1, 112, 16, (16, 37)),
    (4, 2, 160, 64, (130, 2)),  # 5 chunks
    (3, 3, 192, 96, (96, 97)),  # 3 of 64 dims
    (8, 1, 192, 64, (5, 129)),
    (2, 1, 200, 16, (35,)),  # 7, the last of which has 8 dims
    (4, 2, 256, 64, (70, 64)),
    (2, 1, 300, 64, (65, 32)),  # tiles of half as many keys
]


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("sizes", SIZES)
def test_attend_tiles_equals_the_formula(
    sizes: tuple[int, int, int, int, tuple[int, ...]], device: str, dtype: torch.dtype, name: str
) -> None:
    num_q_heads, num_kv_heads, head_dim, block_size, lengths = sizes
    generator = torch.Generator().manual_seed(0)
    num_each = max(-(-length // block_size) for length in lengths) + 1
    table = torch.randperm(num_each * len(lengths), generator=generator).view(len(lengths), num_each)
    shape = (num_kv_heads, table.numel(), block_size, head_dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        blocks, offsets = table[row, places // block_size], places % block_size
        for pool in (k, v):
            pool[:, blocks, offsets] = torch.randn(num_kv_heads, length, head_dim, generator=generator).to(dtype)
    q = torch.randn(len(lengths), num_q_heads, head_dim, generator=generator).to(dtype)
    with dispatch.override("attend_tiles", name):
        out, lse = api.attend_tiles(
            q.to(device), kv_tiles.pack_k(k).to(device), kv_tiles.pack_v(v).to(device),
            table.to(device, torch.int32), torch.tensor(lengths, dtype=torch.int32, device=device), scale=0.3,
        )  # fmt: skip
    assert out.dtype == lse.dtype == torch.float32
    for row, length in enumerate(lengths):
        if length == 0:
            assert out[row].eq(0).all()
            assert lse[row].eq(-torch.inf).all()
            continue
        keys, values = (pool[:, table[row]].flatten(1, 2)[:, :length] for pool in (k, v))
        visible = torch.ones(1, length, dtype=torch.bool)
        truth, truth_lse = naive_attend(q[row : row + 1].double(), keys.double(), values.double(), 0.3, visible)
        plain, _ = naive_attend(q[row : row + 1], keys, values, 0.3, visible)
        assert_within_twice_plain(out[row : row + 1].cpu().to(dtype), plain, truth)
        torch.testing.assert_close(lse[row].cpu().double(), truth_lse[0], rtol=0, atol=2e-3)


def test_attend_tiles_refuses_numbers_that_it_has_no_tiles_for() -> None:
    q, pool = torch.zeros(1, 2, 32), torch.zeros(1, 1, 16, 32)
    table, num_keys = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="expected 16-bit numbers"):
        api.attend_tiles(q, pool, pool, table, num_keys, scale=1.0)
    q, pool = torch.zeros(1, 2, 80, dtype=torch.float16), torch.zeros(1, 1, 16, 128, dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"rows padded to 96, .* got torch\.float16, 128"):
        api.attend_tiles(q, pool, pool, table, num_keys, scale=1.0)
