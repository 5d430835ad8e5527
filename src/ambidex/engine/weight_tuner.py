"""`WeightTuner`: the tuner at work. Between steps it hands over what was measured, and carries out what was decided.

    serving thread    step | take, begin, advance | step | advance | step | …
    a thread beside          measured → tune (solves) → decision

Deciding takes a tenth of a second and more, so it has a thread of its own and steps go on meanwhile; a decision is
carried out behind the step that ends next. Each is a line of the log, and so is what came of it.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, Protocol

from ambidex.core.errors import ConfigError
from ambidex.core.ids import Lane
from ambidex.core.placement import Placement
from ambidex.core.step import StepPlan, StepResult
from ambidex.core.units import format_size
from ambidex.cost.fit import LaneSeconds
from ambidex.cost.workload import KVShares
from ambidex.sched.tuner import Decision, Kind, TracedStep, TunerState, Where, World, tune

logger = logging.getLogger(__name__)

MOVE_STEPS: Final = 4
"""A move is granted what the link has left of each step, and at least so much that it ends within so many steps."""
MOST_QUEUED: Final = 32
"""Steps that wait to be taken in; more are left out, since the next ones say the same."""


class Mover(Protocol):
    """Who moves weights; see `WeightMoves`."""

    num_failed: int
    num_bytes: int
    num_waiting_bytes: int

    @property
    def placement(self) -> Placement: ...
    @property
    def is_moving(self) -> bool: ...
    def begin(self, placement: Placement) -> None: ...
    def advance(self, num_bytes: int) -> bool: ...


class TunedWorld(World, Protocol):
    """A world that knows where keys lie."""

    def keys(self, batch: int, context: int) -> KVShares: ...


class WeightTuner:
    """Follows the steps of one engine.

    Args:
        world: the cost model.
        mover: the weights.
        link_bytes_per_s: of copies to the accelerator.
        beside: where decisions are made; None: in a thread of its own.
    """

    def __init__(
        self, world: TunedWorld, mover: Mover, *, link_bytes_per_s: float, beside: Executor | None = None
    ) -> None:
        self._world, self.mover, self._link = world, mover, link_bytes_per_s
        self._beside = beside or ThreadPoolExecutor(max_workers=1, thread_name_prefix="ambidex-tuner")
        self._state = TunerState(target=Where(placement=mover.placement, kv=KVShares()))
        self._decisions: list[Future[Decision | None]] = []
        self._is_fresh = False
        self.decisions: list[Decision] = []
        """All so far."""

    @property
    def num_failed_moves(self) -> int:
        """Chunks of weights that stayed where they were, though they were to move."""
        return self.mover.num_failed

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step that has ended, before the next is launched."""
        self._carry_out()
        was_moving = self.mover.is_moving
        if was_moving:
            total_s, link_s = result.seconds.get("total", 0.0), result.lane_seconds.get(Lane.STREAM, 0.0)
            left = int(max(0.0, total_s - link_s) * self._link)
            if self.mover.advance(max(left, self.mover.num_waiting_bytes // MOVE_STEPS)):
                self._is_fresh = True
        if not result.lane_seconds or not plan.requests or result.failures:
            return
        if self._is_fresh:  # the first step of other parts records them
            self._is_fresh = False
            return
        if len(self._decisions) < MOST_QUEUED:
            step = self._traced(plan, result, is_moving=was_moving)
            self._decisions.append(self._beside.submit(self._take_in, step))

    def _traced(self, plan: StepPlan, result: StepResult, *, is_moving: bool) -> TracedStep:
        batch = len(plan.requests)
        context = max(1, round(sum(request.start + 1 for request in plan.requests) / batch))
        found = result.lane_seconds
        return TracedStep(
            batch=batch,
            context=context,
            seconds=result.seconds["total"],
            lanes=LaneSeconds(gpu=found.get(Lane.GPU), cpu=found.get(Lane.CPU), link=found.get(Lane.STREAM)),
            where=Where(placement=self.mover.placement, kv=self._world.keys(batch, context)),
            is_moving=is_moving,
        )

    def _take_in(self, step: TracedStep) -> Decision | None:
        """In the thread beside; steps come one after the other."""
        self._state, decision = tune(self._state, step, self._world)
        return decision

    def _carry_out(self) -> None:
        """Begin what was decided meanwhile."""
        while self._decisions and self._decisions[0].done():
            try:
                decision = self._decisions.pop(0).result()
            except ConfigError as error:  # weights are where they were, and serve
                logger.warning("no placement of weights was found for these steps: %s", error)
                continue
            if decision is None:
                continue
            self.decisions.append(decision)
            if decision.kind in (Kind.MOVE, Kind.ROLL_BACK):
                self.mover.begin(decision.where.placement)
                self._is_fresh = True
            logger.info("%s", describe(decision, self.mover))

    def close(self) -> None:
        """End the thread."""
        self._beside.shutdown(wait=False, cancel_futures=True)


def describe(decision: Decision, mover: Mover) -> str:
    """A decision as a line: what moves, what was predicted, what came of it."""
    batch, context = decision.bucket
    words = [f"weights, step {decision.step_idx}, up to {batch} x {context} tokens: {decision.kind}, {decision.why}"]
    words.append(f"{1e3 * decision.before_s:.1f} ms a step before, {1e3 * decision.predicted_s:.1f} predicted")
    if decision.measured_s is not None:
        words.append(f"{1e3 * decision.measured_s:.1f} measured")
    if decision.kind in (Kind.MOVE, Kind.ROLL_BACK):
        words.append(f"{format_size(mover.num_waiting_bytes)} come to the GPU; now {_shares(mover.placement)}")
    if mover.num_failed:
        words.append(f"{mover.num_failed} chunks have not arrived so far")
    return "; ".join(words)


def _shares(placement: Placement) -> str:
    """Mean shares of the MLPs."""
    splits: Sequence[tuple[float, float, float]] = [
        (layer.mlp.on_gpu, layer.mlp.on_cpu, layer.mlp.streamed) for layer in placement.layers
    ]
    gpu, cpu, streamed = (100 * sum(shares) / len(splits) for shares in zip(*splits, strict=True))
    return f"MLPs {gpu:.0f} % on the GPU, {cpu:.0f} % by the CPU, {streamed:.0f} % over the link"
