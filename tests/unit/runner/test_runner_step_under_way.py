"""`StepUnderWay`: who waits for what at the end of a step."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from ambidex.core.errors import InternalError, LaneError
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.runner.step_under_way import StepUnderWay
from ambidex.storage.lane_thread import WorkBeside
from ambidex.storage.step_watch import StepWatch


class LateTokens(ChosenCopy):
    """Tokens that come when a word is set.

    Args:
        word: that the accelerator waits for.
    """

    def __init__(self, word: threading.Event) -> None:
        super().__init__(1, torch.device("cpu"))
        self._word = word

    def wait_here(self) -> None:
        assert self._word.wait(30), "nobody ended the wait"


def make_step(
    error: Exception | None,
    events: list[str],
    *,
    follow: Callable[[], None] | None = None,
    word: threading.Event | None = None,
    watch: StepWatch | None = None,
    has_tokens: bool = True,
) -> StepUnderWay:
    """A step whose CPU lane raises an error.

    Args:
        follow: what is done behind it.
        word: that its end waits for, which its release sets.
        has_tokens: their copy is behind it.
    """

    def answer() -> None:
        if error is not None:
            raise error

    def release() -> None:
        events.append("released")
        if word is not None:
            word.set()

    work, watching = WorkBeside(answer), ExitStack()
    watching.callback(lambda: events.append("not watched"))
    watched = watching.enter_context(
        (watch or StepWatch()).watching("a step", describe=lambda: "3 of 4 have arrived", release=release)
    )
    watched.mark_launched()
    watched.mark_alone()
    work.start()

    def wait_here() -> None:
        if word is not None:
            word.wait()

    step = StepUnderWay(work, watched, watching, follow or (lambda: events.append("followed")), release, wait_here)
    if word is not None and has_tokens:
        step.bring(LateTokens(word))
    return step


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


@pytest.mark.parametrize("has_tokens", [True, False])
def test_an_accelerator_that_does_not_end_is_released_and_says_how_far_its_lanes_are(has_tokens: bool) -> None:
    """Bug: nobody watched it once the CPU lane had ended, so blocks that did not arrive held the engine up for ever; at
    first only where tokens were under way, so a last layer's blocks still did, in a step that was not sent ahead."""
    events: list[str] = []
    watch = StepWatch(limit_s=0.05, look_s=0.01)
    step = make_step(None, events, word=threading.Event(), watch=watch, has_tokens=has_tokens)
    for _ in range(2):
        with pytest.raises(LaneError, match=r"did not end a step: .* its waits were ended\. 3 of 4 have arrived"):
            step.end()
    assert step.has_ended
    assert events == ["released", "not watched"]


def test_a_fault_in_what_follows_is_raised_to_everybody() -> None:
    """Bug: only to who came first, the step behind it, which kept it: the engine went on, each step for itself."""

    def fail() -> None:
        raise InternalError("a share above 1")

    step = make_step(None, [], follow=fail)
    for _ in range(2):
        with pytest.raises(InternalError, match="a share above 1"):
            step.end()


def test_a_wait_that_was_interrupted_goes_on_and_is_watched_again() -> None:
    events: list[str] = []
    step = make_step(None, events, word=threading.Event(), watch=StepWatch(limit_s=0.05, look_s=0.01))
    tokens = step._copy
    assert isinstance(tokens, LateTokens)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "wait_here", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step.end()
    assert not step.has_ended
    with pytest.raises(LaneError, match="did not end a step"):
        step.end()
    assert events == ["released", "not watched"]
