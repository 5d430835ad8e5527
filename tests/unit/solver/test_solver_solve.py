"""The solver: within budgets, no worse than anything simple, better with more memory, and pins are obeyed."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.step import predict_step
from ambidex.cost.units import LayerUnits, StepUnits
from ambidex.cost.workload import KVShares
from ambidex.solver.baselines import ON_CPU, STREAMED, simple_placements
from ambidex.solver.problem import Pins, PlacementProblem, fits, measure_memory
from ambidex.solver.solve import gain_of_memory, solve_placement

MIB = 2**20
TOLERANCE = 1e-4
"""Relative: the programs are solved to 1e-6, and times are sums of many numbers."""


def make_layer(attention_mib: float, mlp_mib: float, kv_mib: float, *, gpu: float, cpu: float) -> LayerUnits:
    """A layer whose lanes read at `gpu` and `cpu` GB/s."""
    a, m, k = (int(size * MIB) for size in (attention_mib, mlp_mib, kv_mib))
    return LayerUnits(
        attention_bytes=a, mlp_bytes=m, kv_bytes=k,
        gpu_attention_s=a / gpu / 1e9, gpu_mlp_s=m / gpu / 1e9, gpu_kv_s=k / gpu / 1e9,
        cpu_attention_s=a / cpu / 1e9, cpu_mlp_s=m / cpu / 1e9, cpu_kv_s=k / cpu / 1e9,
    )  # fmt: skip


def make_units(
    layers: tuple[LayerUnits, ...], *, head_mib: float = 30, link: float = 25, beside: float = 60,
    handover_s: float = 2e-5, gpu: float = 900, cpu: float = 50,
) -> StepUnits:  # fmt: skip
    head, kv = int(head_mib * MIB), sum(layer.kv_bytes for layer in layers)
    return StepUnits(
        layers=layers, head_bytes=head, gpu_head_s=head / gpu / 1e9, cpu_head_s=head / cpu / 1e9, fixed_s=3e-4,
        attention_handover_s=2 * handover_s, kv_handover_s=handover_s, mlp_handover_s=handover_s,
        head_handover_s=handover_s, link_s_per_byte=1e-9 / link, beside_s_per_byte=1e-9 / beside,
        copies_share=min(1.0, link / beside), kv_gpu_bytes=kv, kv_dram_bytes=kv, least_kv_on_gpu=0.05, batch=1,
        has_link=True,
    )  # fmt: skip


LAYERS = (make_layer(40, 120, 10, gpu=900, cpu=50),) * 6
UNITS = make_units(LAYERS)
WHOLE = sum(layer.attention_bytes + layer.mlp_bytes + layer.kv_bytes for layer in LAYERS) + UNITS.head_bytes


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """One or two kinds of layers, and rates over two orders of magnitude."""
    rate = st.floats(5, 500)
    gpu, cpu, link = draw(st.floats(100, 4000)), draw(rate), draw(st.floats(5, 60))
    sizes = st.floats(1, 300)
    kinds = [
        make_layer(draw(sizes), draw(sizes), draw(st.floats(0.1, 200)), gpu=gpu, cpu=cpu)
        for _ in range(draw(st.integers(1, 2)))
    ]
    layers = tuple(kind for kind in kinds for _ in range(draw(st.integers(1, 4))))
    units = make_units(
        layers, head_mib=draw(sizes), link=link, beside=max(cpu, link) * draw(st.floats(1, 2)),
        handover_s=draw(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3])),
        gpu=gpu, cpu=cpu,
    )  # fmt: skip
    total = sum(layer.attention_bytes + layer.mlp_bytes + layer.kv_bytes for layer in layers) + units.head_bytes
    is_whole = draw(st.booleans())
    return PlacementProblem(
        units=units, gpu_bytes=int(total * draw(st.floats(0.1, 1.2))) + 8 * MIB, gpu_fixed_bytes=MIB,
        ring_bytes=2 * MIB,
        dram_bytes=draw(st.sampled_from([None, int(total * 1.1), 2 * total])), is_head_whole=is_whole,
    )  # fmt: skip


def grid_of(problem: PlacementProblem) -> list[tuple[Placement, KVShares]]:
    """Uniform placements: each part all or half on a lane."""
    halves = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0.5, 0), (0.5, 0, 0.5), (0, 0.5, 0.5)]
    splits = [WeightSplit(on_gpu=g, on_cpu=c, streamed=s) for g, c, s in halves]
    found = []
    for attention, mlp, (g, c, s) in itertools.product(splits, splits, halves):
        kv = KVShares(on_gpu=max(g, 0.05), on_cpu=c * (0.95 if g == 0 else 1), streamed=s * (0.95 if g == 0 else 1))
        layers = (LayerPlacement(attention=attention, mlp=mlp),) * len(problem.units.layers)
        heads = (WeightSplit(),) if problem.is_head_whole else (WeightSplit(), ON_CPU)
        found += [(Placement(layers=layers, head=head), kv) for head in heads]
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_budgets_hold_and_nothing_simple_is_faster(problem: PlacementProblem) -> None:
    candidates = [(placement, kv) for _, placement, kv in simple_placements(problem)] + grid_of(problem)
    fitting = [predict_step(problem.units, *pair).step_s for pair in candidates if fits(problem, *pair)]
    try:
        solution = solve_placement(problem)
    except ConfigError:
        assert not fitting
        return
    assert fits(problem, solution.placement, solution.kv)
    assert solution.placement.head.on_gpu == 1.0 or not problem.is_head_whole
    assert solution.step.step_s <= min(fitting, default=math.inf) * (1 + TOLERANCE)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.floats(1.02, 1.5))
def test_more_memory_is_never_slower(problem: PlacementProblem, factor: float) -> None:
    try:
        solution = solve_placement(problem)
    except ConfigError:
        return
    richer = solve_placement(replace(problem, gpu_bytes=int(problem.gpu_bytes * factor)))
    assert richer.step.step_s <= solution.step.step_s * (1 + TOLERANCE)
    if problem.dram_bytes is not None:
        richer = solve_placement(replace(problem, dram_bytes=int(problem.dram_bytes * factor)))
        assert richer.step.step_s <= solution.step.step_s * (1 + TOLERANCE)


def test_everything_lies_on_a_gpu_that_holds_it() -> None:
    solution = solve_placement(PlacementProblem(units=make_units(LAYERS, cpu=2, handover_s=1e-3), gpu_bytes=2 * WHOLE))
    assert solution.placement.is_all_on_gpu
    assert solution.kv.on_gpu == 1.0


def test_lanes_end_together_where_weights_do_not_fit() -> None:
    units = make_units(LAYERS, handover_s=0.0)
    solution = solve_placement(PlacementProblem(units=units, gpu_bytes=WHOLE // 3))
    step = solution.step
    assert step.step_s == pytest.approx(max(step.link_s, step.dram_s), rel=0.02)
    assert solution.memory.gpu_bytes > 0.99 * (WHOLE // 3 - MIB)


def test_a_costly_handover_gathers_the_cpus_work_in_few_layers() -> None:
    units = make_units((make_layer(2, 6, 0.1, gpu=900, cpu=50),) * 12, handover_s=5e-4, link=1, beside=51)
    whole = sum(layer.attention_bytes + layer.mlp_bytes for layer in units.layers) + units.head_bytes
    solution = solve_placement(PlacementProblem(units=units, gpu_bytes=int(0.9 * whole) + 4 * MIB))
    touched = [layer for layer in solution.placement.layers if layer.attention.on_cpu or layer.mlp.on_cpu]
    assert len(touched) <= 2


@pytest.mark.parametrize("gpu_share", [0.3, 0.6])
def test_pins_are_obeyed_and_the_rest_is_solved_around_them(gpu_share: float) -> None:
    half = WeightSplit(on_gpu=0.25, on_cpu=0.75)
    pins = Pins(attention={0: ON_CPU, 3: WeightSplit()}, mlp={1: half, 2: STREAMED}, head=ON_CPU,
                kv=KVShares(on_gpu=0.5, streamed=0.5))  # fmt: skip
    problem = PlacementProblem(units=UNITS, gpu_bytes=int(gpu_share * WHOLE) + 400 * MIB, pins=pins)
    solution = solve_placement(problem)
    layers = solution.placement.layers
    assert (layers[0].attention, layers[3].attention, layers[1].mlp, layers[2].mlp) == (
        ON_CPU, WeightSplit(), half, STREAMED,
    )  # fmt: skip
    assert solution.placement.head == ON_CPU
    assert solution.kv == pins.kv
    assert fits(problem, solution.placement, solution.kv)
    free = solve_placement(replace(problem, pins=Pins()))
    assert solution.step.step_s >= free.step.step_s * (1 - TOLERANCE)


def test_what_does_not_fit_names_the_capacity_and_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"`gpu_memory` 1\.0 MiB is too small for what is not divided"):
        solve_placement(PlacementProblem(units=UNITS, gpu_bytes=MIB, gpu_fixed_bytes=2 * MIB))
    with pytest.raises(ConfigError, match=r"`dram_memory` 100\.0 MiB is [\d.]+ MiB too small: weights take 990\.0 MiB"):
        solve_placement(PlacementProblem(units=UNITS, gpu_bytes=200 * MIB, dram_bytes=100 * MIB))
    pins = Pins(mlp=dict.fromkeys(range(6), WeightSplit()))
    with pytest.raises(ConfigError, match=r"`gpu_memory` 200\.0 MiB is 5\d\d\.\d MiB too small with what is pinned"):
        solve_placement(PlacementProblem(units=UNITS, gpu_bytes=200 * MIB, pins=pins))
    with pytest.raises(ConfigError, match=r"layers 6 are pinned: the model has the layers 0 to 5"):
        solve_placement(PlacementProblem(units=UNITS, gpu_bytes=WHOLE, pins=Pins(mlp={6: ON_CPU})))


def test_missing_memory_is_enough_memory() -> None:
    problem = PlacementProblem(units=UNITS, gpu_bytes=200 * MIB, dram_bytes=100 * MIB)
    lack = WHOLE - problem.gpu_bytes - (problem.dram_bytes or 0) + 3 * MIB
    solve_placement(replace(problem, dram_bytes=100 * MIB + lack))


def test_more_memory_brings_what_solving_with_it_brings() -> None:
    problem = PlacementProblem(units=UNITS, gpu_bytes=WHOLE // 2)
    solution = solve_placement(problem)
    gain = gain_of_memory(problem, solution, more_bytes=64 * MIB)
    assert 0 < gain < solution.step.step_s
    assert gain_of_memory(replace(problem, gpu_bytes=3 * WHOLE), solution, more_bytes=MIB) >= 0


def test_memory_of_a_placement_is_counted_by_part() -> None:
    placement = Placement(layers=(LayerPlacement(attention=ON_CPU, mlp=STREAMED), *(LayerPlacement(),) * 5))
    use = measure_memory(
        PlacementProblem(units=UNITS, gpu_bytes=WHOLE, ring_bytes=7 * MIB), placement, KVShares(on_gpu=0.5, on_cpu=0.5)
    )
    assert use.gpu["buffers of weights on their way"] == 7 * MIB
    assert use.gpu["weights"] == (5 * 160 + 30) * MIB
    assert use.dram == {
        "weights, multiplied there": 40 * MIB, "weights, streamed": 120 * MIB, "keys and values": 30 * MIB,
    }  # fmt: skip


def test_without_a_gpu_there_is_one_place() -> None:
    units = replace(UNITS, has_link=False)
    solution = solve_placement(PlacementProblem(units=units, gpu_bytes=2 * WHOLE))
    assert solution.placement.is_all_on_gpu
    with pytest.raises(ConfigError, match="without a GPU all of the"):
        solve_placement(PlacementProblem(units=units, gpu_bytes=WHOLE // 2))


def test_no_more_keys_travel_than_their_buffers_hold_unless_they_are_pinned() -> None:
    layers = (make_layer(1, 1, 400, gpu=900, cpu=2),) * 4  # a slow CPU: keys had better travel
    problem = PlacementProblem(units=make_units(layers, head_mib=1, beside=27), gpu_bytes=400 * MIB, is_head_whole=True)
    free, limited = solve_placement(problem), solve_placement(replace(problem, most_kv_streamed=0.3))
    assert free.kv.streamed > 0.6
    assert limited.kv.streamed == pytest.approx(0.3, abs=1e-5)
    assert limited.step.step_s > free.step.step_s
    assert all(kv.streamed <= 0.3 for _, _, kv in simple_placements(replace(problem, most_kv_streamed=0.3)))
    pinned = KVShares(on_gpu=0.1, streamed=0.9)
    assert solve_placement(replace(problem, most_kv_streamed=0.3, pins=Pins(kv=pinned))).kv == pinned
