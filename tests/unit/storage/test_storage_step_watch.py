"""`StepWatch`: a launch that is stuck comes back with an error that says how far the lanes are."""

import threading

import pytest

from ambidex.core.errors import LaneError
from ambidex.storage.step_watch import StepWatch


def launch(watch: StepWatch, word: threading.Event) -> None:
    """A step whose launch waits for a word."""
    with watch.watching("a step of 8 rows", describe=lambda: "3 of 4 were asked", release=word.set) as step:
        assert word.wait(30), "nobody ended the wait"
        step.mark_launched()


def test_a_stuck_launch_is_released_and_says_how_far_its_lanes_are() -> None:
    with pytest.raises(LaneError, match=r"a step of 8 rows within 0 s; its waits were ended\. 3 of 4 were asked"):
        launch(StepWatch(limit_s=0.05, look_s=0.01), threading.Event())


def test_a_launched_step_is_never_released(caplog: pytest.LogCaptureFixture) -> None:
    watch = StepWatch(limit_s=0.0, look_s=30.0)
    released: list[bool] = []
    with watch.watching("a step", describe=lambda: "1 answered", release=lambda: released.append(True)) as step:
        step.mark_launched()
        watch.look()
        watch.look()
    watch.look()
    assert not released
    assert [record.getMessage() for record in caplog.records] == ["a step takes longer than 0 s. 1 answered"]


def test_a_step_whose_lanes_go_on_is_waited_for() -> None:
    watch, done, num_looks = StepWatch(limit_s=0.05, look_s=0.01), threading.Event(), 0

    def describe() -> str:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 30:
            done.set()
        return f"{num_looks} have arrived"

    with watch.watching("a step", describe=describe, release=lambda: pytest.fail("it was released")) as step:
        step.mark_launched()
        step.wait_end(lambda: None if done.wait(30) else pytest.fail("nobody looked"))


def test_nothing_is_said_of_a_step_that_nobody_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: a caller who rested between two steps found in the log that the one that had long ended took too long."""
    watch = StepWatch(limit_s=0.0, look_s=30.0)
    with watch.watching("a step", describe=lambda: "1 answered", release=lambda: None) as step:
        step.mark_launched()
        step.mark_alone()
        watch.look()
        watch.look()
        assert not caplog.records
        step.mark_awaited()
        watch.look()
        watch.look()
    assert len(caplog.records) == 1


def test_the_next_step_is_watched_though_the_last_one_s_watch_ends_later() -> None:
    watch = StepWatch(limit_s=0.0, look_s=30.0)
    released: list[int] = []
    first = watch.watching("the first", describe=str, release=lambda: released.append(1))
    first.__enter__()
    with watch.watching("the second", describe=str, release=lambda: released.append(2)):
        first.__exit__(None, None, None)
        watch.look()
    assert released == [2]


def test_the_thread_ends_with_the_watch() -> None:
    watch = StepWatch(limit_s=1.0, look_s=0.01)
    with watch.watching("a step", describe=str, release=lambda: None):
        threads = [thread for thread in threading.enumerate() if thread.name == "ambidex-step-watch"]
    assert threads
    del watch
    newest = threads[-1]
    newest.join(10)
    assert not newest.is_alive()
