"""The step loop with a timeline: the same loop, seen from around it. Made only when a tracer keeps what it is told."""

import time
from collections.abc import Callable, Mapping

from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.request import Request
from ambidex.core.step import SampledToken, StepPlan, StepResult
from ambidex.core.trace import Tracer, Track
from ambidex.engine.core import AfterStep, EngineCore
from ambidex.engine.executor import Executor
from ambidex.sched.scheduler import Scheduler


class TracedExecutor:
    """Another executor, whose last execution it remembers: when it was, the plan, and the result if there was one."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plan: StepPlan | None = None
        self.result: StepResult | None = None
        self.start_ns = self.end_ns = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """As the other one."""
        self.plan, self.result = plan, None
        self.start_ns = time.perf_counter_ns()
        try:
            self.result = self._executor.execute(plan)
        finally:
            self.end_ns = time.perf_counter_ns()
        return self.result


class TracedCore(EngineCore):
    """Says of each step: its spans `schedule`, `execute` and `update`, and how much is in use after it.

    Args:
        kv_bytes: bytes that requests hold on each tier now.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        tracer: Tracer,
        kv_bytes: Callable[[], Mapping[Tier, int]],
        after_step: AfterStep | None = None,
    ) -> None:
        self._traced = TracedExecutor(executor)
        super().__init__(scheduler=scheduler, executor=self._traced, after_step=after_step)
        self._tracer = tracer
        self._used_bytes = kv_bytes
        self._num_steps = 0

    def step(self) -> tuple[list[Request], Mapping[RequestId, SampledToken]]:
        """Run one step; also one that is cut short is told."""
        self._traced.plan = None
        start_ns = time.perf_counter_ns()
        try:
            return super().step()
        finally:
            self._tell(start_ns, time.perf_counter_ns())

    def _tell(self, start_ns: int, end_ns: int) -> None:
        executed, tracer = self._traced, self._tracer
        tracer.add_span(Track.STEPS, f"step {self._num_steps}", start_ns, end_ns)
        self._num_steps += 1
        if executed.plan is not None:
            tracer.add_span(Track.STEPS, "schedule", start_ns, executed.start_ns)
            tracer.add_span(
                Track.STEPS, "execute", executed.start_ns, executed.end_ns, _args(executed.plan, executed.result)
            )
            tracer.add_span(Track.STEPS, "update", executed.end_ns, end_ns)
        running, waiting = self.scheduler.num_running, self.scheduler.num_waiting
        tracer.add_counters("requests", end_ns, {"running": running, "waiting": waiting})
        tracer.add_counters("KV bytes", end_ns, {tier.value: size for tier, size in self._used_bytes().items()})
        lanes = executed.result.lane_bytes if executed.result is not None else {}
        tracer.add_counters("lane bytes", end_ns, {lane.value: lanes.get(lane, 0) for lane in Lane})
        tracer.flush()


def _args(plan: StepPlan, result: StepResult | None) -> dict[str, int | str]:
    """Sizes of a step, shown when its span is clicked."""
    sizes: dict[str, int | str] = {
        "requests": len(plan.requests), "tokens": plan.num_tokens, "moves": len(plan.moves),
    }  # fmt: skip
    if result is None:
        return {**sizes, "end": "cut short"}
    return {**sizes, "failures": len(result.failures), "replayed": int(result.is_replayed)}
