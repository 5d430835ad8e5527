"""`EngineCore`: the step loop. Schedule, execute, update; nothing else.

Where the executor can send steps to an accelerator and go on, the loop is one step ahead: it plans and sends the next
one, waits for this one, and takes in what it gave while the accelerator computes on.

    host         | plan, send 2 | wait 1 | update 1 | plan, send 3 | wait 2 | update 2 | …
    accelerator  | 1                     | 2                               | 3
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ambidex.core.ids import Fallback, RequestId
from ambidex.core.request import Request
from ambidex.core.step import SampledToken, StepPlan, StepResult
from ambidex.engine.executor import Executor, Launch, LaunchedStep
from ambidex.engine.pulse import Pulse, Stage
from ambidex.engine.stats import EngineStats
from ambidex.sched.scheduler import Scheduler

AfterStep = Callable[[StepPlan, StepResult], None]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan that was sent."""

    plan: StepPlan
    step: LaunchedStep


class EngineCore:
    """Joins a scheduler (decides) and an executor (computes).

    Args:
        launch: sends a step to the accelerator; None: each step ends before the next is planned.
        after_step: is told of each step that has ended, before the next is planned; needs `launch` None.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        launch: Launch | None = None,
        after_step: AfterStep | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.pulse = Pulse()
        self.executor = executor
        self._launch = launch
        self._after_step = after_step
        self._next: _Flight | None = None

    def step(self) -> tuple[list[Request], Mapping[RequestId, SampledToken]]:
        """Run one step; returns the requests that got a token or ended, and the tokens."""
        flight, self._next = self._next, None
        if flight is None:
            self.pulse.enter(Stage.SCHEDULE)
            plan = self.scheduler.schedule()
        else:
            plan = flight.plan
        self.pulse.enter(Stage.EXECUTE)
        try:
            result = self._carry_out(plan, flight)
        except BaseException as error:  # Ctrl-C, too: the books are closed before it goes on
            self._next = None  # its requests are among those that fail
            self.scheduler.withdraw()
            self.scheduler.update(plan, _failed(plan, error))
            raise
        self.pulse.enter(Stage.UPDATE)
        changed = self.scheduler.update(plan, result)
        if flight is not None:  # what was computed for requests that had ended is nobody's
            result = replace(result, tokens=_tokens_of(changed, result))
        self.stats.record(plan, result, changed)
        self.stats.record_scheduling(
            num_preemptions=self.scheduler.num_preemptions,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            cache=self.scheduler.cache_stats(),
            hot=self.scheduler.hot_figures,
        )
        self.stats.note_fallback(Fallback.SMALLER_CHUNKS, self.scheduler.num_smaller_chunks)
        if result.tokens:
            self.pulse.note_token()
        if self._after_step is not None:
            self._after_step(plan, result)
        return changed, result.tokens

    def _carry_out(self, plan: StepPlan, flight: _Flight | None) -> StepResult:
        """The result of a plan, which may have been sent already; meanwhile the next one is sent if it can be."""
        step = flight.step if flight is not None else self._launch(plan) if self._launch is not None else None
        if step is None:
            return self.executor.execute(plan)
        self._send_next()
        return step.wait()

    def _send_next(self) -> None:
        assert self._launch is not None, "a step was sent"
        plan = self.scheduler.schedule_ahead()
        if plan is None:
            return
        step = self._launch(plan)
        if step is None:
            self.scheduler.withdraw()
        else:
            self._next = _Flight(plan, step)


def _tokens_of(requests: Sequence[Request], result: StepResult) -> dict[RequestId, SampledToken]:
    ids = [request.request_id for request in requests]
    return {request_id: result.tokens[request_id] for request_id in ids if request_id in result.tokens}


def _failed(plan: StepPlan, error: BaseException) -> StepResult:
    reason = f"the step was cut short: {type(error).__name__} {error}".rstrip()
    return StepResult(
        failures={request.request_id: reason for request in plan.requests},
        failed_moves=tuple(move.move_id for move in plan.moves),
    )
