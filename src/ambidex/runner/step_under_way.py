"""`StepUnderWay`: a captured step in which other lanes have a part, from its launch to its end.

    main thread    prepare i + 1 … | wait for i | launch i + 1 | answers of i … prepare i + 2 …
    lane thread                      answers i                   answers i + 1
    accelerator    i ……………………………………………………… | i + 1 ………………………………………………………………

The words of a step serve the next one, too, so that this is launched when its predecessor has ended and no earlier; but
by then all is ready, and what the predecessor gave is taken in while the next one runs.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ambidex.core.errors import LaneError
from ambidex.core.ids import Lane
from ambidex.core.step import SelectionFigures
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.storage.lane_thread import WorkBeside
from ambidex.storage.step_watch import WatchedStep


class StepUnderWay:
    """A step that was launched; see `runner.decode.LaunchedDecode`.

    Args:
        work: the CPU's part; None: it has none.
        watched: says when the accelerator does not come to its end.
        watching: is closed when the step has ended.
        follow: called once it was answered.
        release: ends all waits of the step, if the CPU's part breaks off.
        wait_here: comes back when the accelerator has come to its end.
    """

    def __init__(
        self,
        work: WorkBeside | None,
        watched: WatchedStep,
        watching: ExitStack,
        follow: Callable[[], None],
        release: Callable[[], None],
        wait_here: Callable[[], None],
    ) -> None:
        self._work = work
        self._watched = watched
        self._watching = watching
        self._follow = follow
        self._release = release
        self._wait_here = wait_here
        self._copy: ChosenCopy | None = None
        self._error: Exception | None = None
        self.has_ended = False
        """Its end was waited for."""
        self.lane_bytes: Mapping[Lane, int] = {}
        self.selection: SelectionFigures | None = None

    def end(self) -> None:
        """Return when the step has ended on all its lanes, and its tokens have come if they are under way.

        Raises:
            LaneError: the lanes lost each other; again at each call, as is whatever else went wrong.
        """
        if not self.has_ended:
            try:
                self._await_lane()
                self._await_accelerator()
            except BaseException:  # Ctrl-C: who needs its end next waits again
                self._watched.mark_alone()
                raise
            self.has_ended = True
            self._watching.close()
            if self._error is None:
                self._take_in()
        if self._error is not None:
            raise self._error

    def _await_lane(self) -> None:
        self._watched.mark_awaited()
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:
            self._error = error
            self._release()  # the accelerator may wait for the stream lane, which waits for it

    def _await_accelerator(self) -> None:
        """Its own part is all that is left, or a lane that has no limit of its own."""
        try:
            self._watched.wait_end(self._wait_here if self._copy is None else self._copy.wait_here)
        except LaneError as error:
            self._error = self._error or error

    def _take_in(self) -> None:
        try:
            self._follow()
        except Exception as error:  # a fault of ours, which whoever launches the next step must not keep for himself
            self._error = error

    def bring(self, copy: ChosenCopy) -> None:
        """Name where the tokens come, which were launched behind the step."""
        self._copy, self.lane_bytes, self.selection = copy, copy.lane_bytes, copy.selection

    def wait(self) -> list[int]:
        """The likeliest token of each request, −1 where logits are not finite, once the step has ended.

        Raises:
            LaneError: see `end`.
        """
        self.end()
        assert self._copy is not None, "the tokens were asked for"
        return self._copy.wait()
