"""The rules of FlexGen and MoE-Lightning, held against what they say, worked out plainly at every share of a grid."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_solver_solve import LAYERS, MIB, UNITS, make_units, problems

from ambidex.core.errors import ConfigError
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.cost.units import LayerUnits
from ambidex.solver import published
from ambidex.solver.problem import MARGIN_BYTES, Pins, PlacementProblem, fits
from ambidex.solver.published import RULES, PublishedChoice, apply_choice, batches_up_to, choose_batch

FLEXGEN, MOE_LIGHTNING = PolicyName.FLEXGEN, PolicyName.MOE_LIGHTNING
NAMES = (FLEXGEN, MOE_LIGHTNING)
CLOSE = 1e-5
"""Relative: what breaks ties may cost so much, and programs are solved to 1e-7."""
TIED = PlacementProblem(units=UNITS, gpu_bytes=500 * MIB, gpu_fixed_bytes=20 * MIB, ring_bytes=10 * MIB)


def layer_s(name: PolicyName, layer: LayerUnits, link: float, w: float, c: float) -> float:
    """A layer's time, as the papers have it: the longest of what runs side by side."""
    weights = (1 - w) * (layer.attention_bytes + layer.mlp_bytes)
    if name == FLEXGEN:
        return max(
            (weights + (1 - c) * layer.kv_bytes) * link, layer.gpu_attention_s + layer.gpu_mlp_s + layer.gpu_kv_s
        )
    return max(weights * link, (1 - c) * layer.cpu_kv_s, layer.gpu_attention_s + layer.gpu_mlp_s)


def step_s(name: PolicyName, problem: PlacementProblem, w: float, c: float) -> float:
    """All layers, and the last projection, which is divided like them unless it is the table of tokens."""
    units = problem.units
    head = 0.0 if problem.is_head_whole else (1 - w) * units.head_bytes * units.link_s_per_byte
    layers = (layer_s(name, layer, units.link_s_per_byte, w, c) for layer in units.layers)
    return sum(layers) + max(head, units.gpu_head_s)


def is_within(name: PolicyName, problem: PlacementProblem, w: float, c: float, *, slack: float = 0.0) -> bool:
    """Whether both memories hold it, with `slack` bytes for rounding."""
    units = problem.units
    weights = sum(layer.attention_bytes + layer.mlp_bytes for layer in units.layers)
    whole = units.head_bytes if problem.is_head_whole else 0
    weights += units.head_bytes - whole
    gpu = problem.gpu_fixed_bytes + whole + w * weights + max(problem.least_kv_bytes, c * units.kv_gpu_bytes)
    gpu += problem.ring_bytes if w < 1 else 0
    dram = (1 - w) * weights + (1 - c) * units.kv_dram_bytes
    least = units.least_kv_on_gpu
    if name == FLEXGEN:
        least = max(least, 1 - problem.most_kv_streamed)
    if problem.pins.kv is not None:
        is_share = abs(c - problem.pins.kv.on_gpu) < 1e-9
    else:
        is_share = c >= least - 1e-9 if name == FLEXGEN else abs(c - least) < 1e-9
    return (
        is_share
        and gpu <= problem.gpu_bytes - MARGIN_BYTES + slack
        and (problem.dram_bytes is None or dram <= problem.dram_bytes + slack)
    )


def grid(name: PolicyName, problem: PlacementProblem) -> list[tuple[float, float]]:
    """Shares of weights and keys on the GPU: every fortieth, and keys at the bounds that the rule gives them."""
    steps = [place / 40 for place in range(41)]
    if problem.pins.kv is not None:
        return [(w, problem.pins.kv.on_gpu) for w in steps]
    least = problem.units.least_kv_on_gpu
    keys = [least] if name == MOE_LIGHTNING else [*steps, least, 1 - problem.most_kv_streamed]
    return list(itertools.product(steps, keys))


def check(name: PolicyName, problem: PlacementProblem) -> PublishedChoice | None:
    """The rule's choice keeps within the memories, takes the time that it says, and no share of the grid is faster."""
    choice = RULES[name](problem)
    allowed = [(w, c) for w, c in grid(name, problem) if is_within(name, problem, w, c)]
    if choice is None:
        assert not allowed, "something fits"
        return None
    w, c = choice.weights_on_gpu, choice.kv_on_gpu
    assert is_within(name, problem, w, c, slack=64.0)
    assert choice.step_s == pytest.approx(step_s(name, problem, w, c), rel=CLOSE)
    for other in allowed:
        assert choice.step_s <= step_s(name, problem, *other) * (1 + CLOSE)
    return choice


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rule_finds_what_no_share_of_a_grid_beats(name: PolicyName, data: st.DataObject) -> None:
    problem = data.draw(problems())
    check(name, replace(problem, most_kv_streamed=data.draw(st.sampled_from([1.0, 0.6, 0.1]))))


@pytest.mark.parametrize("name", NAMES)
def test_choice_is_one_that_this_engine_can_carry_out(name: PolicyName) -> None:
    choice = check(name, TIED)
    assert choice is not None
    placement, kv = apply_choice(TIED, choice, name)
    assert fits(TIED, placement, kv)
    assert (kv.on_cpu == 0, kv.streamed == 0) == ((True, False) if name == FLEXGEN else (False, True))
    assert all(split.on_cpu == 0 for split in placement.splits())
    assert placement.layers[0].attention == placement.layers[-1].mlp == placement.head


def test_flexgen_lets_keys_have_what_weights_leave_and_moe_lightning_leaves_them_in_dram() -> None:
    room = replace(TIED, gpu_bytes=TIED.units.kv_gpu_bytes // 2 + sum(
        layer.attention_bytes + layer.mlp_bytes for layer in LAYERS) + TIED.units.head_bytes + 22 * MIB)  # fmt: skip
    found = {name: check(name, room) for name in NAMES}
    flexgen, moe = found[FLEXGEN], found[MOE_LIGHTNING]
    assert flexgen is not None
    assert moe is not None
    assert (flexgen.weights_on_gpu, moe.weights_on_gpu) == (1.0, 1.0)
    assert flexgen.kv_on_gpu == pytest.approx(0.5, abs=0.05)
    assert moe.kv_on_gpu == TIED.units.least_kv_on_gpu


def test_batch_with_the_most_tokens_a_second_is_chosen() -> None:
    def problem_of(batch: int) -> PlacementProblem:
        layers = tuple(
            replace(layer, kv_bytes=batch * layer.kv_bytes, gpu_kv_s=batch * layer.gpu_kv_s,
                    cpu_kv_s=batch * layer.cpu_kv_s) for layer in LAYERS
        )  # fmt: skip
        return replace(TIED, units=replace(make_units(layers), batch=batch), dram_bytes=2400 * MIB)

    for name in NAMES:
        rates = {}
        for batch in batches_up_to(40):
            choice = check(name, problem_of(batch))
            if choice is not None:
                rates[batch] = batch / choice.step_s
        batch, solution = choose_batch(name, ((batch, problem_of(batch)) for batch in batches_up_to(40)))
        assert rates[batch] >= max(rates.values()) * (1 - CLOSE)
        assert 1 < batch < 40, "more requests share the weights that travel, until DRAM holds no more keys"
        assert solution.step.batch == batch


def test_batches_that_are_tried_go_up_to_what_is_allowed() -> None:
    assert batches_up_to(3) == [1, 2, 3]
    assert batches_up_to(100)[-4:] == [64, 80, 96, 100]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_fits_is_said_with_what_to_change(name: PolicyName) -> None:
    problem = replace(TIED, gpu_bytes=25 * MIB, dram_bytes=100 * MIB)
    with pytest.raises(ConfigError, match=rf"`policy` {name} with `placement` auto .*raise `gpu_memory`"):
        choose_batch(name, [(1, problem)])


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_the_user_has_placed_stay_there(name: PolicyName) -> None:
    kv = published.KVShares(on_gpu=0.25, on_cpu=0.75)
    choice = check(name, replace(TIED, pins=Pins(kv=kv)))
    assert choice is not None
    assert choice.kv_on_gpu == pytest.approx(0.25)


def without_keys(own: Callable[..., object]) -> Callable[..., object]:
    return lambda problem, _travel: (replace(place, travelling_bytes=0, cpu_kv_s=0.0) for place in own(problem, True))


def attended_elsewhere(own: Callable[..., object]) -> Callable[..., object]:
    return lambda problem, travel: own(problem, not travel)


def half_the_weights(own: Callable[..., object]) -> Callable[..., object]:
    return lambda *args: (replace(place, weight_bytes=place.weight_bytes // 2) for place in own(*args))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("breaks", [without_keys, attended_elsewhere, half_the_weights])
def test_rule_that_is_broken_is_seen(
    name: PolicyName, breaks: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(TIED, units=make_units(LAYERS, link=1))  # the link, and keys, decide
    if name == MOE_LIGHTNING:
        problem = replace(problem, units=make_units(tuple(replace(layer, cpu_kv_s=1.0) for layer in LAYERS), link=1))
    assert check(name, problem) is not None
    monkeypatch.setattr(published, "_layers", breaks(published._layers))
    with pytest.raises(AssertionError):
        check(name, problem)


def test_every_method_that_shares_the_work_its_own_way_has_a_rule() -> None:
    assert set(RULES) == set(LANE_PRESETS)
