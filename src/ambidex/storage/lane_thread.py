"""`beside`: one lane's part of a step in another thread, while the caller launches the other's."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(
    work: Callable[[], None], *, release: Callable[[], None], mark_launched: Callable[[], None]
) -> Iterator[None]:
    """Run `work` in another thread, and wait for its end behind the block.

    Args:
        release: ends the waits of `work` if the block breaks off.
        mark_launched: called when the block has ended, however it did.
    Raises:
        What `work` raises, unless the block did.
    """
    other = WorkBeside(work)
    try:
        other.start()
        yield
    except BaseException:
        release()  # what was not launched will never ask: the lane need not wait for it
        mark_launched()
        other.give_up()
        raise
    mark_launched()
    other.wait()


class WorkBeside:
    """Work that another thread does, once. Threads are kept for the next steps: starting one takes longer than a
    layer."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = _LaneWork(work)
        self._thread: _LaneThread | None = None

    def start(self) -> None:
        """Give it to a thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._thread = _take_thread()
        self._thread.jobs.put(self._work)

    def give_up(self) -> None:
        """If it has not begun, it never will; else it has ended when this returns. What it raises is nobody's."""
        if not self._work.cancel():
            self._await_end()

    def wait(self) -> None:
        """Return when it has ended; again and again.

        Raises:
            What it raised.
        """
        self._await_end()
        if self._work.failure is not None:
            raise self._work.failure

    def _await_end(self) -> None:
        self._work.has_ended.wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            _idle.append(thread)


class _LaneWork:
    """Work that is done once, or, if it is given up before it begins, never."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._is_taken = False
        self.has_ended = threading.Event()
        self.failure: BaseException | None = None

    def cancel(self) -> bool:
        """Give it up; False: it has begun."""
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
        return not was_taken

    def run(self) -> None:
        """Do it, unless it was given up."""
        if not self.cancel():
            return
        try:
            self._work()
        except BaseException as error:  # handed to who waits for the end
            self.failure = error
        finally:
            self.has_ended.set()


class _LaneThread:
    """A thread that does jobs; of one that was interrupted while it got a job nobody knows any more, and it waits."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_LaneWork] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self.jobs,), name="ambidex-cpu-lane", daemon=True).start()


def _take_thread() -> _LaneThread:
    try:
        return _idle.pop()
    except IndexError:
        return _LaneThread()


def _work(jobs: "queue.SimpleQueue[_LaneWork]") -> None:
    while True:
        job = jobs.get()
        job.run()
        del job  # it refers to its owner, which could else not be given up


_idle: list[_LaneThread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads
