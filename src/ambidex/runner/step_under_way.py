"""`StepUnderWay`: a captured step in which other lanes have a part, from its launch to its end.

    main thread    prepare i + 1 … | wait for i | launch i + 1 | answers of i … prepare i + 2 …
    lane thread                      answers i                   answers i + 1
    accelerator    i ……………………………………………………… | i + 1 ………………………………………………………………

The words of a step serve the next one, too, so that this is launched when its predecessor has ended and no earlier; but
by then all is ready, and what the predecessor gave is taken in while the next one runs.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ambidex.core.ids import Lane
from ambidex.core.step import SelectionFigures
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.storage.lane_thread import WorkBeside


class StepUnderWay:
    """A step that was launched; see `runner.decode.LaunchedDecode`.

    Args:
        work: the CPU's part; None: it has none.
        watching: is closed when the step has ended.
        follow: called once it was answered.
        release: ends all waits of the step, if the CPU's part breaks off.
    """

    def __init__(
        self, work: WorkBeside | None, watching: ExitStack, follow: Callable[[], None], release: Callable[[], None]
    ) -> None:
        self._work = work
        self._watching = watching
        self._follow = follow
        self._release = release
        self._copy: ChosenCopy | None = None
        self._error: Exception | None = None
        self.has_ended = False
        """Its end was waited for."""
        self.lane_bytes: Mapping[Lane, int] = {}
        self.selection: SelectionFigures | None = None

    def end(self) -> None:
        """Return when the lanes beside the accelerator have ended, and with tokens under way the step itself.

        Raises:
            LaneError: the lanes lost each other; again at each call, as is whatever else the CPU's part raised.
        """
        if not self.has_ended:
            try:
                if self._work is not None:
                    self._work.wait()
            except Exception as error:
                self._error = error
                self._release()  # the accelerator may wait for the stream lane, which waits for it
            finally:
                self._watching.close()
            if self._copy is not None:
                self._copy.wait_here()
            self.has_ended = True
            if self._error is None:
                self._follow()
        if self._error is not None:
            raise self._error

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
