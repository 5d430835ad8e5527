"""`StepUnderWay`: who waits for what at the end of a step."""

from contextlib import ExitStack

import pytest

from ambidex.core.errors import LaneError
from ambidex.runner.step_under_way import StepUnderWay
from ambidex.storage.lane_thread import WorkBeside


def make_step(error: Exception | None, events: list[str]) -> StepUnderWay:
    def answer() -> None:
        if error is not None:
            raise error

    work, watching = WorkBeside(answer), ExitStack()
    watching.callback(lambda: events.append("not watched"))
    work.start()
    return StepUnderWay(work, watching, lambda: events.append("followed"), lambda: events.append("released"))


def test_what_follows_comes_once() -> None:
    events: list[str] = []
    step = make_step(None, events)
    assert not step.has_ended
    step.end()
    step.end()
    assert step.has_ended
    assert events == ["not watched", "followed"]


@pytest.mark.parametrize("error", [LaneError("no queries came"), RuntimeError("a pool has no threads")])
def test_an_answer_that_breaks_off_ends_the_waits_of_all_lanes(error: Exception) -> None:
    """Bug: words of the stream lane were left as they were, and the accelerator's step without an end."""
    events: list[str] = []
    step = make_step(error, events)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            step.end()
    assert step.has_ended
    assert events == ["released", "not watched"]
