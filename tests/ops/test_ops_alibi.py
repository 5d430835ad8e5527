"""Attention with slopes against the definition in double precision, over keys with gaps between their positions."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import alibi, api, dispatch
from ambidex.kernels.cpu import native

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


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.int8, 3e-3)])
def test_native_attention_with_slopes_equals_the_definition(isa: str, dtype: torch.dtype, tolerance: float) -> None:
    """Blocks with gaps between them, two requests of two and one queries, keys that are hidden at both ends."""
    q, k, v = make_rows(3, 9 * 32, torch.float32, "cpu")
    pool = native.AttentionPool(native.ThreadPool(2))
    tiles, scales, values = {}, {}, {}
    for part, rows in (("k", k), ("v", v)):
        blocks = torch.zeros(2, 9, 32, 32, dtype=dtype)
        scale = torch.zeros(2, 9, 32) if dtype == torch.int8 else None
        pool.store_values(part, blocks, torch.arange(9 * 32), rows.transpose(0, 1).contiguous(), scales=scale)
        back = pool.gather_rows(part, blocks, torch.arange(9), first_key=0, num_keys=9 * 32, head_dim=24)
        values[part] = back.float() if scale is None else back.float() * scale.reshape(2, -1, 1)
        tiles[part], scales[part] = blocks, scale
    block_ids = torch.tensor([5, 0, 7, 8, 2])
    batch = native.KeyBatch(
        block_ids, torch.tensor([0, 3, 5]), torch.tensor([6, 0]), torch.tensor([80, 40]), torch.tensor([0, 2, 3]),
        block_size=32,
    )  # fmt: skip
    of_blocks, of_rows = torch.tensor([0, 32, 640, 64, 128]), torch.tensor([670, 675, 200])
    settings = {"scale": 0.25, "k_scales": scales["k"], "v_scales": scales["v"], "isa": isa}
    with pytest.raises(ShapeError, match="the batch has no positions"):
        pool.attend_blocks(q, tiles["k"], tiles["v"], batch, slopes=SLOPES, **settings)
    with pytest.raises(ShapeError, match="positions: expected those of 5 blocks and 3 rows, got 5 and 2"):
        batch.set_positions(of_blocks, of_rows[:2])
    batch.set_positions(of_blocks, of_rows)
    out, lse = pool.attend_blocks(q, tiles["k"], tiles["v"], batch, slopes=SLOPES, **settings)
    offsets = torch.arange(32)
    for rows, blocks, visible in ((slice(0, 2), slice(0, 3), slice(6, 86)), (slice(2, 3), slice(3, 5), slice(0, 40))):
        slots = (block_ids[blocks, None] * 32 + offsets).flatten()[visible]
        positions = (of_blocks[blocks, None] + offsets).flatten()[visible]
        everything = torch.ones(rows.stop - rows.start, len(slots), dtype=torch.bool)
        wanted, wanted_lse = naive(
            q[rows], values["k"][:, slots], values["v"][:, slots], 0.25, of_rows[rows], positions, everything
        )
        torch.testing.assert_close(out[rows].double(), wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[rows].double(), wanted_lse, rtol=tolerance, atol=tolerance)
