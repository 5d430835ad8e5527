"""A machine that is simulated: steps take the cost model's times under coefficients that the tuner does not know, with
noise; moves of weights take the link beside the steps. The executor's stand-in for the tuner's tests and traces."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.cost.fit import LaneSeconds, predict_lanes
from ambidex.cost.units import Coefficients
from ambidex.sched.plan_world import PlanWorld, redirect
from ambidex.sched.tuner import Decision, Kind, TracedStep, TunerState, Where, tune

MOVE_STEPS: Final = 4
"""A move is granted what the link has left of each step, and at least so much that it ends within so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of traffic on a machine in some condition."""

    num_steps: int
    batch: int
    context: int
    true: Coefficients = field(default_factory=Coefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """What a step took, without noise: with the tuner's placement, with the one that the run began with, and with the
    best there is for this phase."""

    phase_idx: int
    step: TracedStep
    tuned_s: float
    start_s: float
    best_s: float
    decision: Decision | None


@dataclass(slots=True)
class _Move:
    target: Where
    left_s: float
    total_s: float


class SimulatedMachine:
    """Runs steps.

    Args:
        world: the cost model, asked with the true coefficients.
        noise: relative standard deviation of what is measured.
    """

    def __init__(self, world: PlanWorld, where: Where, *, noise: float = 0.03, seed: int = 0) -> None:
        self._world, self._noise, self._random = world, noise, random.Random(seed)
        self._move: _Move | None = None
        self.where = where

    def begin(self, target: Where) -> None:
        """Bring weights to another placement: what lies in DRAM serves the other lane at once, the rest travels."""
        at_once = Where(placement=redirect(self.where.placement, target.placement), kv=target.kv)
        seconds = self._world.move_s(self.where, target)
        self.where = target if seconds == 0.0 else at_once
        self._move = None if seconds == 0.0 else _Move(target, seconds, seconds)

    def run(self, phase: Phase) -> tuple[TracedStep, float]:
        """One step: what is measured of it, and its seconds without noise.

        Raises:
            ConfigError: the placement has no room for the keys of this workload.
        """
        found = self._world.predict(phase.batch, phase.context, phase.true, self.where)
        if found is None:
            raise ConfigError(f"{phase.batch} x {phase.context} tokens do not fit beside the weights on the GPU")
        lanes = predict_lanes(self._world.terms(phase.batch, phase.context, self.where), phase.true)
        seconds, link_s, where, is_moving = found.step_s, lanes.get("link", 0.0), self.where, self._move is not None
        if self._move is not None:
            granted = min(self._move.left_s, max(seconds - link_s, self._move.total_s / MOVE_STEPS))
            seconds = max(seconds, link_s + granted * phase.true.link)
            self._move.left_s -= granted
            if self._move.left_s <= 0.0:
                self.where, self._move = self._move.target, None
        step = TracedStep(
            batch=phase.batch,
            context=phase.context,
            seconds=self._blur(seconds),
            lanes=LaneSeconds(
                gpu=self._blur(lanes["gpu"]), cpu=self._blur(lanes.get("cpu", 0.0)), link=self._blur(link_s)
            ),
            where=where,
            is_moving=is_moving,
        )
        return step, seconds

    def _blur(self, seconds: float) -> float:
        return seconds * max(0.1, 1.0 + self._random.gauss(0.0, self._noise))


def simulate(
    world: PlanWorld, phases: Sequence[Phase], *, start: Where, noise: float = 0.03, seed: int = 0
) -> Iterator[SimulatedStep]:
    """Run phases of traffic with the tuner, beginning with a placement."""
    machine = SimulatedMachine(world, start, noise=noise, seed=seed)
    state = TunerState(target=start)
    for phase_idx, phase in enumerate(phases):
        best = world.predict_s(
            (phase.batch, phase.context), phase.true, world.solve((phase.batch, phase.context), phase.true)
        )
        start_s = world.predict_s((phase.batch, phase.context), phase.true, start)
        for _ in range(phase.num_steps):
            step, seconds = machine.run(phase)
            state, decision = tune(state, step, world)
            if decision is not None and decision.kind in (Kind.MOVE, Kind.ROLL_BACK):
                machine.begin(decision.where)
            yield SimulatedStep(
                phase_idx=phase_idx, step=step, tuned_s=seconds, start_s=start_s, best_s=best, decision=decision
            )


def replay(steps: Sequence[TracedStep], world: PlanWorld, *, start: Where) -> tuple[Decision, ...]:
    """What the tuner decides over steps that were recorded."""
    state = TunerState(target=start)
    for step in steps:
        state, _ = tune(state, step, world)
    return state.log
