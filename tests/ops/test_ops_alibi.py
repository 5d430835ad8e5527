"""Attention with slopes against the definition in double precision, over keys with gaps between their positions."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import alibi, api, dispatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOPES = torch.tensor([0.5, 2.0**-3, 2.0**-8, 2.0**-1, 0.0, 0.25])


def naive(
    q: Tensor, k: Tensor, v: Tensor, scale: float, query_positions: Tensor, key_positions: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[0]
    keys, values = (rows.double().repeat_interleave(group, dim=0) for rows in (k, v))  # [Hq, S, D]
    scores = torch.einsum("thd,hsd->hts", q.double(), keys) * scale
    scores = scores + SLOPES.to(q.device).double()[:, None, None] * (key_positions - query_positions[:, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("hts,hsd->thd", torch.exp(scores - lse[..., None]), values), lse.T


def make_rows(num_queries: int, num_keys: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_keys)
    shapes = ((num_queries, 6, 24), (2, num_keys, 24), (2, num_keys, 24))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["reference", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("start", [40, 5_000, 60_000])
def test_attend_with_slopes_equals_the_definition(
    start: int, dtype: torch.dtype, tolerance: float, op: str, device: str
) -> None:
    q, k, v = make_rows(7, 300, dtype, device)
    queries = torch.arange(start, start + 7, device=device)
    keys = torch.cat((torch.arange(100), torch.arange(start - 250, start - 50))).clamp_min(0).to(device)
    mask = torch.rand(7, 300, device=device) < 0.7
    mask[3] = False
    settings = {"scale": 0.25, "query_positions": queries, "key_positions": keys}
    with dispatch.override("attend", op):
        out, lse = alibi.attend(q, k, v, slopes=SLOPES.to(device), mask=mask, **settings)
    wanted, wanted_lse = naive(q, k, v, visible=mask, **settings)
    seen = [0, 1, 2, 4, 5, 6]
    assert out.dtype == dtype
    torch.testing.assert_close(out[seen].double(), wanted[seen], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], rtol=1e-4, atol=1e-2)  # slopes: powers of 2
    assert out[3].eq(0).all()
    assert lse[3].eq(-torch.inf).all()


def test_parts_merge_into_the_whole_wherever_they_are_cut() -> None:
    q, k, v = make_rows(5, 64, torch.float32, "cpu")
    positions = torch.arange(64) * 3
    queries = torch.arange(190, 195)
    settings = {"scale": 0.3, "slopes": SLOPES, "query_positions": queries}
    whole = alibi.attend(q, k, v, key_positions=positions, **settings)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    state = None
    for part in order.split([1, 30, 20, 13]):
        out, lse = alibi.attend(q, k[:, part], v[:, part], key_positions=positions[part], **settings)
        state = (out, lse) if state is None else api.merge_states(*state, out, lse)
    assert state is not None
    torch.testing.assert_close(state[0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1], whole[1], rtol=1e-5, atol=1e-4)


def test_causal_chunk_and_empty_sets_of_keys() -> None:
    q, k, v = make_rows(6, 6, torch.float32, "cpu")
    positions = torch.arange(6)
    settings = {"scale": 0.3, "slopes": SLOPES, "query_positions": positions}
    out, lse = alibi.attend(q, k, v, key_positions=positions, causal=True, **settings)
    tril = torch.ones(6, 6, dtype=torch.bool).tril()
    wanted, wanted_lse = naive(q, k, v, 0.3, positions, positions, tril)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    out, lse = alibi.attend(q, k[:, :0], v[:, :0], key_positions=positions[:0], **settings)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_positions_that_do_not_fit_are_refused() -> None:
    q, k, v = make_rows(2, 3, torch.float32, "cpu")
    positions = torch.arange(3)
    with pytest.raises(ShapeError, match=r"expected \[6\], \[2\], \[3\], got \(6,\), \(3,\), \(3,\)"):
        alibi.attend(q, k, v, scale=1.0, slopes=SLOPES, query_positions=positions, key_positions=positions)
