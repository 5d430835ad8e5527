"""`EngineCore`: the step loop. Schedule, execute, update; nothing else."""

from collections.abc import Mapping

from ambidex.core.ids import Fallback, RequestId
from ambidex.core.request import Request
from ambidex.core.step import SampledToken, StepPlan, StepResult
from ambidex.engine.executor import Executor
from ambidex.engine.pulse import Pulse, Stage
from ambidex.engine.stats import EngineStats
from ambidex.sched.scheduler import Scheduler


class EngineCore:
    """Joins a scheduler (decides) and an executor (computes)."""

    def __init__(self, *, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.pulse = Pulse()
        self.executor = executor

    def step(self) -> tuple[list[Request], Mapping[RequestId, SampledToken]]:
        """Run one step; returns the requests that got a token or ended, and the tokens."""
        self.pulse.enter(Stage.SCHEDULE)
        plan = self.scheduler.schedule()
        self.pulse.enter(Stage.EXECUTE)
        try:
            result = self.executor.execute(plan)
        except BaseException as error:  # Ctrl-C, too: the books are closed before it goes on
            self.scheduler.update(plan, _failed(plan, error))
            raise
        self.pulse.enter(Stage.UPDATE)
        changed = self.scheduler.update(plan, result)
        self.stats.record(plan, result, changed)
        self.stats.record_scheduling(
            num_preemptions=self.scheduler.num_preemptions,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            cache=self.scheduler.cache_stats(),
        )
        self.stats.note_fallback(Fallback.SMALLER_CHUNKS, self.scheduler.num_smaller_chunks)
        if result.tokens:
            self.pulse.note_token()
        return changed, result.tokens


def _failed(plan: StepPlan, error: BaseException) -> StepResult:
    reason = f"the step was cut short: {type(error).__name__} {error}".rstrip()
    return StepResult(
        failures={request.request_id: reason for request in plan.requests},
        failed_moves=tuple(move.move_id for move in plan.moves),
    )
