"""`solve_placement`: where weights and keys should lie, or which capacity does not hold them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.core.placement import Placement
from ambidex.core.units import format_size
from ambidex.cost.step import StepPrediction, predict_step
from ambidex.cost.workload import KVShares
from ambidex.solver.baselines import simple_placements
from ambidex.solver.problem import MemoryUse, Pins, PlacementProblem, fits, measure_memory
from ambidex.solver.program import Answer, Form, find_groups, solve_program

LESS: Final = "a shorter context or a smaller batch"
FORMS: Final = tuple(
    Form(cpu_attends=attends, weights_leave=leave) for attends, leave in product((False, True), repeat=2)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement with what is predicted of it; `how` is `program`, or the simple placement that was no slower."""

    placement: Placement
    kv: KVShares
    step: StepPrediction
    memory: MemoryUse
    how: str


def solve_placement(problem: PlacementProblem) -> Solution:
    """Find the placement with the shortest predicted step within both budgets.

    Raises:
        ConfigError: nothing fits, or a pinned layer is not there; says which capacity binds and by how much.
    Cost: 4 programs, of milliseconds each.
    """
    problem.pins.check(len(problem.units.layers))
    if not problem.units.has_link:
        return _solve_without_gpu(problem)
    found = [_describe(problem, answer.placement, answer.kv, "program") for answer in _solve_programs(problem)]
    if problem.pins == Pins():
        found += [
            _describe(problem, placement, kv, name)
            for name, placement, kv in simple_placements(problem)
            if fits(problem, placement, kv)
        ]
    if not found:
        raise ConfigError(explain_infeasible(problem))
    return min(found, key=lambda solution: solution.step.step_s)


def gain_of_memory(problem: PlacementProblem, solution: Solution, *, more_bytes: int) -> float:
    """Seconds a step that so many more bytes of GPU memory would save, everything placed anew; at least 0."""
    if not problem.units.has_link:
        return 0.0
    richer = solve_placement(replace(problem, gpu_bytes=problem.gpu_bytes + more_bytes))
    return max(0.0, solution.step.step_s - richer.step.step_s)


def explain_infeasible(problem: PlacementProblem) -> str:
    """Which capacity binds, and what is missing at least."""
    room = problem.gpu_bytes - problem.gpu_fixed_bytes
    if room <= 0:
        return (
            f"`gpu_memory` {format_size(problem.gpu_bytes)} is too small for what is not divided: embedding, norms, "
            f"workspace and buffers take {format_size(problem.gpu_fixed_bytes)}, {format_size(1 - room)} more than "
            f"there is: raise it, or plan for a shorter context, a smaller batch or smaller chunks"
        )
    groups = find_groups(problem)
    answers = [
        answer for form in FORMS if (answer := solve_program(problem, groups, form, is_relaxed=True)) is not None
    ]
    if not answers:
        return "what is pinned contradicts itself: no placement has all of it, whatever the memory; unpin some of it"
    least = min(answers, key=lambda answer: sum(answer.slack_bytes.values()))
    lacks = [
        f"`{name}_memory` {format_size(budget or 0)} is {format_size(max(1, round(least.slack_bytes[name])))} too small"
        for name, budget in (("gpu", problem.gpu_bytes), ("dram", problem.dram_bytes))
        if least.slack_bytes[name] > 0.5
    ]
    use = measure_memory(problem, least.placement, least.kv)
    weights = sum(layer.attention_bytes + layer.mlp_bytes for layer in problem.units.layers) + problem.units.head_bytes
    pinned = "" if problem.pins == Pins() else " with what is pinned"
    return (
        f"{' and '.join(lacks) or 'nothing fits'}{pinned}: weights take {format_size(weights)}, keys and values "
        f"{format_size(problem.units.kv_dram_bytes)}; the nearest placement has {format_size(use.gpu_bytes)} on the "
        f"GPU and {format_size(use.dram_bytes)} in DRAM: raise that budget, or plan for {LESS}"
    )


def _solve_without_gpu(problem: PlacementProblem) -> Solution:
    solution = _describe(problem, Placement.all_on_gpu(len(problem.units.layers)), KVShares(), "program")
    if solution.memory.gpu_bytes > problem.gpu_bytes:
        lack = solution.memory.gpu_bytes - problem.gpu_bytes
        raise ConfigError(
            f"`dram_memory` {format_size(problem.gpu_bytes)} is {format_size(lack)} too small: without a GPU all of "
            f"the model and its keys lie there, {format_size(solution.memory.gpu_bytes)}: plan for {LESS}"
        )
    return solution


def _solve_programs(problem: PlacementProblem) -> Iterator[Answer]:
    groups = find_groups(problem)
    for form in FORMS:
        answer = solve_program(problem, groups, form)
        if answer is not None and fits(problem, answer.placement, answer.kv):
            yield answer


def _describe(problem: PlacementProblem, placement: Placement, kv: KVShares, how: str) -> Solution:
    return Solution(
        placement=placement,
        kv=kv,
        step=predict_step(problem.units, placement, kv),
        memory=measure_memory(problem, placement, kv),
        how=how,
    )
