"""Where one form becomes the faster one: found in made-up rates, and measured on small buffers of every format."""

import pytest
import torch

from ambidex.calibrate import cpu, crossovers
from ambidex.calibrate.crossovers import NEURON_FORMATS, find_crossover, make_places, measure_neurons, measure_tiles
from ambidex.cli.calibrate import show
from ambidex.hw.profile import NeuronRates
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import TILED_KINDS
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.linear import LinearContext
from ambidex.mlp import sparse_rates
from ambidex.mlp.rates import TOKENS
from ambidex.mlp.sparse_side import SparseSide


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "NUM_RUNS", 1)
    monkeypatch.setattr(cpu, "WIDTH", 256)
    monkeypatch.setattr(sparse_rates, "_NUM_PROBES", 1)


@pytest.mark.parametrize(
    ("before", "behind", "found"),
    [
        ([3, 3, 3, 3], [1, 2, 4, 5], 4),
        ([3, 3, 3, 3], [4, 4, 4, 4], 1),
        ([3, 3, 3, 3], [4, 2, 4, 2], None),
        ([3, 3, 3, 3], [4, 2, 4, 4], 4),
        ([3, 3, 3, 3], [3, 3, 3, 3], None),
    ],
)
def test_the_second_form_is_taken_where_it_stays_ahead(before: list[int], behind: list[int], found: int | None) -> None:
    counts = (1, 2, 4, 8)
    assert find_crossover(list(zip(counts, before, strict=True)), list(zip(counts, behind, strict=True))) == found


@pytest.mark.parametrize("kind", NEURON_FORMATS)
def test_every_way_to_multiply_neurons_has_a_cost_at_each_size(kind: str) -> None:
    num_threads = torch.get_num_threads()
    found = measure_neurons(ThreadPool(1), kind, cpu.make_buffer(2**20), num_torch_threads=1)
    assert set(found) == set(NeuronRates.__dataclass_fields__)
    for points in found.values():
        assert tuple(num for num, _ in points) == TOKENS
        assert all(0 < seconds < 1e-3 for _, seconds in points)
    assert torch.get_num_threads() == num_threads
    assert "dense above" in show(f"CPU neurons {kind}", found)


@pytest.mark.parametrize("kind", NEURON_FORMATS)
def test_places_fill_the_buffer_and_are_such_as_neurons_can_be_left_out_of(kind: str) -> None:
    buffer = cpu.make_buffer(2**20)
    places = make_places(kind, buffer, LinearContext(ThreadPool(1)))
    assert sum(part.num_bytes for _, parts, _ in places for part in parts) == buffer.numel()
    context = sparse_rates.SparseContext(
        linear=LinearContext(ThreadPool(1)), num_threads=1, costs=sparse_rates.NO_COSTS
    )
    for shape, parts, screen in places:
        assert SparseSide(shape, parts, context, screen=screen).num_neurons == shape.num_rows


def test_without_tiles_nothing_is_measured_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isa", lambda: "avx2")
    assert measure_tiles(ThreadPool(1), cpu.make_buffer(2**20)) == {}
    assert show("CPU tiles", {}) == "the processor has none"


def test_tiles_are_compared_with_vectors_for_each_4_bit_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are made up: vectors are as fast whatever the tokens, tiles become faster at 8 of them."""
    monkeypatch.setattr(native, "isa", lambda: "amx")

    def rates(_threads: object, _weights: object, tiles_from: int | None) -> list[tuple[int, float]]:
        return [(num, 5.0 if tiles_from is None else float(num)) for num in crossovers.TILE_TOKENS]

    monkeypatch.setattr(crossovers, "_product_rates", rates)
    found = measure_tiles(ThreadPool(1), cpu.make_buffer(2**20))
    assert found == dict.fromkeys(TILED_KINDS, 8)
    assert show("CPU tiles", {"Q4_0": 8, "Q4_K": None}) == "Q4_0 from 8 tokens, Q4_K never"


def test_products_of_either_form_have_rates() -> None:
    weights = cpu.cut_weights("Q4_0", cpu.make_buffer(2**20))
    for tiles_from in (None, 1):
        rates = crossovers._product_rates(ThreadPool(1), weights, tiles_from)
        assert [num for num, _ in rates] == list(crossovers.TILE_TOKENS)
        assert all(rate > 0 for _, rate in rates)
