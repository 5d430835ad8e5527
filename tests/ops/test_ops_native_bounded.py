"""The native bounded op against exact attention and against the reference: what it leaves out, what it says of it."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.bounded import PHASES, BoundedPool, ScannedLayer
from ambidex.kernels.reference.bounded import attend_bounded

HEADS, GROUP, DIM, BLOCK = 2, 3, 64, 32
SCALE = DIM**-0.5
THREADS = native.ThreadPool(2)
ATTENTION, BOUNDED = native.AttentionPool(THREADS), BoundedPool(THREADS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


@dataclass(frozen=True)
class World:
    """Keys of one request in a pool in tile order, and as rows [Hkv, S, D] of what they are worth."""

    layer: ScannedLayer
    batch: native.KeyBatch
    k: Tensor
    v: Tensor
    pools: tuple[Tensor, Tensor]
    scales: tuple[Tensor | None, Tensor | None]
    q: Tensor
    ids: Tensor


def make_world(dtype: torch.dtype, num_keys: int, *, sharpness: float = 3.0, seed: int = 0) -> World:
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_keys // BLOCK) + 1
    ids = torch.randperm(num_blocks, generator=generator)[: num_blocks - 1]
    shape = (HEADS, num_blocks, BLOCK, native.padded_dim(DIM))
    rows, pools, scales = [], [], []
    for part in ("k", "v"):
        values = torch.randn((HEADS, (num_blocks - 1) * BLOCK, DIM), generator=generator)
        numbers, row_scales = api.quantize_rows(values) if dtype == torch.int8 else (values.to(dtype), None)
        pool = torch.zeros(shape, dtype=dtype)
        ATTENTION.pack_blocks(part, pool, ids, numbers.contiguous())  # type: ignore[arg-type]
        pools.append(pool)
        stored = torch.full(shape[:3], torch.nan)
        if row_scales is not None:
            stored[:, ids] = row_scales.view(HEADS, -1, BLOCK)
        scales.append(None if row_scales is None else stored)
        rows.append((numbers.float() * (1 if row_scales is None else row_scales[..., None]))[:, :num_keys])
    k_scales, v_scales = scales
    layer = ScannedLayer(
        scanned=pools[0] if k_scales is not None else torch.zeros(shape, dtype=torch.int8),
        scales=k_scales if k_scales is not None else torch.zeros(shape[:3]),
        rows=None if k_scales is not None else torch.zeros((*shape[:3], 2 * shape[3]), dtype=dtype),
        v=pools[1],
        v_scales=v_scales,
        norms=torch.zeros(HEADS, num_blocks, 2),
    )
    BOUNDED.copy_for_scan(pools[0], pools[1], ids, layer, head_dim=DIM, k_scales=k_scales)
    q = torch.randn((1, HEADS * GROUP, DIM), generator=generator) * sharpness
    batch = make_batch(ids, num_keys)
    return World(layer, batch, rows[0], rows[1], (pools[0], pools[1]), (k_scales, v_scales), q, ids)


def make_batch(ids: Tensor, num_keys: int) -> native.KeyBatch:
    return native.KeyBatch(
        ids, torch.tensor([0, len(ids)]), torch.tensor([0]), torch.tensor([num_keys]), torch.tensor([0, 1]),
        block_size=BLOCK,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("has_near", [False, True], ids=["alone", "near"])
def test_what_is_left_out_and_the_error_stay_within_what_is_stated(
    dtype: torch.dtype, isa: str, has_near: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    for num_keys, max_mass in ((1, 0.5), (33, 0.2), (700, 0.01), (2500, 0.05), (2500, 1e-6)):
        world = make_world(dtype, num_keys, seed=num_keys)
        near = None
        if has_near:
            near = (
                torch.randn(world.q.shape, generator=generator),
                torch.randn(world.q.shape[:2], generator=generator) + 6,
            )
        answer = BOUNDED.attend_bounded(
            world.q, world.layer, world.batch, scale=SCALE, max_mass=max_mass, near=near, isa=isa
        )
        check_answer(world, near, max_mass, answer)


Near = tuple[Tensor, Tensor] | None


def check_answer(world: World, near: Near, max_mass: float, answer: tuple[Tensor, Tensor, Tensor]) -> None:
    """What an answer has left out is no more than was allowed, and with its error within what it says."""
    out, lse, figures = answer
    truth = attend_bounded(world.q, world.k, world.v, scale=SCALE, max_mass=0.0, near=near)
    mass, share, longest, out_norm, _ = figures.double().unbind(-1)
    true_mass = -torch.expm1(lse.double() - truth.lse)
    assert (true_mass <= mass + (share - mass) + 2e-4).all()
    assert (mass <= max_mass * (1 + 1e-5)).all()
    error = (out.double() - truth.out).norm(dim=-1)
    assert (error <= share * (longest + out_norm) + 1e-4 * longest).all()
    assert torch.allclose(out_norm, out.double().norm(dim=-1), rtol=1e-4)
    assert (longest >= world.v.double().norm(dim=-1).amax(-1).repeat_interleave(GROUP) * (1 - 1e-6)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rule_that_is_broken_is_seen(dtype: torch.dtype) -> None:
    """More left out than was allowed, keys missing that it does not tell of, and figures of another answer."""
    world = make_world(dtype, 700)
    out, lse, figures = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.01)
    check_answer(world, None, 0.01, (out, lse, figures))
    more = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.1)
    few = make_batch(world.ids[:-1], (len(world.ids) - 1) * BLOCK)
    fewer = BOUNDED.attend_bounded(world.q, world.layer, few, scale=SCALE, max_mass=0.01)
    for broken in (more, fewer, (more[0], more[1], figures), (out * 1.1, lse, figures)):
        with pytest.raises(AssertionError):
            check_answer(world, None, 0.01, broken)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_keeps_hardly_more_keys_than_the_reference(dtype: torch.dtype) -> None:
    world = make_world(dtype, 3000)
    _, _, figures = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.02)
    expected = attend_bounded(
        world.q, world.k, world.v, scale=SCALE, max_mass=0.02, is_stored_int8=dtype == torch.int8
    ).is_kept.sum(-1)[0]
    kept = figures[0, ::GROUP, 4]
    assert (expected < 2900).all(), "nothing is left out: the test would prove nothing"
    assert (kept <= expected * 1.15 + 8).all()
    assert (kept < 3000).all()


def test_a_mass_of_zero_is_exact_attention() -> None:
    world = make_world(torch.float32, 517)
    out, lse, figures = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.0)
    exact_out, exact_lse = ATTENTION.attend_blocks(world.q, *world.pools, world.batch, scale=SCALE)
    assert torch.allclose(out, exact_out, atol=2e-6)
    assert torch.allclose(lse, exact_lse, atol=2e-6)
    assert (figures[..., 0] == 0).all()
    assert (figures[..., 4] == 517).all()


def test_a_key_that_is_not_a_number_is_never_left_out() -> None:
    world = make_world(torch.float32, 300)
    world.layer.rows[:, :, 5, 3] = torch.nan  # type: ignore[index]
    world.layer.scales[:, :, 5] = torch.nan
    out, _, _ = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.3)
    assert out.isnan().all()


@pytest.mark.parametrize("isa", native.available_isas())
def test_where_scores_are_too_large_for_codes_all_keys_are_kept(isa: str) -> None:
    world = make_world(torch.float32, 600, sharpness=4000.0)
    out, _, figures = BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.3, isa=isa)
    exact_out, _ = ATTENTION.attend_blocks(world.q, *world.pools, world.batch, scale=SCALE, isa=isa)
    assert (figures[..., 0] == 0).all()
    assert (figures[..., 4] == 600).all()
    assert torch.allclose(out, exact_out, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("place", [0, 1499], ids=["first", "last"])
def test_a_key_that_outweighs_all_others_is_kept_and_they_are_not(dtype: torch.dtype, isa: str, place: int) -> None:
    # The others lie far more than 32 factors of 2 below it: deeper than codes are told apart.
    world = make_world(dtype, 1500)
    q = (8.0 * world.k[:, place]).repeat_interleave(GROUP, 0)[None].contiguous()
    out, _, figures = BOUNDED.attend_bounded(q, world.layer, world.batch, scale=SCALE, max_mass=0.01, isa=isa)
    assert (figures[..., 4] >= 1).all()
    assert (figures[..., 4] < 150).all()
    assert torch.allclose(out[0], world.v[:, place].repeat_interleave(GROUP, 0), atol=1e-3)


def test_what_is_kept_does_not_depend_on_which_thread_is_faster() -> None:
    world = make_world(torch.bfloat16, 6000)
    first, *others = [
        BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.05) for _ in range(10)
    ]
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert torch.equal(one, another)


def test_phases_of_calls_are_told_once() -> None:
    world = make_world(torch.float32, 300)
    pool = BoundedPool(THREADS)
    pool.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=0.1)
    spent = pool.take_phase_seconds()
    assert list(spent) == list(PHASES)
    assert spent["scan"] > 0
    assert spent["keep"] > 0
    assert all(seconds == 0 for seconds in pool.take_phase_seconds().values())


def test_arrays_that_do_not_fit_are_refused() -> None:
    world = make_world(torch.float32, 100)
    with pytest.raises(ShapeError, match="max_mass: expected at least 0 and below 1, got 1"):
        BOUNDED.attend_bounded(world.q, world.layer, world.batch, scale=SCALE, max_mass=1.0)
    with pytest.raises(ShapeError, match="figures"):
        BOUNDED.attend_bounded(
            world.q, world.layer, world.batch, scale=SCALE, max_mass=0.1, figures=torch.zeros(1, HEADS * GROUP, 3)
        )
    with pytest.raises(ShapeError, match="block_ids: expected 0 to"):
        BOUNDED.copy_for_scan(world.pools[0], world.pools[1], torch.tensor([99]), world.layer, head_dim=DIM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
def test_kept_keys_are_counted_by_block(dtype: torch.dtype, isa: str) -> None:
    world = make_world(dtype, 500)
    kept = torch.zeros(world.layer.scanned.shape[1], dtype=torch.int32)
    for max_mass in (0.0, 0.05):
        kept.zero_()
        layer = replace(world.layer, kept=kept)
        for num_calls in (1, 2):
            _, _, figures = BOUNDED.attend_bounded(world.q, layer, world.batch, scale=SCALE, max_mass=max_mass, isa=isa)
            assert int(kept.sum()) == num_calls * int(figures[0, ::GROUP, 4].sum()), "counts are added up"
        assert (kept <= 2 * HEADS * BLOCK).all()
        if max_mass == 0.0:
            expected = torch.zeros_like(kept)
            expected[world.ids] = 2 * HEADS * BLOCK
            expected[world.ids[-1]] = 2 * HEADS * (500 % BLOCK)
            assert torch.equal(kept, expected)


def test_counts_for_other_blocks_are_refused() -> None:
    world = make_world(torch.float32, 100)
    layer = replace(world.layer, kept=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="kept_of_block: expected 5 for the blocks"):
        BOUNDED.attend_bounded(world.q, layer, world.batch, scale=SCALE, max_mass=0.1)
