"""`attend_scanned`: what both implementations leave out and their error, against exact attention in fp64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.reference import kv_tiles
from triton_device import DTYPE_CASES, INTERPRETED

SCALE = 0.2
NAMES = ["reference", "triton"]


@dataclass(frozen=True)
class World:
    """Requests whose blocks lie in any order, rows behind those that are seen being NaN."""

    q: Tensor  # [B, Hq, D]
    k: Tensor  # [Hkv, N, P, D]
    v: Tensor
    table: Tensor  # [B, M]
    lengths: tuple[int, ...]
    near_lse: Tensor
    near_part: Tensor

    def rows_of(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, S, D] of a request."""
        k, v = (part[:, self.table[row]].flatten(1, 2)[:, : self.lengths[row]].double() for part in (self.k, self.v))
        return k, v

    def scores(self, row: int) -> Tensor:
        """[Hq, S] in fp64."""
        k, _ = self.rows_of(row)
        query = self.q[row].double().view(len(k), -1, k.shape[2])
        return (query @ k.mT * SCALE).flatten(0, 1)

    def attend(
        self, name: str, max_mass: float, device: str = "cpu", *, kept: Tensor | None = None, **changed: Tensor
    ) -> tuple[Tensor, ...]:
        """`attend_scanned` by an implementation."""
        seen = torch.where(self.k.isnan(), 0.0, self.k.float())
        numbers, scales = api.quantize_rows(seen)
        scales = torch.where(self.k[..., 0].isnan(), torch.nan, scales)
        dim = kv_tiles.padded_dim(self.k.shape[3])
        pad = torch.nn.functional.pad
        both = torch.cat([pad(part, (0, dim - part.shape[3])) for part in (self.k, self.v)], -1)
        longest = self.v.nan_to_num().double().norm(dim=-1).amax(-1).float() * (1 + 1e-6)
        arrays = {
            "scan_pool": kv_tiles.pack_k(numbers),
            "scan_scales": scales,
            "rows": both,
            "norms": torch.stack((longest, longest), -1),
            "block_table": self.table.int(),
            "num_keys": torch.tensor(self.lengths, dtype=torch.int32),
            "near_lse": self.near_lse,
            "near_part": self.near_part,
        } | changed
        with dispatch.override("attend_scanned", name):
            answer = api.attend_scanned(
                self.q.to(device), **{key: part.contiguous().to(device) for key, part in arrays.items()},
                scale=SCALE, max_mass=max_mass, max_keys=sum(self.lengths), kept=kept,
            )  # fmt: skip
        return tuple(part.cpu() for part in answer)


def make_world(
    lengths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (6, 2),
    dim: int = 32,
    block_size: int = 32,
    spread: float = 3.0,
    near: float = -torch.inf,
    seed: int = 0,
) -> World:
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = heads
    num_each = max(-(-length // block_size) for length in lengths) + 1
    table = torch.randperm(num_each * len(lengths), generator=generator).view(len(lengths), num_each)
    k, v = (torch.full((num_kv_heads, table.numel(), block_size, dim), torch.nan, dtype=dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        blocks, offsets = table[row, places // block_size], places % block_size
        for pool in (k, v):
            pool[:, blocks, offsets] = torch.randn(num_kv_heads, length, dim, generator=generator).to(dtype)
    q = torch.randn(len(lengths), num_q_heads, dim, generator=generator) * spread / (SCALE * dim**0.5)
    near_lse = torch.full(q.shape[:2], near) + torch.randn(q.shape[:2], generator=generator)
    near_part = torch.rand(len(lengths), generator=generator).log()
    return World(q.to(dtype), k, v, table, lengths, near_lse, near_part)


def check_bounds(world: World, answer: tuple[Tensor, ...], max_mass: float) -> None:
    """That the share left out and the error are within what is stated; by the definition, in fp64."""
    out, lse, figures = (part.double() for part in answer)
    for row, length in enumerate(world.lengths):
        if length == 0:
            assert out[row].eq(0).all()
            assert lse[row].eq(-torch.inf).all()
            assert figures[row].eq(0).all()
            continue
        scores, (_, v) = world.scores(row), world.rows_of(row)
        values = v.repeat_interleave(len(scores) // len(v), 0)
        near = world.near_lse[row].double() + world.near_part[row].double()
        total = torch.logaddexp(scores.logsumexp(-1), near)
        left = 1 - (torch.logaddexp(lse[row], near) - total).exp()  # of the softmax over these keys and the part
        mass, longest, num_kept = figures[row].unbind(-1)
        noise = 2e-3 if world.q.dtype != torch.float32 else 1e-5 + 2e-6 * float(scores.abs().max())
        assert (left <= mass + noise * (1 - mass)).all()
        assert (mass <= max_mass * (1 + 1e-5)).all()
        assert (longest >= values.norm(dim=-1).amax(-1)).all()
        assert (num_kept <= length).all()
        # What all keys and the part of what is near give, of which values are 0: the bound is of any values near.
        weights = (scores - total[:, None]).exp()
        truth = (weights[:, None] @ values)[:, 0]
        found = out[row] * (lse[row] - torch.logaddexp(lse[row], near)).exp()[:, None]
        bound = mass * (longest + found.norm(dim=-1))
        assert ((found - truth).norm(dim=-1) <= bound + noise * longest).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("near", [-torch.inf, 8.0], ids=["alone", "near"])
@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "lengths"),
    [((6, 2), 32, 32, (200, 0, 33, 1)), ((4, 4), 64, 16, (180, 48)), ((7, 1), 50, 96, (400,))],
)
def test_what_is_left_out_and_the_error_stay_within_what_is_stated(
    heads: tuple[int, int], dim: int, block_size: int, lengths: tuple[int, ...], near: float, device: str,
    dtype: torch.dtype, name: str,
) -> None:  # fmt: skip
    world = make_world(lengths, dtype=dtype, heads=heads, dim=dim, block_size=block_size, near=near)
    for max_mass in (0.0, 0.01, 0.3):
        answer = world.attend(name, max_mass, device)
        check_bounds(world, answer, max_mass)
        _, lse, figures = answer
        if max_mass == 0.0:
            assert figures[..., 0].eq(0).all()
            for row, length in enumerate(lengths):
                assert figures[row, :, 2].eq(length).all()
                noise = 1e-4 if dtype == torch.float32 else 5e-3
                torch.testing.assert_close(lse[row].double(), world.scores(row).logsumexp(-1), rtol=0, atol=noise)
        elif max_mass == 0.3:
            assert (figures[0, :, 2] < 0.6 * lengths[0]).all(), "hardly anything is left out: nothing is proved"


CASES = st.tuples(
    st.lists(st.integers(0, 60), min_size=1, max_size=3).filter(any),
    st.sampled_from([0.0, 1e-6, 0.01, 0.2, 0.9]),
    st.sampled_from([1e-6, 0.3, 3.0, 30.0]),
    st.sampled_from([-torch.inf, -20.0, 3.0, 60.0]),
    st.integers(0, 10**6),
)
"""Lengths, mass, spread of scores, lse of what is near, seed."""


def check_case(case: tuple[list[int], float, float, float, int], name: str) -> None:
    lengths, mass, spread, near, seed = case
    world = make_world(tuple(lengths), block_size=16, spread=spread, near=near, seed=seed)
    check_bounds(world, world.attend(name, mass), mass)


@given(case=CASES)
@settings(max_examples=300)
def test_bounds_hold_for_any_keys(case: tuple[list[int], float, float, float, int]) -> None:
    check_case(case, "reference")


@INTERPRETED
@given(case=CASES)
@settings(max_examples=12)
def test_bounds_of_the_kernels_hold_for_any_keys(case: tuple[list[int], float, float, float, int]) -> None:
    check_case(case, "triton")


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_the_kernels_keep_hardly_more_keys_than_the_reference(device: str, dtype: torch.dtype) -> None:
    world = make_world((1500,), dtype=dtype, near=5.0)
    _, _, expected = world.attend("reference", 0.05)
    out, _, figures = world.attend("triton", 0.05, device)
    assert (expected[..., 2] < 1000).all(), "nothing is left out: the test would prove nothing"
    assert (figures[..., 2] <= expected[..., 2] * 1.15 + 8).all()
    again, _, _ = world.attend("triton", 0.05, device)
    assert torch.equal(out, again)


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("place", [0, 699], ids=["first", "last"])
def test_a_key_that_outweighs_all_others_is_kept_and_they_are_not(place: int, device: str, dtype: torch.dtype) -> None:
    world = make_world((700,), dtype=dtype)
    k, v = world.rows_of(0)
    world.q[0] = (8.0 * k[:, place]).repeat_interleave(3, 0).to(dtype)
    out, _, figures = world.attend("triton", 0.01, device)
    assert (figures[..., 2] >= 1).all()
    assert (figures[..., 2] < 70).all()
    assert torch.allclose(out[0].double(), v[:, place].repeat_interleave(3, 0), atol=1e-2)


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_where_scores_are_no_numbers_or_too_large_for_codes_all_keys_are_kept(device: str, dtype: torch.dtype) -> None:
    world = make_world((300,), dtype=dtype)
    first = int(world.table[0, 0])
    scales = api.quantize_rows(world.k.nan_to_num().float())[1]
    scales[:, first, 5] = torch.nan
    for changed in ({"scan_scales": scales}, {"near_lse": torch.full_like(world.near_lse, torch.nan)}):
        _, _, figures = world.attend("triton", 0.3, device, **changed)
        assert figures[..., 2].eq(300).all()
        assert figures[..., 0].eq(0).all()
    huge = make_world((300,), dtype=dtype, spread=4000.0)
    _, _, figures = huge.attend("triton", 0.3, device)
    assert figures[..., 2].eq(300).all()


def test_arrays_that_do_not_fit_are_refused() -> None:
    world = make_world((40,))
    with pytest.raises(ShapeError, match="max_mass: expected at least 0 and below 1, got 1"):
        world.attend("reference", 1.0)
    with pytest.raises(ShapeError, match="expected an int8 pool"):
        world.attend("reference", 0.1, scan_pool=torch.zeros(world.k.shape))
    with pytest.raises(ShapeError, match="expected rows padded to a power of 2"):
        world.attend("reference", 0.1, rows=torch.zeros((*world.k.shape[:3], 48)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize(("block_size", "lengths"), [(32, (200, 0, 33, 1)), (96, (400,)), (128, (300, 128))])
def test_kept_keys_are_counted_by_block(
    block_size: int, lengths: tuple[int, ...], device: str, dtype: torch.dtype, name: str
) -> None:
    world = make_world(lengths, dtype=dtype, block_size=block_size)
    for max_mass in (0.0, 0.3):
        kept = torch.zeros(world.k.shape[1], dtype=torch.int32, device=device)
        _, _, figures = world.attend(name, max_mass, device, kept=kept)
        group = figures.shape[1] // len(world.k)
        assert int(kept.sum()) == int(figures[:, ::group, 2].sum())
        visible = torch.zeros(world.k.shape[1], dtype=torch.int32)
        for row, length in enumerate(lengths):
            for place, block in enumerate(world.table[row].tolist()):
                visible[block] = max(0, min(block_size, length - place * block_size))
        assert (kept.cpu() <= len(world.k) * visible).all()
        if max_mass == 0.0:
            assert torch.equal(kept.cpu(), len(world.k) * visible)


def test_counts_that_do_not_fit_are_refused() -> None:
    world = make_world((40,))
    with pytest.raises(ShapeError, match="kept: expected int32"):
        world.attend("reference", 0.1, kept=torch.zeros(world.k.shape[1]))
    with pytest.raises(ShapeError, match="kept"):
        world.attend("reference", 0.1, kept=torch.zeros(world.k.shape[1] + 1, dtype=torch.int32))
