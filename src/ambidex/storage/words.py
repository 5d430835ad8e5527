"""Words in host memory by which the accelerator, its copies and the CPU's threads say how far they are."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor

from ambidex.core.errors import LaneError
from ambidex.kernels.cuda import stream_words
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.lane_clock import LaneClock, Part

WAIT_LIMIT_S: Final = 20.0
"""How long one side waits for another: far longer than any layer takes, so only a fault is cut off."""
_HOST_POLL_S: Final = 20e-6


class Words(Protocol):
    """Words int32 in host memory, as the accelerator's side writes and waits for them."""

    def write(self, word: Tensor) -> None:
        """Set a word to 1 behind all that was launched before."""
        ...

    def wait(self, word: Tensor) -> None:
        """Let what is launched next wait until the word is 1."""
        ...


@contextmanager
def naming(lane: str) -> Iterator[None]:
    """Let an error of a wait inside say which lane did not come, and with what."""
    try:
        yield
    except LaneError as error:
        raise LaneError(f"{lane}: {error}") from error


class StepFence:
    """Where the accelerator's last launched step ends: its words may become 0 again only behind that.

    Args:
        is_cuda: steps are launched; else they run in the caller's thread and have ended when they return.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._launched = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here

    def mark(self) -> None:
        """Say that a whole step has been launched."""
        if self._launched is not None:
            self._launched.record()

    def wait(self, limit_s: float, describe: Callable[[], str]) -> None:
        """Return when the step has ended.

        Args:
            describe: says how far its words are.
        Raises:
            LaneError: not in time: its waits would never end if their words became 0.
        """
        end = time.monotonic() + limit_s
        while self._launched is not None and not self._launched.query():  # type: ignore[no-untyped-call]  # likewise
            if time.monotonic() > end:
                raise LaneError(f"the accelerator did not end its last step within {limit_s:.0f} s: {describe()}")

    def wait_here(self) -> None:
        """Return when the step has ended, however long that takes."""
        if self._launched is not None:
            self._launched.synchronize()


class KernelWords:
    """Words of the current CUDA stream, by kernels (`kernels/triton/words.py`): for steps that are captured."""

    def __init__(self) -> None:
        from ambidex.kernels.triton import words

        self._kernels = words
        self._there: dict[int, Tensor] = {}  # by address; whoever has the words has these
        # Both kernels are loaded now: that waits for all streams, one of which may soon wait for a word.
        ready = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self.write(ready)
        self.wait(ready)
        torch.cuda.current_stream().synchronize()
        self._there.clear()

    def write(self, word: Tensor) -> None:
        self._kernels.write_word(self._find(word))

    def wait(self, word: Tensor) -> None:
        self._kernels.wait_word(self._find(word))

    def _find(self, word: Tensor) -> Tensor:
        """The word as the GPU sees it."""
        address = word.data_ptr()
        if address not in self._there:
            self._there[address] = view_on_gpu(word)
        return self._there[address]


class StreamWords:
    """Words of a CUDA stream, by stream memory operations: for streams of copies, which need no kernel.

    Args:
        stream: its handle; None: the current one.
    """

    def __init__(self, stream: int | None = None) -> None:
        self._stream = stream

    def write(self, word: Tensor) -> None:
        stream_words.write_word(word, 1, self._stream)

    def wait(self, word: Tensor) -> None:
        stream_words.wait_word(word, 1, self._stream)


class TimedWords:
    """Other words, whose waits count as the accelerator's idle time."""

    def __init__(self, words: Words, clock: LaneClock) -> None:
        self._words, self._clock = words, clock

    def write(self, word: Tensor) -> None:
        self._words.write(word)

    def wait(self, word: Tensor) -> None:
        with self._clock.span(Part.IDLE):
            self._words.wait(word)


class HostWords:
    """Words when the accelerator is the CPU: nothing is launched, so the caller itself writes and waits."""

    def write(self, word: Tensor) -> None:
        word.fill_(1)

    def wait(self, word: Tensor) -> None:
        end = time.monotonic() + WAIT_LIMIT_S
        while int(word) == 0:
            if time.monotonic() > end:
                raise LaneError(f"another lane did not do its part within {WAIT_LIMIT_S:.0f} s")
            time.sleep(_HOST_POLL_S)
