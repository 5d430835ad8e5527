"""`EngineCore`: the step loop. Schedule, execute, update; nothing else."""

from collections.abc import Mapping

from ambidex.core.ids import RequestId
from ambidex.core.request import Request
from ambidex.core.step import SampledToken
from ambidex.engine.executor import Executor
from ambidex.engine.stats import EngineStats
from ambidex.sched.scheduler import Scheduler


class EngineCore:
    """Joins a scheduler (decides) and an executor (computes)."""

    def __init__(self, *, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._executor = executor

    def step(self) -> tuple[list[Request], Mapping[RequestId, SampledToken]]:
        """Run one step; returns the requests that got a token or ended, and the tokens."""
        plan = self.scheduler.schedule()
        result = self._executor.execute(plan)
        changed = self.scheduler.update(plan, result)
        self.stats.record(plan, result)
        return changed, result.tokens
