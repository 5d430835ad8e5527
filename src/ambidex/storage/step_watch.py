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
        describe: says which lanes have done which part of it.
        release: ends all its waits.
    """

    def __init__(self, what: str, *, describe: Callable[[], str], release: Callable[[], None], limit_s: float) -> None:
        self._what, self._describe, self._release = what, describe, release
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s
        self._is_launched = False
        self._lost = ""

    def mark_launched(self) -> None:
        """The driver has taken it all; from now on only words are said about it, its lanes have limits of their own.

        Raises:
            LaneError: not in time; its waits were ended, so that the launch came back. What it gives is worthless.
        """
        self._is_launched = True
        if self._lost:
            raise LaneError(
                f"the driver did not take {self._what} within {self._limit_s:.0f} s; its waits were ended. {self._lost}"
            )

    def look(self) -> None:
        """End the waits of a step whose launch takes too long; say it of one that takes long otherwise."""
        if time.monotonic() < self._end:
            return
        self._end = float("inf")
        if self._is_launched:
            logger.warning("%s takes longer than %.0f s. %s", self._what, self._limit_s, self._describe())
            return
        self._lost = self._describe()
        self._release()


class StepWatch:
    """Watches the steps of one engine, one at a time.

    Args:
        limit_s: of a launch; also when the log says that a step takes long.
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
        self._step = WatchedStep(what, describe=describe, release=release, limit_s=self._limit_s)
        try:
            yield self._step
        finally:
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
