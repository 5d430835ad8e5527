"""`StepWatch`: a step that never ends is noticed, though its own thread may be stuck in a call of the driver.

Lanes wait for each other with limits of their own. But a launch may wait for the device as well (a kernel or a graph
that is loaded waits for all its streams), and the device waits for words without a limit: the thread that would set
them and look at the clock is the one that is stuck. So another thread looks.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ambidex.core.errors import LaneError
from ambidex.storage.words import WAIT_LIMIT_S

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Between two looks; a step costs nothing but two attributes."""


class WatchedStep:
    """A step under way.

    Args:
        what: the step, for people.
        describe: says which lanes have done which part of it; as long as that changes, nothing is stuck.
        release: ends all its waits.
    """

    def __init__(self, what: str, *, describe: Callable[[], str], release: Callable[[], None], limit_s: float) -> None:
        self._what, self._describe, self._release = what, describe, release
        self._limit_s = limit_s
        self._lock = threading.Lock()  # waits are ended while somebody is held up by them, or not at all
        self._end = time.monotonic() + limit_s
        self._state = ""
        self._is_alone = False
        self._holds_up = True
        self._lost: str | None = None

    def mark_launched(self) -> None:
        """The driver has taken it all; from now on only words are said about it, its lanes have limits of their own.

        Raises:
            LaneError: not in time; its waits were ended, so that the launch came back. What it gives is worthless.
        """
        with self._lock:
            self._holds_up = False
        if self._lost is not None:
            raise LaneError(
                f"the driver did not take {self._what} within {self._limit_s:.0f} s; its waits were ended. {self._lost}"
            )

    def mark_alone(self) -> None:
        """Its thread does other things: it may have ended long ago, and nothing is said until somebody waits for it."""
        with self._lock:
            self._is_alone = True

    def mark_awaited(self) -> None:
        """Somebody waits for its lanes."""
        with self._lock:
            self._is_alone, self._end = False, time.monotonic() + self._limit_s

    def wait_end(self, wait: Callable[[], None]) -> None:
        """Wait for the accelerator, where all other lanes have ended or have no limit of their own.

        Args:
            wait: comes back when the accelerator has come to the end of the step.
        Raises:
            LaneError: no lane went on for the limit; its waits were ended, so that it came back. What it gives is
                worthless.
        """
        with self._lock:
            self._is_alone, self._end = False, time.monotonic() + self._limit_s
            self._holds_up = True
        try:
            wait()
        finally:
            with self._lock:
                self._holds_up = False
        if self._lost is not None:
            raise LaneError(
                f"the accelerator did not end {self._what}: no lane went on for {self._limit_s:.0f} s; its waits were "
                f"ended. {self._lost}"
            )

    def look(self) -> None:
        """End the waits of a step that holds up its thread and stands still; of another one that does, only say it."""
        with self._lock:
            if self._is_alone or self._end == float("inf"):
                return
            state, now = self._describe(), time.monotonic()
            if state != self._state:
                self._state, self._end = state, now + self._limit_s
            if now < self._end:
                return
            self._end = float("inf")
            if self._holds_up:
                self._lost = state
                self._release()
            else:
                logger.warning("%s takes longer than %.0f s. %s", self._what, self._limit_s, state)


class StepWatch:
    """Watches the steps of one engine, one at a time.

    Args:
        limit_s: for which a step that holds up its thread may stand still; also when the log says it of others.
    """

    def __init__(self, *, limit_s: float = WAIT_LIMIT_S, look_s: float = _LOOK_S) -> None:
        self._limit_s, self._look_s = limit_s, look_s
        self._step: WatchedStep | None = None
        self._has_thread = False

    @contextmanager
    def watching(self, what: str, *, describe: Callable[[], str], release: Callable[[], None]) -> Iterator[WatchedStep]:
        """Watch the step that is launched inside; see `WatchedStep`."""
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(
                target=_keep_looking, args=(weakref.ref(self), self._look_s), name="ambidex-step-watch", daemon=True
            ).start()
        step = WatchedStep(what, describe=describe, release=release, limit_s=self._limit_s)
        self._step = step
        try:
            yield step
        finally:
            if self._step is step:
                self._step = None

    def look(self) -> None:
        """Look at the step under way, if there is one."""
        step = self._step
        if step is not None:
            step.look()


def _keep_looking(watch: "weakref.ref[StepWatch]", look_s: float) -> None:
    while (owner := watch()) is not None:
        owner.look()
        del owner
        time.sleep(look_s)
