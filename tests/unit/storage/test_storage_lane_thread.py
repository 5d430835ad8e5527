"""`beside`: the other lane's work has ended when the caller goes on, however it does."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ambidex.storage import lane_thread
from ambidex.storage.lane_thread import beside


def nothing() -> None:
    """What need not be done."""


def run(work: Callable[[], None]) -> None:
    with beside(work, release=nothing, mark_launched=nothing):
        pass


def test_ctrl_c_while_the_work_is_handed_over_leaves_none_of_it_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on waiting for a step that was not launched, and answered the next one from keys of the last."""
    released, begun, num_active = threading.Event(), threading.Event(), 0

    class Interrupted(queue.SimpleQueue[Any]):
        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            super().put(item, *args, **kwargs)
            assert begun.wait(30)
            raise KeyboardInterrupt

    def work() -> None:
        nonlocal num_active
        num_active += 1
        begun.set()
        assert released.wait(30)
        num_active -= 1

    monkeypatch.setattr(lane_thread, "_idle", [])
    monkeypatch.setattr("ambidex.storage.lane_thread.queue.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt), beside(work, release=released.set, mark_launched=nothing):
        pass
    assert begun.is_set()
    assert num_active == 0


def test_work_that_has_not_begun_when_the_block_breaks_off_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(queue.SimpleQueue[Any]):
        def get(self, *args: Any, **kwargs: Any) -> Any:
            job = super().get(*args, **kwargs)
            assert may_begin.wait(30)
            return job

    may_begin, done = threading.Event(), []
    monkeypatch.setattr(lane_thread, "_idle", [])
    monkeypatch.setattr("ambidex.storage.lane_thread.queue.SimpleQueue", Held)
    with pytest.raises(ZeroDivisionError), beside(lambda: done.append(1), release=nothing, mark_launched=nothing):
        raise ZeroDivisionError
    may_begin.set()
    run(nothing)
    assert not done


def test_a_thread_that_cannot_be_started_is_the_error_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lane_thread, "_idle", [])
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run(nothing)


def test_what_the_work_raises_is_raised_and_its_thread_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_thread, "_idle", [])
    threads: list[int] = []

    def fail() -> None:
        threads.append(threading.get_ident())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fail)
    run(lambda: threads.append(threading.get_ident()))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_steps_beside_each_other_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_thread, "_idle", [])
    both = threading.Barrier(2, timeout=30)

    def wait() -> None:
        both.wait()

    with beside(wait, release=nothing, mark_launched=nothing):
        run(wait)
    assert len(lane_thread._idle) == 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    run(nothing)
    child = os.fork()
    if child == 0:
        run(nothing)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
