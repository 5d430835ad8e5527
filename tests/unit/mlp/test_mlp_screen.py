"""`Screen`: no row that is active is ever ruled out, most others are, and the copy follows rows that change."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.core.model_spec import Activation
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.picked import PickedPool
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.neuron_cache import NeuronCounts
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.rates import TOKENS
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_costs import FormCosts, ScreenCosts
from ambidex.mlp.sparse_rates import NO_COSTS, measure_screens
from ambidex.mlp.sparse_side import SparseContext, SparseSide

WIDTH = 256
ALWAYS = ScreenCosts(plain={1024: 1.0}, screen={1024: 0.0}, candidate={1024: 0.5})
UNION = FormCosts(bags={1024: 9.0}, union={1024: 1.0}, dense={1024: 9.0})


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_rows(num: int, seed: int, *, spread: float = 0.0) -> Tensor:
    """Random rows; with a spread, of sizes that differ by many orders, also within a row."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num, WIDTH, generator=generator)
    return rows * torch.exp(spread * torch.randn(num, WIDTH, generator=generator))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6), num_tokens=st.integers(1, 5), spread=st.sampled_from([0.0, 1.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), shift=st.sampled_from([0.0, -0.02, -20.0]),
)  # fmt: skip
def test_no_row_that_is_above_zero_is_ruled_out(
    seed: int, num_tokens: int, spread: float, dtype: torch.dtype, shift: float
) -> None:
    with torch.inference_mode():
        linear = LinearContext(ThreadPool(1))
        chunks = [make_rows(num, seed + num, spread=spread).clamp(-6e4, 6e4).to(dtype) for num in (16, 35)]
        biases = [torch.full((len(rows),), shift) for rows in chunks]
        x = make_rows(num_tokens, seed + 1, spread=spread)
        # Rows that stand nearly at right angles to x: their sign hangs on the last bits.
        near = chunks[1][:8].float()
        near -= (near @ x[0])[:, None] * x[0] / x[0].square().sum()
        chunks[1][:8] = near.to(dtype)
        found = Screen(chunks, linear).head(2).candidates(x, biases)
        exact = LinearOp(linear)(x, chunks, biases)
        active = (torch.cat(exact, dim=1) > 0).any(0).nonzero()[:, 0]
        assert set(active.tolist()) <= set(found.tolist())
        doubles = torch.cat(
            [rows.double() @ x.double().T + bias[:, None] for rows, bias in zip(chunks, biases, strict=True)]
        )
        assert set((doubles > 0).any(1).nonzero()[:, 0].tolist()) <= set(found.tolist())


def test_most_rows_that_are_well_below_zero_are_ruled_out() -> None:
    rows = make_rows(4000, 3)
    x = make_rows(1, 4)
    bias = torch.full((4000,), -1.9 * WIDTH**0.5)  # 3 % of a normal distribution lie above
    found = Screen([rows], LinearContext(ThreadPool(1))).head(1).candidates(x, [bias])
    active = int((x @ rows.T + bias > 0).sum())
    assert 0.02 * 4000 < active < 0.045 * 4000
    assert active <= len(found) < 1.35 * active


def test_what_is_no_number_is_not_ruled_out() -> None:
    rows = make_rows(16, 5)
    rows[3, 7] = float("nan")
    bias = torch.full((16,), -1e3)
    assert Screen([rows], LinearContext(ThreadPool(1))).head(1).candidates(make_rows(1, 6), [bias]).tolist() == [3]


def test_rows_that_have_changed_are_screened_as_they_are_now() -> None:
    linear = LinearContext(ThreadPool(1))
    chunks = [make_rows(num, num) for num in (16, 32)]
    screen = Screen(chunks, linear)
    slots, fresh = torch.tensor([2, 17, 47]), make_rows(3, 9, spread=1.0)
    screen.write(slots, fresh)
    torch.cat(chunks)  # chunks hold the old rows: only the copy was told
    chunks[0][2], chunks[1][1], chunks[1][31] = fresh
    again = Screen(chunks, linear)
    assert torch.equal(screen.margins, again.margins)
    for changed, made in zip(screen.matrices, again.matrices, strict=True):
        assert torch.equal(changed.data, made.data)


@pytest.mark.parametrize("num_ins", [1, 2])
def test_a_screened_side_gives_what_the_plain_one_gives(num_ins: int) -> None:
    shape = SiteShape(num_in=WIDTH, num_rows=96, num_ins=num_ins, num_out=WIDTH, is_neuron_major=True)
    linear = LinearContext(ThreadPool(1))
    numbers = make_rows(96 * (num_ins + 1), 8).view(torch.uint8).view(-1)
    size = shape.num_bytes(48, 4)
    parts = [
        Part(Rows(shape, rows, numbers[start : start + size], torch.float32), Activation.RELU, linear)
        for rows, start in ((range(48), 0), (range(48, 96), size))
    ]
    for part in parts:
        part.bind([torch.full((96,), -20.0)] * num_ins)
    screen = Screen([rows for part in parts if isinstance(rows := part.numbers.ins[0], Tensor)], linear)
    context = SparseContext(linear=linear, num_threads=1, costs=UNION)
    plain = SparseSide(shape, parts, context)
    side = SparseSide(shape, parts, context, screen=screen)
    x = make_rows(3, 11)
    wanted = plain.compute(x)
    assert context.counts.num_screened == 0
    assert torch.equal(side.compute(x), wanted)  # nobody has measured whether it pays
    assert context.counts.num_screened == 0
    context.screen_costs = ALWAYS
    assert torch.allclose(side.compute(x), wanted, rtol=1e-5, atol=1e-4)
    assert context.counts.num_screened == 96
    assert 0 < context.counts.num_candidates < 96
    context.screen_costs = measure_screens([(shape, parts, screen)], context)
    assert tuple(context.screen_costs.plain) == TOKENS


def test_one_token_that_is_screened_is_one_native_call() -> None:
    shape = SiteShape(num_in=WIDTH, num_rows=96, num_out=WIDTH, is_neuron_major=True)
    threads = ThreadPool(2)
    linear = LinearContext(threads)
    numbers = make_rows(96 * 2, 8).view(torch.uint8).view(-1)
    size = shape.num_bytes(48, 4)
    parts = [
        Part(Rows(shape, rows, numbers[start : start + size], torch.float32), Activation.RELU, linear)
        for rows, start in ((range(48), 0), (range(48, 96), size))
    ]
    for part in parts:
        part.bind([torch.full((96,), -20.0)])
    screen = Screen([rows for part in parts if isinstance(rows := part.numbers.ins[0], Tensor)], linear)
    x = make_rows(1, 11)
    plain = SparseContext(linear=linear, num_threads=1, costs=UNION)
    wanted = SparseSide(shape, parts, plain).compute(x)
    context = SparseContext(
        linear=linear, num_threads=1, costs=UNION, screen_costs=ALWAYS, picked=PickedPool(threads)
    )  # fmt: skip
    counts = NeuronCounts(torch.zeros(1, dtype=torch.int32), 96)
    side = SparseSide(shape, parts, context, counts, screen)
    assert side.picks(1)
    assert not side.picks(2)
    assert torch.allclose(side.compute(x), wanted, rtol=1e-5, atol=1e-4)
    seen, dense = context.counts, plain.counts
    assert (seen.num_neurons, seen.num_active, seen.num_rows) == (96, dense.num_active, 96)
    assert 0 < seen.num_active <= seen.num_candidates < 96
    assert int(counts.far.sum()) == seen.num_active
    assert torch.allclose(side.compute(make_rows(3, 11))[:1], wanted, rtol=1e-5, atol=1e-4)


def test_it_is_screened_where_it_pays_by_what_was_seen() -> None:
    costs = ScreenCosts(plain={1: 1.0, 4: 1.0}, screen={1: 0.5, 4: 1.5}, candidate={1: 2.0, 4: 2.0})
    assert [costs.most_candidates(num) for num in (1, 2, 4, 5)] == [0.25, 0.0, 0.0, 0.0]
    assert NO_COSTS.crossovers() == {}
