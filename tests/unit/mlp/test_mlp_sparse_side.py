"""`SparseSide`: every form gives the dense product, reads what it says, and the cheapest is taken."""

from collections.abc import Iterator
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import NeuronMask, SparsityKind
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.predictor import CHECK_EVERY, Predictor
from ambidex.mlp.rates import TOKENS
from ambidex.mlp.sparse_costs import Form, FormCosts
from ambidex.mlp.sparse_rates import NO_COSTS, measure_costs, sparse_rates
from ambidex.mlp.sparse_side import SparseContext, SparseSide

WIDTH: Final = 48
ONLY: Final = {
    form: FormCosts(
        **{name: {1024: 1.0 if own is form else 1e9}
           for name, own in (("bags", Form.BAGS), ("union", Form.UNION), ("dense", Form.DENSE))}
    )
    for form in Form
}  # fmt: skip
"""Costs with which a form is always taken."""
MASKS: Final = {
    "relu": (Activation.RELU, None),
    "cats": (Activation.SILU, NeuronMask(kind=SparsityKind.CATS, threshold=0.5)),
    "teal": (Activation.SILU, NeuronMask(kind=SparsityKind.TEAL, threshold=0.5)),
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class World:
    """The CPU's chunks of an MLP, in one memory, with other chunks around them."""

    def __init__(
        self, kind: str = "relu", *, num_ins: int = 1, cuts: tuple[int, ...] = (16, 48, 56), dtype: torch.dtype
    ) -> None:
        torch.manual_seed(len(cuts) + num_ins)
        activation, mask = MASKS[kind]
        self.shape = SiteShape(
            num_in=WIDTH, num_rows=cuts[-1] + 16, num_ins=num_ins, num_out=WIDTH, is_neuron_major=True
        )
        size = self.shape.num_bytes(cuts[-1], dtype.itemsize)
        memory = torch.randn(size // dtype.itemsize).to(dtype).view(torch.uint8)
        biases = [torch.randn(self.shape.num_rows) for _ in range(num_ins)]
        linear = LinearContext(ThreadPool(1))
        self.parts, used = [], 0
        for start, stop in zip((0, *cuts[:-1]), cuts, strict=True):
            end = used + self.shape.num_bytes(stop - start, dtype.itemsize)
            part = Part(Rows(self.shape, range(start, stop), memory[used:end], dtype), activation, linear, mask)
            part.bind(biases)
            self.parts.append(part)
            used = end
        self.context = SparseContext(linear=linear, num_threads=2, costs=NO_COSTS)
        self.parts = self.parts[1:]

    def side(self, costs: FormCosts) -> SparseSide:
        self.context.costs = costs
        return SparseSide(self.shape, self.parts, self.context)

    def dense(self, x: Tensor) -> Tensor:
        total = self.parts[0](x)
        for part in self.parts[1:]:
            total = total + part(x)
        return total


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("kind", "num_ins"), [("relu", 1), ("relu", 2), ("cats", 2), ("teal", 1), ("teal", 2)])
@settings(deadline=None, max_examples=10)
@given(num_tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_form_gives_the_dense_product(kind: str, num_ins: int, form: Form, num_tokens: int, seed: int) -> None:
    with torch.inference_mode():
        world = World(kind, num_ins=num_ins, dtype=torch.float32)
        x = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed)) / 8
        side = world.side(ONLY[form])
        assert torch.allclose(side.compute(x), world.dense(x), rtol=1e-4, atol=1e-4)
    assert world.context.counts.forms == {form: 1}


@pytest.mark.parametrize("form", Form)
def test_numbers_of_16_bits_are_rounded_no_worse_than_a_run_in_16_bits(form: Form) -> None:
    world = World(dtype=torch.bfloat16, cuts=(16, 48, 160))
    x = torch.randn(3, WIDTH)
    side = world.side(ONLY[form])
    truth = torch.zeros(3, WIDTH, dtype=torch.float64)
    rounded = torch.zeros(3, WIDTH, dtype=torch.float64)
    for part in world.parts:
        first, columns, bias = part.numbers.ins[0], part.numbers.columns, part.biases[0]
        assert isinstance(first, Tensor)
        assert columns is not None
        assert bias is not None
        h = torch.relu(x.double() @ first.double().T + bias.double())
        truth += h @ columns.double()
        low = torch.relu(x.bfloat16() @ first.T + bias.bfloat16())
        rounded += (low @ columns).double()
    assert (side.compute(x).double() - truth).abs().max() <= 2 * (rounded - truth).abs().max()


def test_tokens_without_an_active_neuron_give_zero() -> None:
    for num_ins in (1, 2):
        world = World(num_ins=num_ins, dtype=torch.float32)
        for part in world.parts:
            part.bind([torch.full((world.shape.num_rows,), -1e3)] * num_ins)
        for form in Form:
            assert not world.side(ONLY[form]).compute(torch.randn(2, WIDTH)).any()


def test_counts_say_how_many_neurons_were_active_and_how_many_columns_were_read() -> None:
    world = World(dtype=torch.float32)
    x = torch.randn(4, WIDTH)
    h = torch.cat([torch.relu(part._multiply_ins(x, part.numbers.ins, part.biases)[0]) for part in world.parts], dim=1)
    world.side(ONLY[Form.UNION]).compute(x)
    counts = world.context.counts
    assert (counts.num_neurons, counts.num_rows) == (4 * 40, 40)
    assert counts.num_active == int(h.ne(0).sum())
    assert counts.num_rows_read == int(h.ne(0).any(0).sum()) < 40
    world.side(ONLY[Form.DENSE]).compute(x)
    assert counts.num_rows_read == int(h.ne(0).any(0).sum()) + 40


def test_the_cheapest_form_is_taken_and_beyond_what_was_measured_the_dense_one() -> None:
    costs = FormCosts(bags={1: 1.0, 8: 1.0}, union={1: 3.0, 8: 2.0}, dense={1: 0.5, 8: 0.8})
    assert costs.choose(1, num_own=10, num_union=10, num_all=100) is Form.BAGS
    assert costs.choose(8, num_own=70, num_union=30, num_all=100) is Form.UNION
    assert costs.choose(5, num_own=90, num_union=60, num_all=100) is Form.DENSE
    assert costs.choose(9, num_own=1, num_union=1, num_all=100) is Form.DENSE
    assert costs.crossovers() == {1: 0.5, 8: 0.4}


def test_measured_costs_are_positive_and_for_every_size() -> None:
    world = World(num_ins=2, dtype=torch.float32)
    costs = measure_costs([(world.shape, world.parts, None)], world.context)
    for by_tokens in (costs.bags, costs.union, costs.dense):
        assert tuple(by_tokens) == TOKENS
        assert min(by_tokens.values()) > 0
    world.context.costs = costs
    rates = sparse_rates([(world.shape, world.parts, None)], world.context, active_share=0.1)
    assert tuple(rates) == TOKENS


def test_chunks_that_are_no_whole_rows_apart_are_refused() -> None:
    world = World(dtype=torch.float32)
    shifted = torch.randn(4096)[1:].view(torch.uint8)
    size = world.shape.num_bytes(16, 4)
    world.parts[1] = Part(
        Rows(world.shape, range(48, 64), shifted[:size], torch.float32), Activation.RELU, LinearContext()
    )
    with pytest.raises(ShapeError, match="do not begin at whole rows"):
        world.side(NO_COSTS)


def predicted(x: Tensor, world: World, needed: Tensor) -> Tensor:
    """The product with neurons that each token needs, the others 0; in fp64."""
    total, start = torch.zeros(len(x), WIDTH, dtype=torch.float64), 0
    for part in world.parts:
        own = needed[:, start : start + len(part.rows)]
        start += len(part.rows)
        ins = [weight.double() for weight in part.numbers.ins if isinstance(weight, Tensor)]
        inner = [
            x.double() @ weight.T + bias.double()
            for weight, bias in zip(ins, part.biases, strict=True)
            if bias is not None
        ]
        h = torch.relu(inner[0]) * own
        for up in inner[1:]:
            h = h * up
        assert part.numbers.columns is not None
        total += h @ part.numbers.columns.double()
    return total


@pytest.mark.parametrize("costs", [NO_COSTS, *ONLY.values()])
@pytest.mark.parametrize("num_ins", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_predictor_decides_for_each_token_which_neurons_count(
    num_tokens: int, num_ins: int, costs: FormCosts
) -> None:
    world = World(num_ins=num_ins, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(8, WIDTH, generator=generator)
    second = torch.randn(60, 8, generator=generator)[:40]
    x = torch.randn(num_tokens, WIDTH, generator=generator) / 8
    needed = torch.relu(x @ first.T) @ second.T > 0.3
    assert 0 < needed.float().mean() < 1
    world.context.costs = costs
    predictor = Predictor(first, second, threshold=0.3, linear=world.context.linear)
    side = SparseSide(world.shape, world.parts, world.context, predictor=predictor)
    assert torch.allclose(side.compute(x).double(), predicted(x, world, needed), rtol=1e-4, atol=1e-4)
    h = torch.cat([part._multiply_ins(x, part.numbers.ins, part.biases)[0] for part in world.parts], dim=1) > 0
    counts = world.context.counts
    assert (counts.num_checked, counts.num_found) == (int(h.sum()), int((h & needed).sum()))
    for _ in range(CHECK_EVERY - 1):
        side.compute(x)
    assert counts.num_checked == int(h.sum()), "it is looked at now and then"
    side.compute(x)
    assert counts.num_checked == 2 * int(h.sum())


def test_a_predictor_that_names_nothing_gives_zero() -> None:
    for num_ins in (1, 2):
        world = World(num_ins=num_ins, dtype=torch.float32)
        predictor = Predictor(torch.ones(8, WIDTH), torch.zeros(40, 8), threshold=0.0, linear=world.context.linear)
        for costs in ONLY.values():
            world.context.costs = costs
            side = SparseSide(world.shape, world.parts, world.context, predictor=predictor)
            for num_tokens in (1, 3):
                assert not side.compute(torch.randn(num_tokens, WIDTH)).any()
