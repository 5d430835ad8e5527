"""Ctrl-C while an answer runs: it asks to stop, and the loop over the answer looks."""

import signal
from types import FrameType, TracebackType


class Interrupt:
    """While entered (in the main thread), the first Ctrl-C sets `is_set`; one more raises KeyboardInterrupt.

    So an answer ends between two steps, and what it has said stays.
    """

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
