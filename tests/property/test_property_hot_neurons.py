"""Hot neurons: each in one place whatever is begun, committed or aborted; no more than the budget moves; what changes
is followed, and what comes once is not."""

from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ambidex.core.errors import InternalError
from ambidex.mlp.hot_neurons import (
    AveragedNeurons,
    Ids,
    NeuronMap,
    NeuronMove,
    NeuronPolicy,
    StaticNeurons,
    arrange,
)

NUM_NEURONS: Final = 200
NUM_NEAR: Final = 40
TOKENS: Final = 8


def fresh_map(num_near: int = NUM_NEAR, num: int = NUM_NEURONS) -> NeuronMap:
    return NeuronMap(range(num_near), range(num_near, num))


def act(neurons: NeuronMap, probability: np.ndarray, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Counts by slot in some steps."""
    counts = rng.binomial(TOKENS, probability)
    return counts[neurons.near], counts[neurons.far]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_near=st.integers(1, 30), num_far=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_every_neuron_is_in_one_place_and_no_move_is_larger_than_its_budget(
    data: st.DataObject, num_near: int, num_far: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num = num_near + num_far
    neurons, policy = fresh_map(num_near, num), AveragedNeurons(np.zeros((1, num)))
    under_way: list[NeuronMove] = []
    for _ in range(12):
        counts = rng.integers(0, TOKENS + 1, size=num)
        policy.observe(0, neurons, counts[neurons.near], counts[neurons.far], TOKENS)
        budget = data.draw(st.integers(0, 10))
        move = policy.propose(0, neurons, most_pairs=budget)
        if move is not None:
            assert 0 < len(move) <= budget
            neurons.begin(move)
            under_way.append(move)
        before = (neurons.near.copy(), neurons.far.copy())
        match data.draw(st.sampled_from(["commit", "abort", "wait"])):
            case "commit" if under_way:
                move = under_way.pop(0)
                neurons.commit(move)
                assert np.array_equal(neurons.near[move.near], before[1][move.far])
                assert np.array_equal(neurons.far[move.far], before[0][move.near])
            case "abort" if under_way:
                neurons.abort(under_way.pop(0))
                assert np.array_equal(neurons.near, before[0])
                assert np.array_equal(neurons.far, before[1])
        neurons.check()
        assert sorted([*neurons.near, *neurons.far]) == list(range(num))
        assert int(neurons.is_near_moving.sum()) == int(neurons.is_far_moving.sum()) == sum(map(len, under_way))


def hit_rate(policy: NeuronPolicy, phases: list[np.ndarray], *, start: np.ndarray, seed: int, budget: int = 8) -> float:
    """Share of activations on the accelerator, over phases of a trace; the start's arrangement is the profile's."""
    rng = np.random.default_rng(seed)
    neurons = fresh_map()
    first = arrange(0, neurons, start.astype(np.float32))
    if first is not None:
        neurons.begin(first)
        neurons.commit(first)
    hits = total = 0
    for probability in phases:
        for _ in range(40):
            near, far = act(neurons, probability, rng)
            hits, total = hits + int(near.sum()), total + int(near.sum() + far.sum())
            policy.observe(0, neurons, near, far, TOKENS)
            move = policy.propose(0, neurons, most_pairs=budget)
            if move is not None:
                neurons.begin(move)
                neurons.commit(move)
    return hits / total


def power_law(order: np.ndarray) -> np.ndarray:
    """A few neurons are active for most tokens, most for few."""
    probability = np.empty(NUM_NEURONS)
    probability[order] = np.minimum(0.9, 0.9 * (1 + np.arange(NUM_NEURONS) / 4) ** -1.2)
    return probability


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_what_is_averaged_beats_the_static_choice_where_a_trace_shifts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    phases = [power_law(rng.permutation(NUM_NEURONS)) for _ in range(3)]
    static = hit_rate(StaticNeurons(), phases, start=phases[0], seed=seed)
    moving = hit_rate(AveragedNeurons(phases[0][None]), phases, start=phases[0], seed=seed)
    assert moving > static + 0.1


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_where_nothing_shifts_it_is_as_good_as_the_static_choice(seed: int) -> None:
    phases = [power_law(np.random.default_rng(seed).permutation(NUM_NEURONS))] * 2
    static = hit_rate(StaticNeurons(), phases, start=phases[0], seed=seed)
    moving = hit_rate(AveragedNeurons(phases[0][None]), phases, start=phases[0], seed=seed)
    assert moving > static - 0.03


def test_neurons_that_wake_up_once_are_not_moved() -> None:
    neurons, policy = fresh_map(), AveragedNeurons(np.zeros((1, NUM_NEURONS)))
    once = np.zeros(NUM_NEURONS, dtype=np.int64)
    once[100] = TOKENS
    policy.observe(0, neurons, once[neurons.near], once[neurons.far], TOKENS)
    assert policy.propose(0, neurons, most_pairs=10) is None
    for _ in range(8):
        policy.observe(0, neurons, 0 * neurons.near, 0 * neurons.far, TOKENS)
        assert policy.propose(0, neurons, most_pairs=10) is None
    for _ in range(2):
        policy.observe(0, neurons, once[neurons.near], once[neurons.far], TOKENS)
    move = policy.propose(0, neurons, most_pairs=10)
    assert move is not None
    assert neurons.far[move.far].tolist() == [100]


def test_slots_of_a_move_that_has_not_ended_are_in_no_other() -> None:
    neurons, policy = fresh_map(), AveragedNeurons(np.zeros((1, NUM_NEURONS)))
    counts = np.where(np.arange(NUM_NEURONS) >= 150, TOKENS, 0)
    for _ in range(2):
        policy.observe(0, neurons, counts[neurons.near], counts[neurons.far], TOKENS)
    moves = []
    while (move := policy.propose(0, neurons, most_pairs=7)) is not None:
        neurons.begin(move)
        moves.append(move)
        with pytest.raises(InternalError, match="are moved twice"):
            neurons.begin(move)
    assert sum(map(len, moves)) == min(NUM_NEAR, 50)
    neurons.commit(moves[0])
    with pytest.raises(InternalError, match="ends that was not begun"):
        neurons.commit(moves[0])


def test_an_arrangement_puts_the_most_active_on_the_accelerator_and_is_then_at_rest() -> None:
    activity = np.random.default_rng(3).random(NUM_NEURONS).astype(np.float32)
    neurons = fresh_map()
    move = arrange(0, neurons, activity)
    assert move is not None
    neurons.begin(move)
    neurons.commit(move)
    assert activity[neurons.near].min() >= activity[neurons.far].max()
    assert arrange(0, neurons, activity) is None
    assert arrange(0, neurons, np.ones(NUM_NEURONS, np.float32)) is None
