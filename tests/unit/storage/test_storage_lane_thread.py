"""`beside`: the other lane's thread has ended when the caller goes on, however it does."""

import threading

import pytest

from ambidex.storage.lane_thread import beside


def test_ctrl_c_while_the_thread_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on waiting for a step that was not launched, and answered the next one from keys of the last."""
    released, has_ended = threading.Event(), threading.Event()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    def work() -> None:
        if released.wait(30):
            has_ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), beside(work, release=released.set, mark_launched=lambda: None):
        pass
    assert has_ended.is_set()


def test_a_thread_that_cannot_be_started_is_the_error_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with (
        pytest.raises(RuntimeError, match="can't start new thread"),
        beside(lambda: None, release=lambda: None, mark_launched=lambda: None),
    ):
        pass
