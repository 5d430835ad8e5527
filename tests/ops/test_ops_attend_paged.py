"""`attend_paged`: both implementations against the formula in fp64, over pools whose unseen rows are NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from triton_device import DEVICES, DTYPE_CASES
from truth import assert_within_twice_plain, naive_attend

SIZES = [  # Hq, Hkv, D, P, (first key, number of keys) of each request
    (8, 2, 64, 16, ((0, 1), (0, 37), (0, 0), (5, 60))),
    (4, 4, 80, 32, ((3, 130), (0, 64))),
    (7, 1, 96, 64, ((0, 200), (64, 64), (63, 2))),
    (6, 2, 128, 4, ((0, 9), (2, 70))),
    (40, 2, 20, 6, ((0, 33),)),
    (2, 1, 256, 128, ((0, 130), (100, 50))),
]


@dataclass
class Paged:
    """Inputs of `attend_paged`; blocks are dealt out in random order and what no request sees is NaN."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_table: Tensor
    first_key: Tensor
    num_keys: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def attend(self, name: str, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        with dispatch.override("attend_paged", name):
            return api.attend_paged(
                self.q, self.k_pool, self.v_pool, self.block_table, self.first_key, self.num_keys,
                scale=self.scale, out_dtype=out_dtype,
            )  # fmt: skip

    def visible_rows(self, request: int) -> tuple[Tensor, Tensor]:
        """K and V of one request, [Hkv, keys, D]."""
        rows = []
        for pool in (self.k_pool, self.v_pool):
            blocks = pool[:, self.block_table[request].long()].flatten(1, 2)
            first = int(self.first_key[request])
            rows.append(blocks[:, first : first + int(self.num_keys[request])])
        return rows[0], rows[1]


def make_paged(sizes: tuple[int, int, int, int, tuple[tuple[int, int], ...]], dtype: torch.dtype, device: str) -> Paged:
    num_q_heads, num_kv_heads, head_dim, block_size, spans = sizes
    torch.manual_seed(0)
    num_blocks_each = max(-(-(first + num) // block_size) for first, num in spans) + 1
    num_blocks = num_blocks_each * len(spans)
    table = torch.randperm(num_blocks).view(len(spans), num_blocks_each)
    pools = torch.full((2, num_kv_heads, num_blocks * block_size, head_dim), torch.nan)
    for row, (first, num) in enumerate(spans):
        places = torch.arange(first, first + num)
        slots = table[row, places // block_size] * block_size + places % block_size
        pools[:, :, slots] = torch.randn(2, num_kv_heads, num, head_dim)
    pools = pools.view(2, num_kv_heads, num_blocks, block_size, head_dim).to(device, dtype)
    return Paged(
        q=torch.randn(len(spans), num_q_heads, head_dim).to(device, dtype),
        k_pool=pools[0],
        v_pool=pools[1],
        block_table=table.to(device, torch.int32),
        first_key=torch.tensor([first for first, _ in spans], dtype=torch.int32, device=device),
        num_keys=torch.tensor([num for _, num in spans], dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("sizes", SIZES)
def test_attend_paged_equals_the_formula(
    sizes: tuple[int, int, int, int, tuple[tuple[int, int], ...]], device: str, dtype: torch.dtype, name: str
) -> None:
    paged = make_paged(sizes, dtype, device)
    out, lse = paged.attend(name)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for row, (_, num_keys) in enumerate(sizes[-1]):
        if num_keys == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -torch.inf).all()
            continue
        k, v = paged.visible_rows(row)
        q = paged.q[row : row + 1]
        visible = torch.ones(1, num_keys, dtype=torch.bool, device=device)
        truth_out, truth_lse = naive_attend(q.double(), k.double(), v.double(), paged.scale, visible)
        plain_out, plain_lse = naive_attend(q, k, v, paged.scale, visible)
        assert_within_twice_plain(out[row : row + 1], plain_out, truth_out, num_roundings=3)  # splits are merged
        assert_within_twice_plain(lse[row : row + 1], plain_lse.float(), truth_lse, num_roundings=3)


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_attend_paged_in_triton_with_fp32_out_equals_the_reference(device: str, dtype: torch.dtype) -> None:
    paged = make_paged(SIZES[0], dtype, device)
    out, lse = paged.attend("triton", torch.float32)
    wanted_out, wanted_lse = paged.attend("reference", torch.float32)
    tolerance = {"rtol": 0.0, "atol": 4 * torch.finfo(dtype).eps}  # the weights are rounded to the dtype of V
    torch.testing.assert_close(out, wanted_out, **tolerance)
    torch.testing.assert_close(lse, wanted_lse, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_attend_paged_in_triton_reads_queries_and_heads_with_strides(num_rows: int, device: str) -> None:
    paged = make_paged((4, 2, 16, 16, tuple((0, 1 + 3 * row % 40) for row in range(num_rows))), torch.float32, device)
    wanted = paged.attend("triton")
    fused = torch.cat((paged.q, paged.q[:, :3]), dim=1)  # heads of k and v behind those of q
    paged.q = fused[:, :4]
    wide = torch.stack((paged.k_pool, paged.v_pool), dim=1)  # [Hkv, 2, N, P, D]: heads further apart
    paged.k_pool, paged.v_pool = wide[:, 0], wide[:, 1]
    got = paged.attend("triton")
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("device", DEVICES)
def test_attend_paged_in_triton_with_huge_scores_stays_finite(device: str) -> None:
    paged = make_paged((4, 2, 16, 16, ((0, 50),)), torch.float32, device)
    paged.q *= 1000
    out, lse = paged.attend("triton")
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [16_384, 131_072])
def test_attend_paged_over_a_long_context_equals_the_reference(num_keys: int) -> None:
    paged = make_paged((32, 8, 128, 64, ((0, num_keys),)), torch.bfloat16, "cuda")
    out, lse = paged.attend("triton", torch.float32)
    wanted_out, wanted_lse = paged.attend("reference", torch.float32)
    scale = wanted_out.abs().max()
    assert (out - wanted_out).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * scale
    torch.testing.assert_close(lse, wanted_lse, rtol=0.0, atol=1e-4)


@pytest.mark.gpu
def test_attend_paged_in_a_cuda_graph_follows_its_inputs() -> None:
    paged = make_paged(SIZES[0], torch.bfloat16, "cuda")
    paged.attend("triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged.attend("triton")
    for num_keys in (1, 20, 0):
        paged.num_keys.fill_(num_keys)
        paged.first_key.fill_(5 if num_keys == 1 else 7)
        paged.k_pool.nan_to_num_(0.5)
        paged.v_pool.nan_to_num_(0.25)
        graph.replay()
        wanted_out, wanted_lse = paged.attend("triton")
        assert torch.equal(out, wanted_out)
        assert torch.equal(lse, wanted_lse)


def test_attend_paged_with_a_table_of_another_dtype_raises() -> None:
    paged = make_paged(SIZES[0], torch.float32, "cpu")
    paged.block_table = paged.block_table.long()
    with pytest.raises(ShapeError, match=r"first_key is torch\.int32 on cpu, but block_table is torch\.int64"):
        paged.attend("reference")


def test_attend_paged_with_heads_that_do_not_divide_raises() -> None:
    paged = make_paged(SIZES[0], torch.float32, "cpu")
    paged.q = paged.q[:, :3]
    with pytest.raises(ShapeError, match="q has 3 heads: not a multiple of the 2 heads"):
        paged.attend("reference")


def test_attend_paged_over_a_pool_with_scattered_rows_raises() -> None:
    paged = make_paged(SIZES[0], torch.float32, "cpu")
    paged.k_pool = paged.k_pool.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ShapeError, match="k_pool: the rows of a head must be contiguous"):
        paged.attend("reference")
