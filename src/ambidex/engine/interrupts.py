"""`holding_interrupts`: Ctrl-C comes after a piece of work that must not be left half done, not in its middle.

Python raises KeyboardInterrupt between any two instructions of the main thread. In the middle of a step that would
leave blocks that nobody owns, a plan that never comes back, or an accelerator that waits for an answer of the CPU.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Run the block as a whole: a Ctrl-C meanwhile is handled as ever when it has ended, a second one at once.

    Nothing is done in other threads, which Ctrl-C never reaches; within such a block; and where the program has left
    Ctrl-C to the system.

    Raises:
        KeyboardInterrupt: at the end of the block, or whatever else the program's handler does.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler) or isinstance(getattr(handler, "__self__", None), _Held):
        yield
        return
    held = _Held(handler)
    signal.signal(signal.SIGINT, held.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held.is_set:
            handler(signal.SIGINT, held.frame)


class _Held:
    """A Ctrl-C that waits for the end of the block; one more, and both are handled."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self.is_set = False
        self.frame: FrameType | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile."""
        if not self.is_set:
            self.is_set, self.frame = True, frame
            return
        self.is_set = False
        self._handler(number, self.frame)
        self._handler(number, frame)
